"""The job of the command dpo: direct preference optimization on pairs of answers (arXiv 2305.18290).

Reference log-probabilities come from the initial weights. They are computed once, before the first step. A cache keeps
them under a digest of the pairs, the weights and the trainer's numerics, for resumes and other runs. Runs identically
on every trainer rank.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron_fp8rl import supervised
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import with_ref_logprobs
from megatron_fp8rl.data.rows import cache_dir
from megatron_fp8rl.data.unchanged import DataFile, digest_of
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.trainer.frozen import FrozenPolicy
from megatron_fp8rl.types import Sample, TrainBatch

_SAMPLES_AT_ONCE = 512


class Dpo(supervised.Supervised):
    """One run on this rank. Every method is a collective over the trainer ranks."""

    samples_per_row: ClassVar[int] = 2  # chosen and rejected

    def open_data(self, stack: ExitStack) -> None:
        super().open_data(stack)
        with span("start_reference"):
            self._reference = self._reference_logprobs()

    def pack(self, samples: Sequence[Sample]) -> TrainBatch:
        """This rank's part of one update, with the reference's log-probabilities."""
        return with_ref_logprobs(super().pack(samples), self._reference)

    def _reference_logprobs(self) -> dict[str, np.ndarray]:
        """FP32 log-probabilities of the trained tokens by sample, from the cache or of the initial weights."""
        samples = [*self.data.all_samples(), *self.held_out]
        file = cache_dir() / f"{_digest(self.cfg, samples)}.reference.npy"
        ends = np.cumsum([sample.num_loss_tokens for sample in samples])
        known = np.load(file, mmap_mode="r") if self.parallel.rank == 0 and file.exists() else None
        is_known = known is not None and known.shape == (ends[-1],)
        if not self.parallel.broadcast_object(is_known):
            self.observer.message(f"computes reference log-probabilities of {len(samples) // 2:,} pairs")
            known = self._computed(samples)
            if self.parallel.rank == 0:
                partial_file = file.with_suffix(f".{os.getpid()}.npy")
                np.save(partial_file, known)
                partial_file.rename(file)
        values = self.parallel.broadcast_object(np.asarray(known) if self.parallel.rank == 0 else None)
        return dict(zip((s.name for s in samples), np.split(values, ends[:-1]), strict=True))

    def _computed(self, samples: Sequence[Sample]) -> np.ndarray:
        """Collective: the reference's log-probabilities of all samples, one after another."""
        reference, by_name = FrozenPolicy.build(self.cfg, self.parallel), {}
        for start in range(0, len(samples), _SAMPLES_AT_ONCE):
            by_name |= reference.sample_logprobs(samples[start : start + _SAMPLES_AT_ONCE])
        return np.concatenate([by_name[sample.name] for sample in samples])


def _digest(cfg: RunConfig, samples: Sequence[Sample]) -> str:
    """A name for the reference log-probabilities of these samples by the initial weights."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(cfg.model.hf_path or "")
    files = [DataFile(path) for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")])]
    numerics = [dataclasses.asdict(replace(cfg.model, hf_path=None)), dataclasses.asdict(cfg.precision)]
    numerics += [cfg.sampling.temperature, digest_of(files)]
    digest.update(json.dumps(numerics, default=str).encode())
    for sample in samples:
        digest.update(sample.token_ids.array.tobytes())
        digest.update(str([(len(part.token_ids), part.is_trained) for part in sample.segments]).encode())
    return digest.hexdigest()


run = partial(supervised.run, job=Dpo)
