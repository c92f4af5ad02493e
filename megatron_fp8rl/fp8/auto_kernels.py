"""Which kernels ``auto`` stands for in ``precision.linears`` and ``precision.experts``. Pure; no torch.

The choice is a function of the configuration: it is made once, when a model is built, from the shapes of a full
microbatch (``products.py``), and holds for every pass of the run, however many tokens a microbatch has.

It must not follow the batch. Transformer Engine and DeepGEMM add the same products in different orders, so their
results differ in the last bits. Old log-probabilities and the first update compute the same sequences in microbatches
of different sizes; with a choice per microbatch their ratio would no longer be 1 before anything was learned, and the
forward pass would be the engine's in some microbatches alone. Within one choice nothing depends on the number of
tokens: a row of DeepGEMM's products has the same bits whatever rows are computed beside it. All ranks have the same
configuration, so they choose alike, and so does a run that is resumed with the same thresholds.

``auto`` promises speed and no bits. Who wants the forward pass of vLLM's DeepGEMM kernels names ``deep_gemm``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.config import FP8_BLOCK, PrecisionConfig, RunConfig
from megatron_fp8rl.fp8.products import experts_of, linears_of

Field = Literal["linears", "experts"]


@dataclass(frozen=True)
class Range:
    """Where DeepGEMM is the faster one: tokens that one matrix multiplies in a full microbatch, ends included."""

    first: float
    last: float = math.inf
    smallest_side: int = FP8_BLOCK  # of the matrix, rows or columns

    def holds(self, tokens: float, *sides: int) -> bool:
        return self.first <= tokens <= self.last and min(sides) >= self.smallest_side


NOWHERE = Range(math.inf)

# The thresholds, all of them, by field and the trainer's recipe; DeepGEMM multiplies in no others. They are set from
# the crossovers that `python -m benchmarks.linears --sweep` and `python -m benchmarks.experts --sweep` write. Until one
# has run, auto is Transformer Engine. One shape is known: of 128 experts of 2048 x 768 with 131,072 tokens, forward and
# backward of grouped FP8 take an H200 9.0 ms, and those of Transformer Engine's blockwise FP8, which the host launches
# one expert after the other, 51.7 ms.
DEEP_GEMM_IS_FASTER: dict[tuple[Field, str], Range] = {
    ("linears", "blockwise"): NOWHERE,  # "ours deep_gemm before ours te blockwise"
    ("experts", "blockwise"): NOWHERE,  # "grouped fp8 before te blockwise", tokens divided by experts
    ("experts", "bf16"): NOWHERE,  # "grouped bf16 before te bf16", tokens divided by experts
}


def chosen(field: Field, cfg: RunConfig) -> Literal["te", "deep_gemm"]:
    """What ``precision.{field}`` names, or stands for where it is ``auto``. Whether the GPU can is not asked here."""
    named = getattr(cfg.precision, field)
    if named != "auto":
        return named
    return "deep_gemm" if can_multiply(field, cfg.precision) and _is_faster(field, cfg) else "te"


def can_multiply(field: Field, precision: PrecisionConfig) -> bool:
    """Whether DeepGEMM's kernels on a Hopper GPU compute what ``precision`` asks of ``field``."""
    has_kernels = (field, precision.trainer) in DEEP_GEMM_IS_FASTER
    is_right = precision.trainer == "bf16" or precision.gradients == "e4m3"
    return has_kernels and is_right and precision.params == "bf16" and precision.kernels != "emulated"


def _is_faster(field: Field, cfg: RunConfig) -> bool:
    """Experts are judged by the tokens of each with balanced routing; linears by the largest, which takes the most
    time: they are multiplied by one kind of kernels."""
    faster = DEEP_GEMM_IS_FASTER[field, cfg.precision.trainer]
    if field == "experts":
        shape = experts_of(cfg)
        if shape is None or shape.hidden % FP8_BLOCK or shape.width % FP8_BLOCK:
            return False
        return faster.holds(shape.tokens / shape.experts, shape.hidden, shape.width)
    shapes = [use.shape for use in linears_of(cfg)]
    if not shapes:
        return False
    largest = max(shapes, key=lambda shape: shape.num_operations)
    return faster.holds(largest.tokens, largest.rows, largest.columns)
