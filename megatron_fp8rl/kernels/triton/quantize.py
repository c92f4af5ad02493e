"""Blockwise FP8 quantization of weights on a GPU: memory is read once and written once.

Bytes and float32 scales equal ``blockwise.quantize_weight``, for any number of BF16 or FP32 matrices whose rows may be
strided. They are written to the caller's tensors: a bucket, or the memory that an engine's kernels read. Import only
for CUDA tensors, or under TRITON_INTERPRET=1, where the same kernel runs on the CPU for tests.

One program quantizes one block. All matrices of a call are one launch, through a table of their addresses. So the
hundreds of expert matrices of a layer cost as much as one matrix of their total size.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, bits_of_scale, e4m3_bytes, factor_of, quotient
from megatron_fp8rl.kernels.triton.tiles import SIDE, load_pair, store_block
from megatron_fp8rl.kernels.types import BLOCK, Scales

_VECTOR_BYTES = 16  # of the widest load and store
_SOURCES = {torch.bfloat16: tl.uint16, torch.float32: tl.uint32}  # dtype used to read the bits
_TABLE_COLUMNS: tl.constexpr = tl.constexpr(7)


@triton.jit
def _quantize_blocks(
    table,  # int64 [num_matrices, 7]: see _table
    matrix_of_block,  # int32 [num_blocks]
    SOURCE: tl.constexpr,
    POW2: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    row_of_table = table + tl.load(matrix_of_block + block).to(tl.int64) * _TABLE_COLUMNS
    source = tl.load(row_of_table).to(tl.pointer_type(SOURCE))
    data = tl.load(row_of_table + 1).to(tl.pointer_type(tl.uint8))
    scales = tl.load(row_of_table + 2).to(tl.pointer_type(tl.int32))
    num_rows = tl.load(row_of_table + 3)
    num_columns = tl.load(row_of_table + 4)
    row_stride = tl.load(row_of_table + 5)
    local = block - tl.load(row_of_table + 6)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        data = tl.multiple_of(data, 16)
        num_columns = tl.multiple_of(num_columns, 16)
        row_stride = tl.multiple_of(row_stride, 8)

    blocks_per_row = (num_columns + SIDE - 1) // SIDE
    rows = (local // blocks_per_row) * SIDE + tl.arange(0, SIDE)
    columns = (local % blocks_per_row) * SIDE + tl.arange(0, SIDE)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    bits = tl.load(source + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0).to(tl.uint32)
    if SOURCE == tl.uint16:
        bits = bits << 16  # BF16 is the upper half of float32
    x = bits.to(tl.float32, bitcast=True)

    # On the bits, because they order magnitudes and put NaN above infinity; a float maximum would drop NaN.
    amax_bits = tl.max(tl.max((bits & 0x7FFFFFFF).to(tl.int32, bitcast=True), axis=1), axis=0)
    scale_bits = bits_of_scale(amax_bits, POW2)
    tl.store(scales + local, scale_bits)
    number = quotient(x, factor_of(amax_bits, scale_bits, POW2), POW2)
    tl.store(data + rows[:, None] * num_columns + columns[None, :], e4m3_bytes(number, HARDWARE), mask=inside)


def quantize_weight(weight_NK: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """``blockwise.quantize_weight`` of a CUDA tensor: (data float8_e4m3fn [N, K], scale_inv float32 [Nb, Kb])."""
    num_rows, num_columns = weight_NK.shape
    data = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=weight_NK.device)
    scale = torch.empty(-(-num_rows // BLOCK), -(-num_columns // BLOCK), device=weight_NK.device)
    quantize_weight_into(weight_NK, data, scale, scales)
    return data, scale


def quantize_weight_into(weight_NK: Tensor, data_out: Tensor, scale_out: Tensor, scales: Scales) -> None:
    """Quantize into ``data_out`` (float8_e4m3fn [N, K]) and ``scale_out`` (float32 [Nb, Kb]), both contiguous."""
    quantize_weights_into([weight_NK], [data_out], [scale_out], scales)


def quantize_weights_into(
    weights: Sequence[Tensor], data_outs: Sequence[Tensor], scale_outs: Sequence[Tensor], scales: Scales
) -> None:
    """:func:`quantize_weight_into` of many matrices on one device, in one launch per dtype. Raises ValueError with the
    list position of a matrix that cannot be quantized."""
    prepare_weights_into(weights, data_outs, scale_outs, scales)()


def prepare_weights_into(
    weights: Sequence[Tensor], data_outs: Sequence[Tensor], scale_outs: Sequence[Tensor], scales: Scales
) -> Callable[[], None]:
    """:func:`quantize_weights_into` as a function for repeated calls as the content of the memory changes.

    Work that depends only on addresses and shapes is done once. For hundreds of matrices it takes the host longer than
    the GPU takes to quantize them. A matrix with strided columns is copied here, and only here.
    """
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for index, (weight, data, scale) in enumerate(zip(weights, data_outs, scale_outs, strict=True)):
        problem = _problem(weight, data, scale)
        if problem:
            raise ValueError(f"matrix {index} of {len(weights)}: {problem}")
        if weight.numel():
            weight = weight if weight.stride(1) == 1 else weight.contiguous()
            by_dtype.setdefault(weight.dtype, []).append((weight, data, scale))
    launches = [_prepared(members, scales) for members in by_dtype.values()]

    def run() -> None:
        for launch in launches:
            launch()

    return run


def _prepared(members: list[tuple[Tensor, Tensor, Tensor]], scales: Scales) -> Callable[[], None]:
    first = members[0][0]
    rows, num_blocks = _table(members)
    table = torch.tensor(rows, dtype=torch.int64).to(first.device)
    counts = torch.tensor(num_blocks, dtype=torch.int64)
    total = int(counts.sum())
    indices = torch.arange(len(members), dtype=torch.int32, device=first.device)
    matrix_of_block = torch.repeat_interleave(indices, counts.to(first.device), output_size=total)
    aligned = all(_is_aligned(weight, data) for weight, data, _ in members)

    def launch() -> None:
        with torch.cuda.device_of(members[0][0]):  # keeps the memory alive whose addresses are in the table
            _quantize_blocks[(total,)](
                table,
                matrix_of_block,
                SOURCE=_SOURCES[first.dtype],
                POW2=scales == "pow2",
                ALIGNED=aligned,
                HARDWARE=HARDWARE,
                num_warps=4 if scales == "pow2" else 16,  # the fastest of 4, 8 and 16 on an H200
            )

    return launch


def _table(members: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[list[int]], list[int]]:
    """Per matrix [source, data and scale addresses, N, K, elements between rows, first block]; and its blocks."""
    rows, num_blocks, first_block = [], [], 0
    for weight, data, scale in members:
        num_rows, num_columns = weight.shape
        addresses = [weight.data_ptr(), data.data_ptr(), scale.data_ptr()]
        rows.append([*addresses, num_rows, num_columns, weight.stride(0), first_block])
        num_blocks.append(scale.numel())
        first_block += scale.numel()
    return rows, num_blocks


def _is_aligned(weight: Tensor, data: Tensor) -> bool:
    """Whether every row, read or written, begins at a vector boundary, as the kernel's alignment hints claim."""
    addresses = (weight.data_ptr(), data.data_ptr(), data.shape[1])
    return all(n % _VECTOR_BYTES == 0 for n in addresses) and weight.stride(0) % 8 == 0


def _problem(weight: Tensor, data: Tensor, scale: Tensor) -> str:
    """Why a matrix cannot be quantized into its destination; empty if it can."""
    if weight.dim() != 2 or weight.dtype not in _SOURCES:
        return f"a BF16 or FP32 matrix is needed, not {weight.dtype} {list(weight.shape)}"
    blocks = [-(-n // BLOCK) for n in weight.shape]
    for tensor, name, dtype, shape in (
        (data, "data_out", torch.float8_e4m3fn, list(weight.shape)),
        (scale, "scale_out", torch.float32, blocks),
    ):
        if tensor.dtype != dtype or list(tensor.shape) != shape or not tensor.is_contiguous():
            return f"{name} has to be contiguous {dtype} {shape}, not {tensor.dtype} {list(tensor.shape)}"
        if tensor.device != weight.device:
            return f"{name} is on {tensor.device}, the matrix on {weight.device}"
    return ""


@triton.jit
def _byte_row(place):
    return tl.load(place).to(tl.int32)


@triton.jit
def _transpose_tiles(data, turned, num_rows, num_columns):
    """Program (c, r, e) transposes a tile of [128, 128] bytes of matrix e; ``turned`` has words of four rows."""
    base = tl.program_id(2).to(tl.int64) * num_rows * num_columns
    quad = tl.program_id(1) * (SIDE // 4) + tl.arange(0, SIDE // 4)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    place = data + base + quad[:, None].to(tl.int64) * (4 * num_columns) + column[None, :]
    words = _byte_row(place) | (_byte_row(place + num_columns) << 8)
    words |= (_byte_row(place + 2 * num_columns) << 16) | (_byte_row(place + 3 * num_columns) << 24)
    tl.store(turned + base // 4 + column[:, None].to(tl.int64) * (num_rows // 4) + quad[None, :], tl.trans(words))


def transposed(data_ENK: Tensor) -> Tensor:
    """float8 [E, N, K], contiguous, N and K multiples of 128 -> contiguous [E, K, N] with the same bytes. With
    transposed scales these are the bytes of the quantized transposed matrices."""
    num_matrices, num_rows, num_columns = data_ENK.shape
    out = torch.empty(num_matrices, num_columns, num_rows, dtype=data_ENK.dtype, device=data_ENK.device)
    with torch.cuda.device_of(data_ENK):
        _transpose_tiles[(num_columns // BLOCK, num_rows // BLOCK, num_matrices)](
            data_ENK.view(torch.uint8), out.view(torch.int32), num_rows, num_columns, num_warps=8
        )
    return out


@triton.jit
def _quantize_weights(weights, data, scales, num_rows, num_columns, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """One grid axis over (matrix, row of blocks, block)."""
    across = num_columns // SIDE
    down = num_rows // SIDE
    block = tl.program_id(0)
    column = block % across * SIDE
    row = (block // across % down).to(tl.int64) * SIDE
    first = (block // (across * down)).to(tl.int64) * num_rows * num_columns
    place = (row + tl.arange(0, SIDE // 4) * 4)[:, None] * num_columns + column + tl.arange(0, SIDE)[None, :]
    source = weights + first + place
    x = load_pair(source, source + num_columns, None, None)
    y = load_pair(source + 2 * num_columns, source + 3 * num_columns, None, None)
    store_block(x, y, data + first + place, num_columns, scales + block, POW2, HARDWARE)


def can_quantize(weights_ENK: Tensor) -> bool:
    is_whole = not any(size % BLOCK for size in weights_ENK.shape[1:])
    return weights_ENK.dtype == torch.bfloat16 and weights_ENK.is_contiguous() and is_whole


def quantize_weights(weights_ENK: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """(data float8_e4m3fn [E, N, K], scale float32 [E, N/128, K/128]); ValueError unless :func:`can_quantize`."""
    if not can_quantize(weights_ENK):
        raise ValueError(
            f"weights_ENK have to be contiguous bfloat16 with N and K multiples of {BLOCK}, not "
            f"{weights_ENK.dtype} {list(weights_ENK.shape)} with strides {weights_ENK.stride()}"
        )
    num_matrices, num_rows, num_columns = weights_ENK.shape
    data = torch.empty(weights_ENK.shape, dtype=torch.float8_e4m3fn, device=weights_ENK.device)
    scale = torch.empty(num_matrices, num_rows // BLOCK, num_columns // BLOCK, device=weights_ENK.device)
    with torch.cuda.device_of(weights_ENK):
        _quantize_weights[(scale.numel(),)](
            weights_ENK,
            data.view(torch.uint8),
            scale.view(torch.int32),
            num_rows,
            num_columns,
            POW2=scales == "pow2",
            HARDWARE=HARDWARE,
            num_warps=8,
        )
    return data, scale
