"""Blockwise quantization of rows, alone or of SwiGLU's result, in one launch: for engines on a GPU. ``norm.py`` has the
norms.

Outputs equal ``blockwise.quantize_activation``. Results are first rounded to BF16, so that engine and trainer quantize
equal numbers. vLLM's fused kernel ignores power-of-two scales (vllm-project/vllm#51477). Import only for CUDA tensors,
or under TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, quantized_rows, rounded_to_bf16
from megatron_fp8rl.kernels.triton.norm import require_contiguous, require_rows, require_scales
from megatron_fp8rl.kernels.triton.tiles import SIDE, exp_of_negative
from megatron_fp8rl.kernels.types import BLOCK, Scales

_ROWS = 16  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows(
    x, out, data, scales, num_rows, width, scale_row, scale_block, ROWS: tl.constexpr, SWIGLU: tl.constexpr,
    WRITES: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A program quantizes 128 features of some rows of ``x``, or of SwiGLU's result: then ``x`` has gates and then ups,
    [num_rows, 2 width]."""
    blocks = width // SIDE
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    inside = row < num_rows
    feature = block * SIDE + tl.arange(0, SIDE)[None, :]
    place = row[:, None] * width + feature
    if SWIGLU:
        gates = x + row[:, None] * (2 * width) + feature
        gate = tl.load(gates, mask=inside[:, None], other=0.0).to(tl.float32)
        up = tl.load(gates + width, mask=inside[:, None], other=0.0).to(tl.float32)
        silu = rounded_to_bf16(gate / (1.0 + exp_of_negative(gate, HARDWARE)), HARDWARE).to(tl.float32)
        result = rounded_to_bf16(silu * up, HARDWARE)
    else:
        result = tl.load(x + place, mask=inside[:, None], other=0.0)
    if WRITES:
        tl.store(out + place, result, mask=inside[:, None])
    byte, scale_bits = quantized_rows(result.to(tl.float32), POW2, HARDWARE)
    tl.store(data + place, byte, mask=inside[:, None])
    tl.store(scales + row * scale_row + block * scale_block, scale_bits, mask=inside)


def quantize_rows(x_TF: Tensor, data_TF: Tensor, scales_TB: Tensor, scales: Scales) -> None:
    """Quantize BF16 x [T, F] into E4M3 ``data_TF``, both contiguous, and ``scales_TB`` as :func:`swiglu_quantize`."""
    if x_TF.dim() != 2 or x_TF.shape[-1] % BLOCK or data_TF.shape != x_TF.shape:
        raise ValueError(f"[T, F] with F a multiple of {BLOCK}, not {list(x_TF.shape)} and {list(data_TF.shape)}")
    _run(x_TF, None, data_TF, scales_TB, scales, swiglu=False)


def swiglu_quantize(
    h_T2F: Tensor, data_TF: Tensor, scales_TB: Tensor, scales: Scales, out_TF: Tensor | None = None
) -> None:
    """Quantize silu(gate) * up, both rounded to BF16, of BF16 h [T, 2 F] into E4M3 ``data_TF``, contiguous like h.

    ``scales_TB``, float32 [T, F / 128], may have any strides; F is a multiple of 128. ``out_TF`` gets the BF16 values.
    """
    num_rows, width = data_TF.shape
    if width % BLOCK or h_T2F.shape != (num_rows, 2 * width):
        raise ValueError(
            f"[T, 2 F] and [T, F] with F a multiple of {BLOCK}, not {list(h_T2F.shape)} and {list(data_TF.shape)}"
        )
    _run(h_T2F, out_TF, data_TF, scales_TB, scales, swiglu=True)


def _run(x: Tensor, out_TF: Tensor | None, data_TF: Tensor, scales_TB: Tensor, scales: Scales, *, swiglu: bool) -> None:
    num_rows, width = data_TF.shape
    require_rows(x)
    require_scales(scales_TB, num_rows, width)
    require_contiguous(x, data_TF, out_TF)
    if not num_rows:
        return
    with torch.cuda.device_of(x):
        _quantize_rows[(triton.cdiv(num_rows, _ROWS) * (width // BLOCK),)](
            x, out_TF, data_TF.view(torch.uint8), scales_TB.view(torch.int32), num_rows, width, *scales_TB.stride(),
            ROWS=_ROWS, SWIGLU=swiglu, WRITES=out_TF is not None, POW2=scales == "pow2", HARDWARE=HARDWARE,
            num_warps=4,
        )  # fmt: skip
