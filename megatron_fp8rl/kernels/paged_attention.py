"""The attention of ``float64.attend`` over a paged cache on a CPU, by ``paged_attention.c``: the same rounded results.

Both add in float64 and round once, so the order of a sum does not change the result. The kernel reads the cache in
place. It needs a C compiler and a CPU with AVX-512.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8rl.kernels import c_code

_POINTERS = "query cache starts lengths blocks out".split()
_SIZES = "requests key_heads heads_per_key width query_stride out_stride".split()
_SIZES += "table_stride block_stride head_stride token_stride block_size window next".split()
_WORK_PER_THREAD = 1 << 18  # products; fewer are not worth another thread


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("scale", ctypes.c_double),
        ("key_scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("failed", ctypes.c_int),
    ]


def attend(
    query_TQD: Tensor,
    cache: Tensor,
    cache_scales: Sequence[float] | None,
    starts: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    scale: float,
    window: int | None,
    out_TQD: Tensor,
) -> bool:
    """Fill ``out_TQD`` with the attention of R requests; False if it cannot be computed here.

    Args:
        query_TQD, out_TQD: BF16; request r has the tokens ``starts[r]`` to ``starts[r + 1]``, its last ones.
        cache: [blocks, G, tokens of a block, 2 D], a token's key before its value: BF16, or bytes of E4M3.
        cache_scales: factors of keys and of values of an E4M3 cache.
        starts, lengths, blocks: int32 [R + 1], [R] and [R, blocks of a request].
        window: the last tokens, with its own, that a token reads; None: all.
    """
    tensors = query_TQD, out_TQD, starts, lengths, blocks, cache
    is_readable = query_TQD.dtype == out_TQD.dtype == torch.bfloat16 and starts.dtype == lengths.dtype == blocks.dtype
    is_readable &= starts.dtype == torch.int32 and all(x.stride(-1) == 1 for x in tensors)
    num_heads, width = query_TQD.shape[1:]
    is_readable &= width % 16 == 0 and all(x.stride(1) == width for x in (query_TQD, out_TQD))
    library = c_code.library("paged_attention")
    if not is_readable or library is None or cache.element_size() != (2 if cache_scales is None else 1):
        return False
    num_groups, block_size = cache.shape[1:3]
    job = _Job(
        *(x.data_ptr() for x in (query_TQD, cache, starts, lengths, blocks, out_TQD)),
        *(scale, *(cache_scales or (0, 0))),
        *(len(lengths), num_groups, num_heads // num_groups, width, query_TQD.stride(0), out_TQD.stride(0)),
        *(blocks.stride(0), *cache.stride()[:3], block_size, window or 0, 0),
        0,
    )
    work = int(lengths.sum()) * num_heads * width
    threads = max(1, min(torch.get_num_threads(), work // _WORK_PER_THREAD, len(lengths) * num_groups))
    if threads == 1:
        library.attend(ctypes.byref(job))
    else:
        list(c_code.threads().map(lambda _: library.attend(ctypes.byref(job)), range(threads)))
    if job.failed:
        raise MemoryError(f"attention over {int(lengths.max())} cached tokens: no memory for a row of scores")
    return True
