"""Hugging Face checkpoint -> one with the same function whose matrices FP8 blocks tile.

In:  a folder of BF16, FP16, FP32 or block FP8 weights.
Out: a folder of a supported family with larger sizes, whose added rows and columns are zero.
Runs on: worker processes, without GPU, Megatron-Core or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint_tools import derived
from checkpoint_tools.derived import DerivedOptions, check_logits
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.hub_digests import check_hub_digests
from checkpoint_tools.report import report_conversion
from checkpoint_tools.wider_model import Widening, widened
from megatron_fp8rl.config import ModelConfig

_SIZES = (
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
)


@dataclass(frozen=True, kw_only=True)
class Options(DerivedOptions):
    head_dim: int | None = None
    """Size of the heads, a multiple of the present one. None: the size that needs the fewest weights."""


@dataclass
class _Wider:
    """Recipe: the tensors of the wider model."""

    source: HfFolder
    model: ModelConfig

    def __post_init__(self):
        self._widening = Widening(self.source.model, self.model)

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(name)

    def rows(self, name: str, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return self._widening.rows(name, first, end, lambda low, high: self.source.rows(name, low, high), dtype)


def run(options: Options) -> int:
    """Widen and print a report; returns 0."""
    source = HfFolder.open(options.source)
    try:
        wider = widened(source.model, options.head_dim)
    except ValueError as error:
        raise CheckpointError(source.path, str(error)) from error
    sizes = {name: (getattr(source.model, name), getattr(wider, name)) for name in _SIZES}
    changes = [f"{name} {old} -> {new}" for name, (old, new) in sizes.items() if old != new]
    if not changes:
        raise CheckpointError(source.path, "every matrix tiles already; train this folder as it is")
    recipe = _Wider(source, wider)
    with report_conversion(options.source, options.target) as report:
        report.add_source(source, check_hub_digests(source.files, options))
        if wider.family != source.model.family:
            changes.append(f"family {source.model.family} -> {wider.family}, which allows this number of heads")
        report.notes.append(", ".join(changes))
        derived.write(recipe, options, {"command": "widen"}, report, lambda: _check(recipe, options))
    return 0


def _check(recipe: _Wider, options: Options) -> str:
    text, result = check_logits(recipe, options)
    if result is None:
        return text
    return (
        f"{text} (standard deviation {result.spread:.2f}); {result.rounded_difference:.1e} with weights rounded to the "
        "folder's type"
    )
