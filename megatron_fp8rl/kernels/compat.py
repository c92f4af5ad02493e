"""Private names of PyTorch, Transformer Engine and vLLM that kernels and what stands above them need.

Each has the versions that it was tested with; :mod:`megatron_fp8rl.upstream` lists them and refuses others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.upstream import patches


@patches(
    "torch",
    ">=2.11,<2.12",
    why="copies many tensors with few launches; PyTorch has no public function for it (torch._foreach_copy_)",
    remove_when="PyTorch makes the foreach functions public",
)
def copy_together(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, of the same shape, converted to its type; in place, outside autograd's view."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="adds many tensors with few launches; PyTorch has no public function for it (torch._foreach_add_)",
    remove_when="PyTorch makes the foreach functions public",
)
def add_together(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target, of the same shape and type, in place."""
    torch._foreach_add_(targets, sources)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="tells whether a tensor was written since it was read (Tensor._version): autograd's own counter of writes",
    remove_when="PyTorch has a public counter of writes",
)
def num_writes(tensor: Tensor) -> int:
    """How often a tensor was written in place; views of one tensor share the count."""
    return tensor._version


@patches(
    "torch",
    ">=2.11,<2.12",
    why="compiles CUDA source at run time with headers and a compute capability of our choice "
    "(torch.cuda._compile_kernel), without nvcc on the machine",
    remove_when="torch.cuda has a public function that compiles a kernel",
)
def compile_cuda(source: str, name: str, *, folder: str, options: Sequence[str]) -> Any:
    """The function ``name`` of CUDA source for sm_90a, with headers from ``folder``; loaded on the current device."""
    return torch.cuda._compile_kernel(
        source, name, compute_capability="90a", cuda_include_dirs=[folder], nvcc_options=list(options)
    )


@patches(
    "torch",
    ">=2.11,<2.12",
    why="gloo listens on the address that the host's name resolves to, which on many nodes is one of loopback; another "
    "address can be given only in ProcessGroupGloo._Options",
    remove_when="init_process_group or ProcessGroupGloo takes an address",
)
def gloo_group_on(
    address: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Collective: a gloo group whose members listen on ``address``, each on its own."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="past a group's timeout NCCL's watchdog ends the whole process; ProcessGroupNCCL.Options takes it as _timeout",
    remove_when="a group outside torch.distributed's own state can be built with a timeout by public arguments",
)
def nccl_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    """Collective: an NCCL group that leaves torch.distributed's own state alone."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="many sends and receives make one launch on one communicator, not a communicator for each pair "
    "(ProcessGroupNCCL._start_coalescing)",
    remove_when="batch_isend_irecv takes a group that torch.distributed does not know",
)
def coalesced(group: dist.ProcessGroupNCCL, calls: Sequence[Callable[[], Any]]) -> Any:
    """Issue ``calls`` of ``group`` as one operation; what waits for all of them."""
    group._start_coalescing()
    for call in calls:
        call()
    return group._end_coalescing()


@patches(
    "torch",
    ">=2.11,<2.12",
    why="the 7th argument of a CUDA tensor's handle is the device that opens it (torch.multiprocessing.reductions); "
    "the sender's number means another GPU where processes are shown different ones",
    remove_when="rebuild_cuda_tensor takes the opening device by name",
)
def open_on(arguments: Sequence[Any], device: int) -> Tensor:
    """The tensor of another process of this host whose ``reduce_tensor`` gave ``arguments``, on GPU ``device``."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(arguments)
    arguments[6] = device
    return rebuild_cuda_tensor(*arguments)


@patches(
    "transformer-engine",
    ">=2.16,<2.17",
    why="a Float8BlockwiseQTensor has no public name for its bytes and scales (_rowwise_data, _rowwise_scale_inv)",
    remove_when="Float8BlockwiseQTensor names them publicly",
)
def rowwise(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """(bytes uint8 [N, K], float32 scales, whose rows are filled up to four) of a blockwise FP8 tensor; None of any
    other. Imports nothing of Transformer Engine."""
    data = getattr(parameter, "_rowwise_data", None)
    return None if data is None else (data, parameter._rowwise_scale_inv)


@patches(
    "vllm",
    ">=0.25.1,<0.27",
    why="the router's weights in an engine's last bits come from vLLM's own kernel (vllm._custom_ops.topk_softmax)",
    remove_when="vLLM exports the kernel publicly",
)
@functools.cache
def vllm_topk_softmax() -> Callable[..., None] | None:
    """vLLM's kernel: (weights float32 [T, K], experts int32 [T, K], int32 [T, K], logits [T, E], normalize) fills the
    first three; None where it is not installed or has no such kernel, as on a CPU."""
    try:
        from vllm import _custom_ops  # loads the library of the kernels
    except ImportError:
        return None
    return _custom_ops.topk_softmax if hasattr(torch.ops._moe_C, "topk_softmax") else None


@patches(
    "vllm",
    ">=0.25.1,<0.27",
    why="attention with an engine's bits is vLLM's own build of FlashAttention 3 (vllm.vllm_flash_attn)",
    remove_when="FlashAttention 3 is a package of its own that vLLM uses",
)
def vllm_flash_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    """vLLM's ``flash_attn_varlen_func``. Raises ImportError without vLLM for CUDA."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func
