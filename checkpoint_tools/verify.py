"""Check a conversion: every bit of its tensors, and the logits of the model.

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

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.megatron_folder import MegatronFolder, is_megatron
from checkpoint_tools.row_chunks import row_chunks
from checkpoint_tools.views import MegatronView
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
    print(f"{num_tensors} tensors: {converted.path} equals the converted {source.path}, bit for bit")
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
    stored = MegatronView(converted) if isinstance(converted, MegatronFolder) else converted
    job = Comparison(source, stored, options.memory_bytes, _fp8_format(converted))
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
    """Job: compare a bucket of parameters, bit by bit."""

    source: HfFolder
    converted: HfFolder | MegatronView
    memory_bytes: int
    fp8: QuantFormat | None

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Returns {"different": names, "num_tensors": number of compared tensors}."""
        same: dict[str, bool] = {}
        for name in bucket.names:
            for hf_name, expected, rows in self._pairs(registry.weights(self.source.model)[name]):
                bits = (part.contiguous().view(torch.uint8) for part in (expected, rows))
                same[hf_name] = same.get(hf_name, True) and torch.equal(*bits)
        return {"different": [name for name, is_same in same.items() if not is_same], "num_tensors": len(same)}

    def _pairs(self, weight: Weight) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, expected rows, converted rows) of the weight's Hugging Face tensors and their scales, in order."""
        for name, shape in (*weight.parts, *((copy, weight.shape) for copy in weight.copies)):
            for first, end in row_chunks(shape, self.memory_bytes):
                rows = self.source.rows(name, first, end)
                if isinstance(self.converted, MegatronView) or not self.converted.is_fp8(name):
                    converted = self.converted.rows(name, first, end)
                    yield name, rows.to(converted.dtype), converted
                    continue
                fmt = self.fp8 or BLOCKWISE_POW2
                data, scale = quantize(rows.to(torch.bfloat16), fmt)
                yield name, data, self.converted.stored(name, first, end)
                block, _ = fmt.blocks((first, end), 0)
                yield name + SCALE, scale, self.converted.stored(name + SCALE, block, block + len(scale)).float()


def _no_logits(options: Options, source: HfFolder, converted: HfFolder | MegatronFolder) -> str | None:
    """Why logits are not compared; None when they are."""
    if options.logits == "no":
        return "--logits no"
    if any(source.is_fp8(name) for name in source.entries if not name.endswith(SCALE)):
        return "the source is FP8, which transformers computes on GPUs only; its dequantized weights were compared"
    if not isinstance(converted, MegatronFolder):
        if _fp8_format(converted) is not None:
            return "FP8 rounds; the rounded source was compared"
        return "both folders run through the same code, so equal tensors suffice"
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
