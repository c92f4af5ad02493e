"""Prove a conversion: every tensor by its digest, and the model by its logits.

In:  the Hugging Face checkpoint that was converted, and what was made of it: a Megatron-Core checkpoint, a Hugging Face
     one, or one in block FP8.
Out: exit status 0 and what was proven, or the names of the tensors that differ and exit status 1.

The digests need memory for strips of rows. The logits need one model in FP32 at a time: transformers' from the source,
then the trainer's from the conversion, on the same random tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import torch
import tyro
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import SCALE, HfFolder
from checkpoint_tools.megatron_folder import MegatronFolder, is_megatron
from checkpoint_tools.strips import clip, segments, strips
from checkpoint_tools.work import Bucket, Progress, WorkOptions, fill_buckets, results
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, BLOCKWISE_POW2, QuantFormat
from megatron_fp8rl.precision.quantizers import quantize

_MAX_NAMED = 20
_FLOAT32_BYTES = 4
_POW2_MANTISSA = 0x007FFFFF


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """The Hugging Face checkpoint that was converted."""
    converted: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONVERTED")]
    """What was made of it."""
    logits: Literal["auto", "yes", "no"] = "auto"
    """Compare logits. auto does when the model fits into the free memory in FP32."""
    num_tokens: int = 64
    """Random tokens whose logits are compared."""
    tolerance: float = 1e-4
    """Largest difference of a logit, in units of the logits' standard deviation, absolutely where that is below 1."""
    seed: int = 0
    """Of the random tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < 1:
            raise ValueError(f"--num_tokens {self.num_tokens}: at least 1 is needed")


def run(options: Options) -> int:
    """The command."""
    source, converted = HfFolder.open(options.source, keep_mtp=None), open_converted(options.converted)
    source = _same_architecture(source, converted)
    wrong, num_tensors = compare_tensors(source, converted, options)
    for name in wrong[:_MAX_NAMED]:
        print(f"different: {name}")
    if wrong:
        print(f"{len(wrong)} of {num_tensors} tensors differ between {source.path} and {converted.path}")
        return 1
    print(f"{num_tensors} tensors: equal digests of what {converted.path} holds and what {source.path} becomes")
    reason = _no_logits(options, source, converted)
    if reason is not None:
        print(f"logits: not compared: {reason}")
        return 0
    difference, spread = compare_logits(source, converted, options.num_tokens, options.seed)
    if not math.isfinite(difference):
        print(
            f"logits of {options.num_tokens} random tokens in FP32 are not finite: weights of {source.path} are NaN or "
            f"infinity, which both checkpoints hold alike; hf_to_megatron names them"
        )
        return 1
    bound = options.tolerance * max(1.0, spread)
    verdict = "within" if difference <= bound else "NOT within"
    print(
        f"logits of {options.num_tokens} random tokens in FP32: max difference {difference:.2e}, {verdict} {bound:.1e} "
        f"(standard deviation of the logits {spread:.2f})"
    )
    return 0 if difference <= bound else 1


def open_converted(path: Path) -> HfFolder | MegatronFolder:
    """Either kind of checkpoint. Raises CheckpointError when it is neither, or not whole."""
    return MegatronFolder.open(path) if is_megatron(path) else HfFolder.open(path, keep_mtp=None)


def _same_architecture(source: HfFolder, converted: HfFolder | MegatronFolder) -> HfFolder:
    """The source as the conversion saw it: without multi-token prediction layers when they were left out."""
    if source.model.num_mtp_layers != converted.model.num_mtp_layers:
        source = HfFolder.open(source.path, keep_mtp=converted.model.num_mtp_layers > 0)
    ours, theirs = registry.hf_tensors(source.model), registry.hf_tensors(converted.model)
    if ours != theirs:
        odd = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise CheckpointError(converted.path, [f"{n}: {theirs.get(n)} instead of {ours.get(n)}" for n in odd])
    return source


def compare_tensors(source: HfFolder, converted: HfFolder | MegatronFolder, work: WorkOptions) -> tuple[list[str], int]:
    """(names of the tensors that differ, how many were compared)."""
    weights = registry.weights(source.model)
    sizes = ((name, 2 * torch.Size(weight.shape).numel()) for name, weight in weights.items())
    buckets = fill_buckets(sizes)
    job = Comparison(source, converted, work.memory_bytes, _fp8_format(converted))
    wrong: list[str] = []
    num_tensors = 0
    with Progress("verify", sum(bucket.num_bytes for bucket in buckets)) as progress:
        for bucket, found in results(job, buckets, work.workers):
            wrong += found["wrong"]
            num_tensors += found["num_tensors"]
            progress.advance(bucket.num_bytes)
    order = list(registry.hf_tensors(source.model))
    return sorted(wrong, key=lambda name: order.index(name.removesuffix(SCALE))), num_tensors


def _fp8_format(converted: HfFolder | MegatronFolder) -> QuantFormat | None:
    """The format of the FP8 matrices of a Hugging Face folder; None when there are none."""
    if isinstance(converted, MegatronFolder):
        return None
    scaled = [name for name in converted.entries if name.endswith(SCALE)]
    pow2 = (not (converted.stored(name).float().view(torch.int32) & _POW2_MANTISSA).any() for name in scaled)
    return None if not scaled else BLOCKWISE_POW2 if all(pow2) else BLOCKWISE_FP32


@dataclass
class Comparison:
    """The job: digests of both sides of a bucket of parameters."""

    source: HfFolder
    converted: HfFolder | MegatronFolder
    memory_bytes: int
    fp8: QuantFormat | None

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """{names of the tensors that differ, how many were compared}"""
        wanted, found = digests.Running(self.source.path), digests.Running(self.converted.path)
        for name in bucket.names:
            weight = registry.weights(self.source.model)[name]
            sides = self._megatron if isinstance(self.converted, MegatronFolder) else self._hf
            for hf_name, first, num_rows, expected, rows in sides(weight):
                wanted.add(hf_name, first, expected, num_rows)
                found.add(hf_name, first, rows, num_rows)
        wrong = [name for name, value in wanted.done.items() if found.done[name] != value]
        return {"wrong": wrong, "num_tensors": len(wanted.done)}

    def _megatron(self, weight: Weight) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
        """(name, first row, all rows, rows that are expected, rows that are there)"""
        assert isinstance(self.converted, MegatronFolder)
        whole = segments(weight, self.source.model)
        for first, end in strips(weight.shape, self.memory_bytes):
            rows = self.converted.rows(weight, first, end)
            for segment in clip(whole, first, end):
                part = rows[segment.offset : segment.offset + segment.size]
                own, shape = weight.parts[segment.part]
                for name in (own, *weight.copies):
                    expected = self.source.rows(name, segment.start, segment.stop).to(rows.dtype)
                    yield name, segment.start, shape[0], expected, part

    def _hf(self, weight: Weight) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
        assert isinstance(self.converted, HfFolder)
        for name, shape in (*weight.parts, *((copy, weight.shape) for copy in weight.copies)):
            for first, end in strips(shape, self.memory_bytes):
                rows = self.source.rows(name, first, end)
                if not self.converted.is_fp8(name):
                    yield (
                        name,
                        first,
                        shape[0],
                        rows.to(self.converted.dtype(name)),
                        self.converted.rows(name, first, end),
                    )
                    continue
                fmt = self.fp8 or BLOCKWISE_POW2
                data, scale = quantize(rows.to(torch.bfloat16), fmt)
                yield name, first, shape[0], data, self.converted.stored(name, first, end)
                block, _ = fmt.blocks((first, end), 0)
                stored = self.converted.stored(name + SCALE, block, block + len(scale))
                yield name + SCALE, block, fmt.scale_shape(shape)[0], scale, stored.float()


def _no_logits(options: Options, source: HfFolder, converted: HfFolder | MegatronFolder) -> str | None:
    """Why logits are not to be compared; None when they are."""
    if options.logits == "no":
        return "--logits no"
    if any(source.is_fp8(name) for name in source.entries if not name.endswith(SCALE)):
        return "the source is FP8, which transformers computes on a GPU only; its dequantized digests are the proof"
    if not isinstance(converted, MegatronFolder):
        if _fp8_format(converted) is not None:
            return "FP8 rounds; equal bytes of what the source rounds to are the proof"
        return "two Hugging Face folders run through the same code; their digests are the proof"
    needed = sum(torch.Size(shape).numel() for shape in registry.hf_tensors(source.model).values()) * _FLOAT32_BYTES
    available = psutil.virtual_memory().available
    if options.logits == "auto" and 1.5 * needed > available:
        return (
            f"in FP32 the model takes {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; --logits yes tries it"
        )
    return None


def compare_logits(source: HfFolder, converted: MegatronFolder, num_tokens: int, seed: int = 0) -> tuple[float, float]:
    """(largest difference of a logit, standard deviation of transformers' logits), in FP32 on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, source.model.vocab_size, (num_tokens,), generator=generator)
    reference = _quietly(lambda: _transformers_logits(source.path, tokens))
    ours = _quietly(lambda: _trainer_logits(source.model, converted.path, tokens))
    return (ours - reference).abs().max().item(), reference.std().item()


@torch.no_grad()
def _transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # grouped products need rows of 16 bytes
    ).eval()
    return model(tokens[None], use_cache=False).logits[0]


def _trainer_logits(model: ModelConfig, folder: Path, tokens: Tensor) -> Tensor:
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.trainer.single_rank import float32_logits

    return float32_logits(replace(model, num_mtp_layers=0), folder, tokens)


def _quietly(work: Callable[[], Tensor]) -> Tensor:
    """Without the warnings of libraries about packages that are not needed here."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return work()
        finally:
            logging.disable(logging.NOTSET)
