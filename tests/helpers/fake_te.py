"""A stand-in for the part of Transformer Engine that the trainer calls, in plain torch on a CPU.

It checks how it is called as the real one does on Hopper: usages that a product needs, sizes in multiples of 16, lists
of equal length, contiguous outputs. The numbers it quantizes to are those of ``kernels/blockwise.py``.
"""

import enum
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import E4M3, E5M2, float32_copy, round_blocks_, round_to_grid_


class DType(enum.Enum):
    kFloat8E4M3 = 0
    kFloat8E5M2 = 1


_FORMAT = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
_TE_DTYPE = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass
class Storage:
    """Values as floats; ``columns`` has the shape of the tensor, too."""

    rows: Tensor | None
    columns: Tensor | None
    can_derive_columns: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and self.columns is None:
            assert self.can_derive_columns and self.rows is not None, "no columns to make"
            self.columns = self.rows
        if rowwise_usage is False:
            self.rows = None


@dataclass(eq=False)
class _Quantizer:
    rowwise: bool
    columnwise: bool
    internal: bool = False

    def round(self, x: Tensor, fmt) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    derives_columns = True

    def __call__(self, x: Tensor) -> Storage:
        assert self.rowwise, "quantizing in columns alone is not supported"
        if not self.internal:
            from tests.helpers.fake_fp8_tensor import Fp8Tensor

            return Fp8Tensor.of(x, self.scales)
        assert x.is_contiguous() and x.shape[1] % 16 == 0 and x.shape[0] % 16 == 0, tuple(x.shape)
        calls["quantized"].append(tuple(x.shape))
        rows, columns = self.round(x, _FORMAT[self.dtype]) if x.numel() else (x.float(), x.float())
        return Storage(rows, columns if self.columnwise else None, self.derives_columns)


class Float8BlockQuantizer(_Quantizer):
    def __init__(self, fp8_dtype, *, rowwise, columnwise, amax_epsilon, force_pow_2_scales, block_scaling_dim):
        super().__init__(rowwise, columnwise)
        assert amax_epsilon == 0.0
        self.dtype, self.scales, self.dim = fp8_dtype, "pow2" if force_pow_2_scales else "fp32", block_scaling_dim
        self.derives_columns = block_scaling_dim == 2

    def round(self, x, fmt):
        def blocks_of(tile):
            padded = float32_copy(x, rows_to=tile[0], columns_to=tile[1])
            blocks = padded.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
            return round_blocks_(blocks, (1, 3), self.scales, fmt).flatten(2, 3).flatten(0, 1)[: len(x), : x.shape[1]]

        if self.dim == 2:
            rounded = blocks_of((128, 128))
            return rounded, rounded
        return blocks_of((1, 128)), blocks_of((128, 1))


class MXFP8Quantizer(_Quantizer):
    derives_columns = False

    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise, columnwise)
        self.dtype = fp8_dtype

    def round(self, x, fmt):
        assert x.shape[0] % 32 == x.shape[1] % 32 == 0, tuple(x.shape)
        rows = round_blocks_(float32_copy(x).unflatten(1, (-1, 32)), 2, "e8m0", fmt).flatten(1)
        return rows, round_blocks_(float32_copy(x).unflatten(0, (-1, 32)), 1, "e8m0", fmt).flatten(0, 1)


class Float8Quantizer(_Quantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise, columnwise)
        assert scale.shape == amax.shape == (1,)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def round(self, x, fmt):
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax().float()))
        values = (x.float() * self.scale).clamp(-fmt.max, fmt.max)
        values = round_to_grid_(values, torch.ones(()), fmt) / self.scale
        return values, values


class Float8CurrentScalingQuantizer(Float8Quantizer):
    def __init__(self, fp8_dtype, device, *, rowwise=True, columnwise=True):
        super().__init__(torch.ones(1), torch.zeros(1), fp8_dtype, rowwise=rowwise, columnwise=columnwise)

    def round(self, x, fmt):
        amax = x.abs().amax().float()
        self.scale = torch.where(amax == 0, 1.0, torch.full_like(amax, fmt.max) / amax)  # rounded once
        return super().round(x, fmt)


calls: dict[str, list] = {"quantized": [], "gemm": []}


def _product(A, B, layout: str) -> Tensor:
    def values(operand, by_rows: bool) -> Tensor:
        if hasattr(operand, "product_values"):  # a parameter that is FP8 itself
            return operand.product_values(by_rows)
        if isinstance(operand, Tensor):
            return operand.float()
        result = operand.rows if by_rows else operand.columns
        assert result is not None, f"{layout}: an operand lacks its {'rows' if by_rows else 'columns'}"
        return result

    a, b = values(A, layout[0] == "T"), values(B, layout[1] == "N")
    return {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()


def _write(out: Tensor, product: Tensor, accumulate: bool) -> None:
    assert out.is_contiguous() and out.shape == product.shape, (out.shape, product.shape)
    out.copy_(out + product if accumulate else product)


def general_gemm(
    A, B, out_dtype=None, *, layout="TN", out=None, grad=False, accumulate=False, use_split_accumulator=False
):
    assert use_split_accumulator and out.dtype == out_dtype and grad == (layout != "TN")
    calls["gemm"].append(layout)
    _write(out, _product(A, B, layout), accumulate)


def general_grouped_gemm(
    A,
    B,
    out,
    quantization_params,
    out_dtype,
    layout="TN",
    m_splits=None,
    grad=False,
    accumulate=False,
    use_split_accumulator=False,
    single_output=False,
):
    assert use_split_accumulator and len(A) == len(B) == len(quantization_params) == len(m_splits)
    assert sum(m_splits), "all experts without tokens: the real one has no product to launch"
    calls["gemm"].append(f"grouped {layout}")
    parts = out[0].split(m_splits) if single_output else out
    for a, b, part in zip(A, B, parts, strict=True):
        assert part.dtype == out_dtype
        _write(part, _product(a, b, layout), accumulate)


def _split_quantize(x: Tensor, splits: list[int], quantizers: list) -> list[Storage]:
    assert sum(splits) == x.shape[0]
    return [quantizer(part) for part, quantizer in zip(x.split(splits), quantizers, strict=True)]


def _padding(source: Tensor, target: Tensor, rows: list[int], padded: list[int]) -> None:
    assert source.is_contiguous() and target.is_contiguous()
    for part, out in zip(source.split(rows), target.split(padded), strict=True):
        out.zero_()
        out[: len(part)] = part


def _unpadding(source: Tensor, target: Tensor, padded: list[int], rows: list[int]) -> None:
    for part, out in zip(source.split(padded), target.split(rows), strict=True):
        out.copy_(part[: len(out)])


def _rmsnorm_fwd(x, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    assert x.is_contiguous() and x.ndim == 2 and otype == _TE_DTYPE[x.dtype]
    rsigma = (x.float().square().mean(1) + eps).rsqrt()
    return (x.float() * rsigma[:, None] * (weight.float() + zero_centered_gamma)).to(x.dtype), None, rsigma


def _rmsnorm_bwd(grad, x, rsigma, weight, sm_margin, zero_centered_gamma):
    normed, scaled = x.float() * rsigma[:, None], grad.float() * (weight.float() + zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


def _rmsnorm_bwd_add(grad, x, add, rsigma, weight, sm_margin, zero_centered_gamma):
    dx, dweight = _rmsnorm_bwd(grad, x.float(), rsigma, weight, sm_margin, zero_centered_gamma)
    return (dx + add.float()).to(x.dtype), dweight


def install(patch: pytest.MonkeyPatch) -> None:
    """Install the emulation under Transformer Engine's name, and import it again."""

    def module(name: str, **contents) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        patch.setitem(sys.modules, name, made)

    for kind in calls.values():
        kind.clear()
    pytorch = "transformer_engine.pytorch"
    module("transformer_engine")
    module(pytorch)
    module(f"{pytorch}.cpp_extensions", general_gemm=general_gemm, general_grouped_gemm=general_grouped_gemm)
    module(f"{pytorch}.constants", TE_DType=_TE_DTYPE)
    module(f"{pytorch}.tensor")
    module(f"{pytorch}.tensor.float8_blockwise_tensor", Float8BlockQuantizer=Float8BlockQuantizer)
    module(f"{pytorch}.tensor.mxfp8_tensor", MXFP8Quantizer=MXFP8Quantizer)
    module(
        f"{pytorch}.tensor.float8_tensor",
        Float8Quantizer=Float8Quantizer,
        Float8CurrentScalingQuantizer=Float8CurrentScalingQuantizer,
    )
    module(
        "transformer_engine_torch",
        DType=DType,
        split_quantize=_split_quantize,
        multi_tensor_quantize=lambda tensors, quantizers: [q(t) for t, q in zip(tensors, quantizers, strict=True)],
        fused_multi_row_padding=_padding,
        fused_multi_row_unpadding=_unpadding,
        rmsnorm_fwd=_rmsnorm_fwd,
        rmsnorm_bwd=_rmsnorm_bwd,
        rmsnorm_bwd_add=_rmsnorm_bwd_add,
    )
    for name in ("te_linear", "te_norm"):
        patch.delitem(sys.modules, f"megatron_fp8rl.trainer.{name}", raising=False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
