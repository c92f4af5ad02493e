"""The feed-forward part of a dense layer: Megatron-Core's, or in one piece where DeepGEMM multiplies both linears."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_fp8rl.trainer.compat.megatron import is_watched
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.model.linear import matrix_of
from megatron_fp8rl.upstream import patches


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="overrides forward: both linears and SwiGLU in one piece where DeepGEMM multiplies",
    remove_when="MLP takes a fused implementation as an argument",
)
class DenseMlp(MLP):
    """SwiGLU between two linears without bias. Parameters and checkpoints are those of Megatron-Core's MLP."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> tuple:
        """Collective over tensor-parallel ranks: [s, b, H] -> ([s, b, H], None); under sequence parallelism a rank
        has its own tokens."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        watched = is_watched(fc1) or is_watched(fc2)  # by a probe, which would see nothing of one piece
        if watched or {fc1.kernels, fc2.kernels} != {"deep_gemm"}:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        assert per_token_scale is None and self.config.gated_linear_unit and not self.config.add_bias_linear
        x = fc1.gathered(hidden_states)
        y_TH = linear_deep_gemm.mlp(x.reshape(-1, x.shape[-1]), matrix_of(fc1, fc1.weight), matrix_of(fc2, fc2.weight))
        return fc2.reduced(y_TH.view(*x.shape[:-1], y_TH.shape[-1])), None
