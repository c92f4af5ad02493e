"""Wrappers for private APIs of PyTorch, Transformer Engine and vLLM, with the versions tested.

:mod:`megatron_fp8rl.upstream` lists the versions and rejects others.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl import upstream
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.upstream import patches

_VERSION = attrgetter("_version")


@patches(
    "torch",
    why="detects writes to tensors since they were read, by autograd's version counter (Tensor._version)",
    remove_when="PyTorch exposes the version counter publicly",
)
def num_writes(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Number of in-place writes to each tensor; views of the same tensor share the counter."""
    return tuple(map(_VERSION, tensors))  # map avoids a Python loop: an MoE layer has hundreds of weights


@patches(
    "torch",
    why="compiles CUDA source at run time with our headers and compute capability "
    "(torch.cuda._compile_kernel), without requiring nvcc",
    remove_when="torch.cuda has a public API to compile a kernel",
)
def compile_cuda(source: str, name: str, *, folder: str, options: Sequence[str]) -> Any:
    """Compile CUDA source for sm_90a with headers from ``folder``; load its kernel ``name`` on the current device."""
    with compile_cache.noted("cuda", name):
        return torch.cuda._compile_kernel(
            source, name, compute_capability="90a", cuda_include_dirs=[folder], nvcc_options=list(options)
        )


@patches(
    "torch",
    why="gloo listens on the address that the hostname resolves to, which on many nodes is a loopback address; only "
    "ProcessGroupGloo._Options can set another one",
    remove_when="init_process_group or ProcessGroupGloo accepts an address",
)
def gloo_group_on(
    address: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Collective: create a gloo group in which each member listens on its ``address``."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


@patches(
    "torch",
    why="NCCL's watchdog kills the process at the group's timeout, which ProcessGroupNCCL.Options takes as _timeout",
    remove_when="a public API creates a group with a timeout outside torch.distributed's global state",
)
def nccl_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    """Collective: create an NCCL group without touching torch.distributed's global state."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


@patches(
    "torch",
    why="issues many sends and receives in one launch on one communicator, not one communicator per pair "
    "(ProcessGroupNCCL._start_coalescing)",
    remove_when="batch_isend_irecv accepts a group not registered with torch.distributed",
)
def coalesced(group: dist.ProcessGroupNCCL, calls: Sequence[Callable[[], Any]]) -> Any:
    """Issue ``calls`` on ``group`` as one coalesced operation; returns the work handle for all of them."""
    group._start_coalescing()
    for call in calls:
        call()
    return group._end_coalescing()


# The current settings of PyTorch's allocator, initially from the environment.
_ALLOCATOR = [os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")]


@patches(
    "torch",
    why="changes allocator settings at run time (torch._C._accelerator_setAllocatorSettings); the public environment "
    "variable applies to a whole process, but some containers cannot share tensors of expandable segments",
    remove_when="PyTorch has a public setter of allocator settings",
)
def _set_allocator(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
    _ALLOCATOR[0] = settings


def expand_segments() -> None:
    """Allocate GPU memory in expandable segments from now on, so that ``empty_cache`` returns every free page; other
    segments stay while they contain a tensor. ``PYTORCH_ALLOC_CONF`` takes precedence."""
    _set_allocator(_settings("expandable_segments:True", _ALLOCATOR[0]))


@contextlib.contextmanager
def shareable_segments() -> Iterator[None]:
    """Within the block, allocate GPU memory that any process of this host can open by its handle. Handles of expandable
    segments are file descriptors, which another process can open only if ptrace is allowed."""
    before = _ALLOCATOR[0]
    _set_allocator(_settings(before, "expandable_segments:False"))
    try:
        yield
    finally:
        _set_allocator(before)


def _settings(*parts: str) -> str:
    """Of two values for one name the last counts."""
    return ",".join(filter(None, parts))


# What follows the device in the arguments of rebuild_cuda_tensor.
_FIRST_OF_HANDLE = 7
_HANDLE = "handle storage_bytes storage_offset requires_grad reference reference_offset event syncs".split()
_BYTES_OF_HANDLE = ("handle", "reference", "event")


@patches(
    "torch",
    why="the 7th argument of a CUDA tensor handle is the device that opens it (torch.multiprocessing.reductions); "
    "the sender's index means another GPU if the processes differ in CUDA_VISIBLE_DEVICES",
    remove_when="rebuild_cuda_tensor takes the opening device as a named argument",
)
def handle_of(tensor: Tensor) -> dict[str, Any]:
    """The handle by which another process of this host opens a contiguous GPU tensor. These are the arguments that
    ``reduce_tensor`` gives to pickle, as numbers and hex text, without classes."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    numbers = dict(zip(_HANDLE, arguments[_FIRST_OF_HANDLE:], strict=True))
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in numbers.items()}


def open_on(handle: Mapping[str, Any], shape: tuple[int, int], device: int) -> Tensor:
    """Open another local process's uint8 tensor on GPU ``device`` by the ``handle`` from :func:`handle_of`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    values = [bytes.fromhex(handle[name]) if name in _BYTES_OF_HANDLE else handle[name] for name in _HANDLE]
    return rebuild_cuda_tensor(
        Tensor, torch.Size(shape), (shape[1], 1), 0, torch.UntypedStorage, torch.uint8, device, *values
    )


@patches(
    "transformer-engine",
    why="Float8BlockwiseQTensor has no public accessor for its bytes and scales (_rowwise_data, _rowwise_scale_inv)",
    remove_when="Float8BlockwiseQTensor exposes them publicly",
)
def rowwise(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """(bytes uint8 [N, K], float32 scales with rows padded to a multiple of four) of a blockwise FP8 tensor; else None.
    Does not import Transformer Engine."""
    data = getattr(parameter, "_rowwise_data", None)
    return None if data is None else (data, parameter._rowwise_scale_inv)


@patches(
    "vllm",
    why="only vLLM's kernel (vllm._custom_ops.topk_softmax) gives router weights bitwise equal to the engine's",
    remove_when="vLLM makes the kernel public",
    optional=True,
)
@functools.cache
def vllm_topk_softmax() -> Callable[..., None] | None:
    """vLLM's kernel: (weights float32 [T, K], experts int32 [T, K], int32 [T, K], logits [T, E], normalize) fills the
    first three. None if vLLM is not installed or lacks the kernel, as in CPU builds."""
    if not upstream.applies("vllm_topk_softmax"):
        return None
    try:
        from vllm import _custom_ops  # loads the kernel library
    except ImportError:
        return None
    return _custom_ops.topk_softmax if hasattr(torch.ops._moe_C, "topk_softmax") else None


@patches(
    "vllm",
    why="only vLLM's build of FlashAttention 3 (vllm.vllm_flash_attn) is bitwise equal to the engine's attention",
    remove_when="vLLM uses FlashAttention 3 from a standalone package",
    optional=True,
)
def vllm_flash_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    """vLLM's ``flash_attn_varlen_func``. Raises ImportError if vLLM for CUDA is not installed."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func
