"""Check a conversion: the digest of every tensor, and the logits of the model.

In:  the source in Hugging Face format and its conversion: a Megatron-Core, Hugging Face or block FP8 checkpoint.
Out: exit status 0, or the names of the tensors that differ and exit status 1.

Logits need one model in FP32 at a time: transformers' from the source, then the trainer's from the conversion.
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

from checkpoint_tools.digests import TensorDigests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.megatron_folder import MegatronFolder, is_megatron
from checkpoint_tools.row_chunks import clip, row_chunks, segments
from checkpoint_tools.workers import Bucket, Progress, WorkerOptions, fill_buckets, require_at_least, run_jobs
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.model_files import SCALE
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, BLOCKWISE_POW2, QuantFormat
from megatron_fp8rl.precision.quantizers import quantize

_MAX_SHOWN = 20
_FLOAT32_BYTES = 4
_POW2_MANTISSA = 0x007FFFFF


@dataclass(frozen=True, kw_only=True)
class Options(WorkerOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint that was converted."""
    converted: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONVERTED")]
    """Its conversion."""
    logits: Literal["auto", "yes", "no"] = "auto"
    """Compare logits; auto compares them when the model in FP32 fits into free memory."""
    num_tokens: int = 64
    """Number of random tokens."""
    tolerance: float = 1e-4
    """Largest allowed difference of a logit, times the logits' standard deviation if that is above 1."""
    seed: int = 0
    """Seed of the random tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("num_tokens", self.num_tokens, 1)


def run(options: Options) -> int:
    """Compare and print the result; returns 0 when all is equal, else 1."""
    source, path = HfFolder.open(options.source, keep_mtp=None), options.converted
    converted = MegatronFolder.open(path) if is_megatron(path) else HfFolder.open(path, keep_mtp=None)
    source = _same_architecture(source, converted)
    different, num_tensors = compare_tensors(source, converted, options)
    for name in different[:_MAX_SHOWN]:
        print(f"different: {name}")
    if different:
        print(f"{len(different)} of {num_tensors} tensors differ between {source.path} and {converted.path}")
        return 1
    print(f"{num_tensors} tensors: the digests of {converted.path} equal those of the converted {source.path}")
    reason = _no_logits(options, source, converted)
    if reason is not None:
        print(f"logits: not compared: {reason}")
        return 0
    difference, spread = compare_logits(source, converted, options.num_tokens, options.seed)
    if not math.isfinite(difference):
        print(
            f"logits of {options.num_tokens} random tokens in FP32 are not finite: both checkpoints have the same "
            "NaN or infinity as weights; hf_to_megatron lists the tensors"
        )
        return 1
    bound = options.tolerance * max(1.0, spread)
    status = "within" if difference <= bound else "NOT within"
    print(
        f"logits of {options.num_tokens} random tokens in FP32: max difference {difference:.2e}, {status} {bound:.1e} "
        f"(standard deviation of the logits {spread:.2f})"
    )
    return 0 if difference <= bound else 1


def _same_architecture(source: HfFolder, converted: HfFolder | MegatronFolder) -> HfFolder:
    """The source, without multi-token prediction layers if the conversion skipped them."""
    if source.model.num_mtp_layers != converted.model.num_mtp_layers:
        source = HfFolder.open(source.path, keep_mtp=converted.model.num_mtp_layers > 0)
    expected, actual = registry.hf_tensors(source.model), registry.hf_tensors(converted.model)
    different = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if different:
        problems = [f"{name}: {actual.get(name)} instead of {expected.get(name)}" for name in different]
        raise CheckpointError(converted.path, problems)
    return source


def compare_tensors(
    source: HfFolder, converted: HfFolder | MegatronFolder, options: WorkerOptions
) -> tuple[list[str], int]:
    """(names of the tensors that differ, number of compared tensors)."""
    weights = registry.weights(source.model)
    sizes = ((name, 2 * torch.Size(weight.shape).numel()) for name, weight in weights.items())
    buckets = fill_buckets(sizes)
    job = Comparison(source, converted, options.memory_bytes, _fp8_format(converted))
    different: list[str] = []
    num_tensors = 0
    with Progress("verify", sum(bucket.num_bytes for bucket in buckets)) as progress:
        for bucket, result in run_jobs(job, buckets, options.workers):
            different += result["different"]
            num_tensors += result["num_tensors"]
            progress.advance(bucket.num_bytes)
    order = list(registry.hf_tensors(source.model))
    return sorted(different, key=lambda name: order.index(name.removesuffix(SCALE))), num_tensors


def _fp8_format(converted: HfFolder | MegatronFolder) -> QuantFormat | None:
    """FP8 format of a Hugging Face folder; None without FP8 matrices."""
    if isinstance(converted, MegatronFolder):
        return None
    scales = [name for name in converted.entries if name.endswith(SCALE)]
    pow2 = (not (converted.stored(name).float().view(torch.int32) & _POW2_MANTISSA).any() for name in scales)
    return None if not scales else BLOCKWISE_POW2 if all(pow2) else BLOCKWISE_FP32


@dataclass
class Comparison:
    """Job: compare the digests of a bucket of parameters."""

    source: HfFolder
    converted: HfFolder | MegatronFolder
    memory_bytes: int
    fp8: QuantFormat | None

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Returns {"different": names, "num_tensors": number of compared tensors}."""
        expected, actual = TensorDigests(self.source.path), TensorDigests(self.converted.path)
        read = self._megatron_rows if isinstance(self.converted, MegatronFolder) else self._hf_rows
        for name in bucket.names:
            for hf_name, first, num_rows, expected_rows, rows in read(registry.weights(self.source.model)[name]):
                expected.add(hf_name, first, expected_rows, num_rows)
                actual.add(hf_name, first, rows, num_rows)
        different = [name for name, value in expected.done.items() if actual.done[name] != value]
        return {"different": different, "num_tensors": len(expected.done)}

    def _megatron_rows(self, weight: Weight) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
        """(name, first row, number of rows, expected rows, converted rows)"""
        assert isinstance(self.converted, MegatronFolder)
        whole = segments(weight, self.source.model)
        for first, end in row_chunks(weight.shape, self.memory_bytes):
            rows = self.converted.rows(weight, first, end)
            for segment in clip(whole, first, end):
                part = rows[segment.offset : segment.offset + segment.size]
                part_name, shape = weight.parts[segment.part]
                for name in (part_name, *weight.copies):
                    expected = self.source.rows(name, segment.start, segment.stop).to(rows.dtype)
                    yield name, segment.start, shape[0], expected, part

    def _hf_rows(self, weight: Weight) -> Iterator[tuple[str, int, int, Tensor, Tensor]]:
        assert isinstance(self.converted, HfFolder)
        for name, shape in (*weight.parts, *((copy, weight.shape) for copy in weight.copies)):
            for first, end in row_chunks(shape, self.memory_bytes):
                rows = self.source.rows(name, first, end)
                if not self.converted.is_fp8(name):
                    expected = rows.to(self.converted.dtype(name))
                    yield name, first, shape[0], expected, self.converted.rows(name, first, end)
                    continue
                fmt = self.fp8 or BLOCKWISE_POW2
                data, scale = quantize(rows.to(torch.bfloat16), fmt)
                yield name, first, shape[0], data, self.converted.stored(name, first, end)
                block, _ = fmt.blocks((first, end), 0)
                stored = self.converted.stored(name + SCALE, block, block + len(scale))
                yield name + SCALE, block, fmt.scale_shape(shape)[0], scale, stored.float()


def _no_logits(options: Options, source: HfFolder, converted: HfFolder | MegatronFolder) -> str | None:
    """Why logits are not compared; None when they are."""
    if options.logits == "no":
        return "--logits no"
    if any(source.is_fp8(name) for name in source.entries if not name.endswith(SCALE)):
        return "the source is FP8, which transformers computes on GPUs only; the digests cover its dequantized weights"
    if not isinstance(converted, MegatronFolder):
        if _fp8_format(converted) is not None:
            return "FP8 rounds; the digests cover the rounded source"
        return "both folders run through the same code, so equal digests suffice"
    needed = sum(torch.Size(shape).numel() for shape in registry.hf_tensors(source.model).values()) * _FLOAT32_BYTES
    available = psutil.virtual_memory().available
    if options.logits == "auto" and 1.5 * needed > available:
        sizes = f"{needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free"
        return f"in FP32 the model needs {sizes}; --logits yes compares anyway"
    return None


def compare_logits(source: HfFolder, converted: MegatronFolder, num_tokens: int, seed: int = 0) -> tuple[float, float]:
    """(largest logit difference, standard deviation of transformers' logits), in FP32 on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, source.model.vocab_size, (num_tokens,), generator=generator)
    reference = _quietly(lambda: _transformers_logits(source.path, tokens))
    trainer = _quietly(lambda: _trainer_logits(source.model, converted.path, tokens))
    return (trainer - reference).abs().max().item(), reference.std().item()


@torch.no_grad()
def _transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # grouped GEMMs need rows of 16 bytes
    ).eval()
    return model(tokens[None], use_cache=False).logits[0]


def _trainer_logits(model: ModelConfig, folder: Path, tokens: Tensor) -> Tensor:
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.trainer.single_rank import float32_logits

    return float32_logits(replace(model, num_mtp_layers=0), folder, tokens)


def _quietly(work: Callable[[], Tensor]) -> Tensor:
    """Run without the warnings of libraries about missing optional packages."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return work()
        finally:
            logging.disable(logging.NOTSET)
