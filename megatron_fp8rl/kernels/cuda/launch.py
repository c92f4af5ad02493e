"""Compiles and launches our CUDA C++ kernels for Hopper.

They replace Triton and DeepGEMM kernels that leave the GPU idle:

    add_weight_gradients   dW[e] += g[e]^T x[e] for all experts, from columnwise FP8. DeepGEMM's kernel rewrites its
                           tensor map for the next expert while TMA copies may still read it: with 128 rows or fewer
                           per expert, some tiles are wrong, and different ones on each run. It also waits at the end
                           of each tile until the sums are in memory. The sums and their order are as in DeepGEMM.
    multiply_rows          y = x W^T per expert, with each row weighted and written to its token's position. Bitwise
                           equal to DeepGEMM, which writes all rows with padding and needs another kernel to copy them.
    packed_attention       Attention of packed sequences with the bits of triton/attention.py's decoding. A version in
                           Triton reached half of the speed.
    swiglu_backward        fused_moe.swiglu_backward_quantize for rowwise and columnwise FP8 with power-of-two scales.
                           The Triton version does not overlap memory accesses with compute.

The ``.cu`` files document the algorithms. NVRTC, which PyTorch ships, compiles each on the first call in less than a
second. On other GPUs, and for other formats, callers use Triton or raise an error.

Shapes: P = rows of all experts with padding, E = experts, N, K and F = features, multiples of 128.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.kernels.compat import compile_cuda
from megatron_fp8rl.kernels.types import BLOCK

_FOLDER = Path(__file__).parent
_WIDTH = 192  # tile columns of multiply_rows
PART = 512  # keys of a part of an attention
_LONG = 4096  # rows of an expert from which wgrad schedules its tiles differently


class _Kernel(NamedTuple):
    launch: Callable[..., int]  # cuLaunchKernel, called directly: PyTorch's wrapper is several times slower
    function: int
    num_blocks: int
    num_threads: int
    shared_bytes: int

    def __call__(self, *arguments: Tensor | int | _Map | None) -> None:
        """Launch on the current stream of the current device. None is passed as a null pointer."""
        values = (ctypes.c_uint64 * len(arguments))(*map(_word, arguments))
        begin = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(arguments))(
            *(x.address if isinstance(x, _Map) else begin + 8 * i for i, x in enumerate(arguments))
        )
        size = self.num_blocks, 1, 1, self.num_threads, 1, 1, self.shared_bytes
        if status := self.launch(self.function, *size, _stream(), places, None):
            raise RuntimeError(f"CUDA cannot launch the kernel: cuLaunchKernel returned {status}")


class _Map(NamedTuple):
    """TMA descriptor of a byte matrix: a CUtensorMap, passed to the kernel by value."""

    address: int
    memory: ctypes.Array  # owns the storage behind ``address``


def _word(argument: Tensor | int | _Map | None) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument if isinstance(argument, int) else 0


@functools.lru_cache(maxsize=4096)
def _map_of(address: int, num_rows: int, num_columns: int, tile_rows: int) -> _Map:
    """Descriptor of a matrix that is copied in tiles of ``tile_rows`` rows of 128 bytes, swizzled for tensor cores."""
    memory = (ctypes.c_uint8 * 192)()
    place = -(-ctypes.addressof(memory) // 64) * 64
    sizes, stride = (ctypes.c_uint64 * 2)(num_columns, num_rows), (ctypes.c_uint64 * 1)(num_columns)
    tile, steps = (ctypes.c_uint32 * 2)(BLOCK, tile_rows), (ctypes.c_uint32 * 2)(1, 1)
    bytes_type, plain, swizzle_128, fetch_256, zeros = 0, 0, 3, 3, 0  # enum values of the CUDA driver
    status = _encoder()(place, bytes_type, 2, address, sizes, stride, tile, steps, plain, swizzle_128, fetch_256, zeros)
    if status:
        raise RuntimeError(
            f"CUDA cannot create a tensor map for the matrix [{num_rows}, {num_columns}] at {address:#x}: "
            f"cuTensorMapEncodeTiled returned {status}"
        )
    return _Map(place, memory)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def add_weight_gradients(
    g: Tensor, g_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor, out_ENK: Tensor
) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous.

    g float8_e4m3fn [P/128, N, 128] and x [P/128, K, 128] are columnwise (fused_moe.py), with float32 scales
    [P/128, N] and [P/128, K]; ``offsets`` int32 [E + 1] are the first row of each expert, then the end of the last.
    Raises RuntimeError on a GPU other than Hopper.
    """
    device = out_ENK.device
    if not is_hopper(device):
        raise RuntimeError(
            f"FP8 weight gradients of experts require a Hopper GPU, not {torch.cuda.get_device_name(device)}. "
            "Choose --precision.kernels.experts te"
        )
    cluster = _cluster(*out_ENK.shape, g.shape[0] * BLOCK)
    with torch.cuda.device(device):
        _weight_gradients(device.index, *cluster)(g, g_scale, x, x_scale, offsets, out_ENK, *out_ENK.shape)


def multiply_rows(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    experts: Tensor,
    out: Tensor,
    rows: Tensor | None = None,
    probs: Tensor | None = None,
) -> None:
    """Write x W^T per expert to ``out`` BF16 [P, N], or with ``rows`` [T, N], each row at its token's position.

    x float8_e4m3fn [P, K] with float32 scales [P, K/128] of strides (1, P); w [E, N, K] with scales [E, N/128, K/128],
    whose last two dimensions may be transposed. ``offsets`` int32 [E + 1], ``experts`` and ``rows`` int32 [P] come from
    an ``ExpertPermutation`` (fused_moe.py); ``probs`` float32 [T] multiply the rounded results. Output rows of tokens
    without a row in x are left unchanged.
    """
    (num_experts, num_columns, depth), num_rows = w.shape, len(x)
    with torch.cuda.device_of(x):
        _multiply_rows(x.device.index)(
            _map_of(x.data_ptr(), num_rows, depth, BLOCK),
            x_scale,
            _map_of(w.data_ptr(), num_experts * num_columns, depth, _WIDTH // 2),
            w_scale,
            offsets,
            experts,
            rows,
            probs,
            out,
            num_experts,
            num_rows,
            num_columns,
            depth,
            *w_scale.stride()[1:],
        )


def swiglu_backward(
    dy_PF: Tensor,
    h_P2F: Tensor,
    probs: Tensor | None,
    rows: Tensor,
    experts: Tensor,
    dh: Sequence[Tensor],
    activation: Sequence[Tensor],
    sums: Tensor | None,
) -> None:
    """Fill ``dh`` (rows, row scales, columns, column scales), ``activation`` (columns, column scales) and ``sums``.

    ``probs`` float32 [T]; ``rows`` and ``experts`` int32 [P] come from the layout; ``sums`` float32 [F/128, P] are
    partial sums of the gradient of probs. Formats are those of fused_moe.py, with row scales passed as [2F/128, P].
    """
    num_rows, width = dy_PF.shape
    weights, partial = (dy_PF, dy_PF) if probs is None else (probs, sums)
    with torch.cuda.device(dy_PF.device):
        kernel = _swiglu_backward(dy_PF.device.index, probs is not None)
        kernel(dy_PF, h_P2F, weights, rows, experts, *dh, *activation, partial, num_rows, width)


def packed_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_queries: Tensor,
    key_starts: Tensor,
    num_keys: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    softmax_scale: float,
    max_queries: int,
    out: Tensor,
    log_sums: Tensor,
    window: int = 0,
) -> None:
    """Fill ``out`` and ``log_sums``, results of ``triton/attention.packed``, with a ``window`` unless it is 0. Raises
    RuntimeError except on Hopper."""
    (num_tokens, num_heads, head_dim), num_groups = query.shape, keys.shape[1]
    if not is_hopper(query.device):
        raise RuntimeError("attention of packed sequences over an FP8 cache needs a Hopper GPU. Use an inexact run")
    with torch.cuda.device(query.device):
        _packed_attention(query.device.index, head_dim, window)(
            *(_map_of(x.data_ptr(), len(x), num_groups * head_dim * 2, BLOCK) for x in (keys, values)),
            query,
            cu_queries,
            key_starts,
            num_keys,
            key_scale,
            value_scale,
            out,
            log_sums,
            _bits_of_log2(softmax_scale),
            query.stride(0),
            num_tokens,
            len(cu_queries) - 1,
            num_heads,
            num_groups,
            -(-max_queries // _attention_shape(head_dim)[0]),
        )


@functools.cache
def _bits_of_log2(softmax_scale: float) -> int:
    """The float32 factor of scores to base 2, as an integer; a product in float32, as in Triton."""
    return int((torch.tensor(softmax_scale) * torch.tensor(math.log2(math.e))).view(torch.int32))


def _cluster(num_experts: int, num_rows: int, num_columns: int, num_tokens: int) -> tuple[int, int]:
    """Cluster size (down, across): the faster of (2, 1) and (1, 2) on an H200 if features are multiples of 256."""
    down, across = num_rows % (2 * BLOCK) == 0, num_columns % (2 * BLOCK) == 0
    is_long = num_tokens >= _LONG * num_experts
    if down and not (is_long and across):
        return 2, 1
    return (1, 2) if across else (1, 1)


@functools.cache
def _weight_gradients(device: int, down: int, across: int) -> _Kernel:
    stages = 4
    shared_bytes = 2 * 1024 + stages * 2 * BLOCK * BLOCK + (stages + 1) * 1024 + BLOCK * (4 * BLOCK + 32)
    options = [f"-DDOWN={down}", f"-DACROSS={across}", f"-DSTAGES={stages}", f"-DLONG={_LONG}"]
    return _compiled("grouped_wgrad", "add_weight_gradients", device, options, 384, shared_bytes, down * across)


@functools.cache
def _multiply_rows(device: int) -> _Kernel:
    stages = 4
    shared_bytes = 4 * 1024 + stages * (BLOCK + _WIDTH) * BLOCK + BLOCK * (2 * _WIDTH + 16)
    options = [f"-DSTAGES={stages}", f"-DWIDTH={_WIDTH}"]
    return _compiled("grouped_gemm_to_tokens", "multiply_rows", device, options, 384, shared_bytes, 2)


@functools.cache
def _swiglu_backward(device: int, weighted: bool) -> _Kernel:
    parts, stages = 4 * 2 * 256 + 4 * 3 * 256 + 4 * 512, 2 * 3 * BLOCK * (2 * BLOCK + 16)
    options = [f"-DWEIGHTED={int(weighted)}"]
    return _compiled("swiglu_backward", "swiglu_backward", device, options, 640, 128 + 2 * parts + stages + 128)


def _attention_shape(head_dim: int) -> tuple[int, int]:
    """(queries of an item, tiles of keys in shared memory) of packed_attention.cu."""
    return (BLOCK // 2, 1) if head_dim == 256 else (BLOCK, 2)


def _attention_bytes(head_dim: int) -> int:
    """Shared memory: barriers, queries, keys and values in FP16, and sums."""
    height, stages = _attention_shape(head_dim)
    return 2 * 1024 + (height + stages * 2 * BLOCK) * head_dim * 2 + height * head_dim * 4


@functools.cache
def _packed_attention(device: int, head_dim: int, window: int) -> _Kernel:
    options = [f"-DDIM={head_dim}", f"-DTILES={PART // BLOCK}", f"-DWINDOW={window}"]
    return _compiled("packed_attention", "packed_attention", device, options, 384, _attention_bytes(head_dim))


def _compiled(
    file: str, name: str, device: int, options: list[str], num_threads: int, shared_bytes: int, cluster: int = 1
) -> _Kernel:
    """Compile a kernel for the current device, launched with one thread block per SM."""
    function = compile_cuda((_FOLDER / f"{file}.cu").read_text(), name, folder=str(_FOLDER), options=options)
    function.set_shared_memory_config(shared_bytes)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _Kernel(launcher(_driver()), function.func.value, processors // cluster * cluster, num_threads, shared_bytes)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _encoder() -> Callable[..., int]:
    return encoder(_driver())


def encoder(library: ctypes.CDLL) -> Callable[..., int]:
    encode = library.cuTensorMapEncodeTiled
    words, pointer = ctypes.c_uint32, ctypes.c_void_p
    encode.argtypes = [pointer, words, words, pointer, *[pointer] * 4, *[words] * 4]
    return encode


def launcher(library: ctypes.CDLL) -> Callable[..., int]:
    launch = library.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return launch
