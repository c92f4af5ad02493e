"""The format of each weight, by its Hugging Face name, in the trainer and in the engine.

Only :class:`LayerTable` decides which weights are FP8. The trainer's linears, the weight exporter, the engine's
quantization config and the digests read it.

FP8:  the attention projections q, k, v, o (with latent attention q_a, q_b, kv_a, kv_b, o), in_proj_qkvz (or in_proj_qkv
      and in_proj_z) and out_proj of gated delta nets, and the MLP projections gate, up, down of dense layers, of every
      expert and of shared experts, in all layers except the BF16 edge layers. The FP8 checkpoints of DeepSeek-V3, Qwen3
      and Qwen3-Next quantize the same weights.
BF16: embedding, output head, norms, biases, router, in_proj_ba (or in_proj_b and in_proj_a), convolution and vectors of
      gated delta nets, gates of shared experts, weights of multi-token prediction outside its decoder layer, and all
      matrices of the edge layers (``PrecisionConfig.bf16_first_layers``, ``bf16_last_layers``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig, PrecisionConfig
from megatron_fp8rl.precision.formats import BF16, QuantFormat, rollout_format, trainer_format

_ATTENTION = r"self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj)"
_FEED_FORWARD = r"mlp\.(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up|down)_proj"
_MIXTRAL_EXPERT = r"block_sparse_moe\.experts\.\d+\.w[123]"
_DELTA_NET = r"linear_attn\.(?:in_proj_(?:qkvz?|z)|out_proj)"
_MATRIX = re.compile(
    rf"model\.layers\.(\d+)\.(?:{_ATTENTION}|{_DELTA_NET}|{_FEED_FORWARD}|{_MIXTRAL_EXPERT})(?:\.weight)?"
)


@dataclass(frozen=True)
class LayerTable:
    """The format of each Hugging Face weight in the trainer and in the engine."""

    num_layers: int
    first_fp8_layer: int
    end_fp8_layer: int  # exclusive
    trainer: QuantFormat  # of the weights that are quantized
    rollout: QuantFormat

    @classmethod
    def build(cls, model: ModelConfig, precision: PrecisionConfig) -> LayerTable:
        return cls(
            num_layers=model.num_layers,
            first_fp8_layer=precision.bf16_first_layers,
            end_fp8_layer=model.num_layers - precision.bf16_last_layers,
            trainer=trainer_format(precision),
            rollout=rollout_format(precision),
        )

    def is_quantizable(self, hf_name: str) -> bool:
        """Whether a weight (or module) name is a matrix that FP8 recipes quantize; not in edge layers. Layers after the
        last one are for multi-token prediction and not edge layers."""
        match = _MATRIX.fullmatch(hf_name)
        if match is None:
            return False
        layer = int(match[1])
        return self.first_fp8_layer <= layer < self.end_fp8_layer or layer >= self.num_layers

    def trainer_format(self, hf_name: str) -> QuantFormat:
        """The format in which the trainer multiplies by this weight."""
        return self.trainer if self.is_quantizable(hf_name) else BF16

    def rollout_format(self, hf_name: str) -> QuantFormat:
        """The format of this weight on the wire and in the engine."""
        return self.rollout if self.is_quantizable(hf_name) else BF16
