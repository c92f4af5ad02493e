"""The one table that says which weights are FP8.

The trainer's linears, the weight exporter, the engine's quantisation config and the digests that compare both ends all
ask :class:`LayerTable`; nothing else decides. A weight is named by its Hugging Face checkpoint name.

FP8:  the attention projections q, k, v, o and the feed-forward projections gate, up, down, of dense layers and of
      every expert, in all layers but the BF16 edge layers.
BF16: embedding, output head, norms, router, and every matrix of the first and last layers that
      ``PrecisionConfig.bf16_first_layers`` and ``bf16_last_layers`` name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig, PrecisionConfig

_MATRIX = re.compile(
    r"model\.layers\.(\d+)\.(?:self_attn\.[qkvo]_proj|mlp\.(?:experts\.\d+\.)?(?:gate|up|down)_proj)(?:\.weight)?"
)


@dataclass(frozen=True)
class LayerTable:
    """Which Hugging Face weights are FP8 in the trainer and in the engine."""

    num_layers: int
    first_fp8_layer: int
    end_fp8_layer: int  # exclusive
    trainer_is_fp8: bool
    rollout_is_fp8: bool

    @classmethod
    def build(cls, model: ModelConfig, precision: PrecisionConfig) -> LayerTable:
        return cls(
            num_layers=model.num_layers,
            first_fp8_layer=precision.bf16_first_layers,
            end_fp8_layer=model.num_layers - precision.bf16_last_layers,
            trainer_is_fp8=precision.trainer != "bf16",
            rollout_is_fp8=precision.rollout != "bf16",
        )

    def is_quantizable(self, hf_name: str) -> bool:
        """Whether a weight (or module) name is a matrix that an FP8 recipe applies to, edge layers excluded."""
        match = _MATRIX.fullmatch(hf_name)
        return match is not None and self.first_fp8_layer <= int(match[1]) < self.end_fp8_layer

    def trainer_fp8(self, hf_name: str) -> bool:
        """Whether the trainer multiplies by this weight in FP8."""
        return self.trainer_is_fp8 and self.is_quantizable(hf_name)

    def rollout_fp8(self, hf_name: str) -> bool:
        """Whether this weight travels and is held by the engine as FP8 bytes with scales."""
        return self.rollout_is_fp8 and self.is_quantizable(hf_name)
