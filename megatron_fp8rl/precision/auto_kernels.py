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
from megatron_fp8rl.precision.matmul_shapes import experts_of, linears_of

Field = Literal["linears", "experts"]


@dataclass(frozen=True)
class Range:
    """Where DeepGEMM is the faster one: tokens that one matrix multiplies in a full microbatch, ends included."""

    first: float
    last: float = math.inf
    smallest_side: int = FP8_BLOCK  # of the matrix, rows or columns

    def holds(self, tokens: float, *sides: int) -> bool:
        return self.first <= tokens <= self.last and min(sides) >= self.smallest_side


# The thresholds, all of them, by field and the trainer's recipe; DeepGEMM multiplies in no others. They are set from
# what `benchmarks.experts` and `benchmarks.linears` measured on H200s (docs/measured.md), forward and backward.
DEEP_GEMM_IS_FASTER: dict[tuple[Field, str], Range] = {
    # Four layers of Qwen3-8B, and its feed-forward part by itself.
    ("linears", "blockwise"): Range(2048),
    # 8 to 256 experts with 1 to 8,192 tokens each, behind a busy queue as well as with the host's share.
    ("experts", "blockwise"): Range(0),
    # 1 to 1,024 tokens each. With 2,048 and more Transformer Engine's loop over experts is the faster one: what
    # DeepGEMM saves in launches is less than its BF16 weight gradients take longer.
    ("experts", "bf16"): Range(0, last=1024),
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
