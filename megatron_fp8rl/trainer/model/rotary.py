"""Rotary embedding: frequencies, scaling and rotation, as pure tensor functions.

Frequencies follow transformers, so that converted checkpoints agree, by vLLM's operations in their order. Cosines and
sines are rounded to the model's dtype; the rotation is computed in FP32 and rounded once, as in the engine.

Shapes: T = packed tokens, H = heads, D = features of a head, R = rotated features.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, RopeScaling
from megatron_fp8rl.kernels import float64

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    num_features: int  # R
    first_feature: int  # offset of the rotated features in a head
    theta: float
    scaling: RopeScaling | None
    divisors: tuple[float, ...] = ()  # longrope: of the frequency of each pair
    interleaved: bool  # pairs are adjacent features; otherwise feature i pairs with i + R / 2

    @classmethod
    def of(cls, model: ModelConfig, window: int | None = None, longest: int = 0) -> Rotary:
        """Latent attention rotates the last part of a head, all others the first ``rotary_fraction``. ``window``: of
        the layer's attention. ``longest``: tokens of the run's longest sequence, which select the list of longrope."""
        mla, local = model.mla, model.local_rope_theta if window is not None else None
        scaling = model.rope_scaling if local is None else None
        return cls(
            num_features=int(model.head_dim * model.rotary_fraction) if mla is None else mla.qk_rope_head_dim,
            first_feature=0 if mla is None else mla.qk_nope_head_dim,
            theta=model.rope_theta if local is None else local,
            scaling=scaling,
            divisors=() if scaling is None else scaling.divisors(longest),
            interleaved=mla is not None,
        )

    def frequencies(self, device: torch.device = _HOST) -> Tensor:
        """Radians per position of every pair, FP32 [R / 2]."""
        exponents = torch.arange(0, self.num_features, 2, dtype=torch.float32, device=device) / self.num_features
        periods = self.theta**exponents
        if self.scaling is None or self.scaling.kind == "linear":
            return 1.0 / periods
        if self.scaling.kind == "longrope":
            return 1.0 / (torch.tensor(self.divisors, dtype=torch.float32, device=device) * periods)
        stretch = {"llama3": _llama3, "yarn": self._yarn}[self.scaling.kind]
        return stretch(periods, self.scaling)

    def _yarn(self, periods: Tensor, scaling: RopeScaling) -> Tensor:
        """Stretch low frequencies by ``factor`` and keep high ones, with a linear ramp between (arXiv:2309.00071)."""

        def pair_index(rotations: float) -> float:
            wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
            return self.num_features * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = pair_index(scaling.beta_fast), pair_index(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.num_features - 1)
        width = high - low if high != low else 0.001
        pairs = torch.arange(self.num_features // 2, dtype=torch.float32, device=periods.device)
        kept = 1 - ((pairs - low) / width).clamp(0, 1)
        return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def rotate(self, x_THD: Tensor, cos_T1r: Tensor, sin_T1r: Tensor) -> Tensor:
        """Rotate the rotary features of ``x``, in its dtype; r = R / 2. Interleaved pairs are returned half-split:
        queries and keys change alike, so their dot products do not."""
        if x_THD.is_cuda and x_THD.dtype == torch.bfloat16:
            from megatron_fp8rl.kernels.triton import rotate  # bitwise identical, in one pass

            return rotate.rotate(x_THD, cos_T1r, sin_T1r, self.first_feature, self.interleaved)
        before, x, after = x_THD.split(
            [self.first_feature, self.num_features, x_THD.shape[-1] - self.first_feature - self.num_features], dim=-1
        )
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        turned = float64.rotate_halves(x, cos_T1r, sin_T1r)
        if self.num_features == x_THD.shape[-1]:
            return turned
        return torch.cat([before, turned, after], dim=-1)


def softmax_scale(model: ModelConfig) -> float:
    """Softmax scale of attention scores. Latent attention includes the square of YaRN's magnitude."""
    scaling = model.rope_scaling
    if model.mla is None or scaling is None or scaling.kind != "yarn":
        return (model.query_pre_attn_scalar or model.head_dim) ** -0.5
    return model.head_dim**-0.5 * scaling.magnitude(scaling.mscale_all_dim) ** 2


def _llama3(periods: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long wavelengths by ``factor``, keep short ones, and interpolate between (Llama 3.1 release)."""
    frequencies = 1.0 / periods
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor)
    unstretched = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - unstretched) * frequencies / scaling.factor + unstretched * frequencies


@functools.lru_cache(maxsize=8)
def rotary_table(
    num_positions: int, rotary: Rotary, dtype: torch.dtype, device: torch.device = _HOST
) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of every position and pair, [num_positions, R / 2], rounded to ``dtype``.

    Computed on ``device`` by the engine's operations: GPU and host differ in the last bit, and the error of an angle
    grows with the position until its rounded cosine differs.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    scaling = rotary.scaling
    if scaling is not None and scaling.kind == "linear":
        positions = positions / scaling.factor
    amplitude = 1.0 if scaling is None else scaling.amplitude
    angles = positions[:, None] * rotary.frequencies(device)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return cos.to(dtype), sin.to(dtype)
