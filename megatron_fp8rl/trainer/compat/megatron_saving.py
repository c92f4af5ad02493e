"""Megatron-Core internals that checkpoints use: gathering, staging and writing shards."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor, nn

from megatron_fp8rl.upstream import patches

_PIECE = 1 << 26  # numbers of optimizer state that are gathered at a time, 256 MiB


@patches(
    "megatron-core",
    why="gathered optimizer state omits the padding after buckets of a gradient buffer, but parameters are then looked "
    "up by offsets that include it: everything after the first padded bucket is written shifted. Tied embeddings of "
    "odd size on the last of several stages, and odd sizes with overlap_grad_reduce, have such buckets",
    remove_when="get_parameter_state_dp_zero and sharded_param_state_fully_reshardable agree on offsets",
)
@contextlib.contextmanager
def padded_buckets(optimizer: Any) -> Iterator[None]:
    """In the block, Megatron-Core gathers optimizer state including the padding."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    buffers = [buffer for part in parts for buffer in part.buffers]
    sizes = [(buffer, buffer.numel) for buffer in buffers]
    sizes += [(bucket, bucket.grad_data.numel()) for buffer in buffers for bucket in buffer.buckets]
    unpadded = [(owner, owner.numel_unpadded) for owner, _ in sizes]
    for owner, size in sizes:
        owner.numel_unpadded = size
    try:
        yield
    finally:
        for owner, size in unpadded:
            owner.numel_unpadded = size


@patches(
    "megatron-core",
    why="get_parameter_state_dp_zero copies the optimizer's state six times through fresh host memory: 7 of the 10 "
    "seconds of a checkpoint's copy on an H200, for 2.5 GiB",
    remove_when="get_parameter_state_dp_zero concatenates and gathers on the GPU",
    optional=True,
)
@contextlib.contextmanager
def gathered_on_device(optimizer: Any) -> Iterator[None]:
    """In the block, optimizer state is concatenated and gathered where it is, and copied to the host once."""
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(_gathered, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def _gathered(part: Any, use_gloo_comm: bool, empty_data: bool, return_on_all_ranks: bool) -> dict[Any, Any]:
    """get_parameter_state_dp_zero on every rank: float32 [buffer] by buffer, dtype and key, on the CPU."""
    assert return_on_all_ranks and not use_gloo_comm and not empty_data
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, of_buckets),) = ranges.items()
        whole: dict[str, Any] = {
            key: torch.empty(buffer.numel_unpadded, dtype=torch.float32)
            for key in ("param", *part.optimizer_state_keys)
        }
        offset = 0
        for bucket, of_bucket in zip(buffer.buckets, of_buckets, strict=True):
            end = offset + bucket.numel_unpadded
            for key, values in whole.items():
                _gather_bucket(part, bucket.grad_data, of_bucket["param_map"], key, values[offset:end])
            offset = end
        state[index] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
    return state


def _gather_bucket(part: Any, like: Tensor, param_map: dict[Any, Any], key: str, out: Tensor) -> None:
    """Collective over data-parallel ranks: gather a kind of state of a bucket into ``out``, float32 [bucket] on the
    CPU. Gathers at most :data:`_PIECE` numbers at a time, because a GPU in training has little free memory."""
    group = part.data_parallel_group
    shard = like.numel() // group.size()
    parts = [
        (places["gbuf_local"], part._get_main_param_and_optimizer_states(parameter)[key].detach().view(-1))
        for parameter, places in param_map.items()
    ]
    step = max(1, _PIECE // group.size())
    for start in range(0, shard, step):
        local = torch.zeros(min(step, shard - start), dtype=torch.float32, device=like.device)
        for place, values in parts:
            first, last = max(place.start, start), min(place.end, start + len(local))
            if first < last:
                local[first - start : last - start].copy_(values[first - place.start : last - place.start])
        gathered = local[None]
        if group.size() > 1:
            gathered = torch.empty(group.size(), len(local), dtype=torch.float32, device=like.device)
            dist.all_gather_into_tensor(gathered.view(-1), local, group=group)
        for rank, row in enumerate(gathered):
            target = out[rank * shard + start :][: len(row)]
            target.copy_(row[: len(target)])


@patches(
    "megatron-core",
    why="updates change state in place, in the inner optimizers of a chained optimizer's parts",
    remove_when="an AsyncRequest copies tensors on the host",
)
def live_storages(models: Sequence[nn.Module], optimizer: Any) -> set[int]:
    """Addresses of the memory in which an update changes weights and optimizer state."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:
            tensors += [parameter for group in part.param_groups for parameter in group["params"]]
            values = [value for state in part.optimizer.state.values() for value in state.values()]
            tensors += [value for value in values if torch.is_tensor(value)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@patches(
    "megatron-core",
    why="AsyncCallsQueue writes in a process that is forked or gets CUDA handles, goes on when its rank is killed, and "
    "reports neither the file nor the reason of an error; the fields of an AsyncRequest are internal",
    remove_when="Megatron-Core, or a release of nvidia-resiliency-ext that it accepts, writes on a thread",
)
class StagedShards:
    """This rank's shards of a checkpoint, copied to host memory so that training can continue. ``request`` is
    Megatron-Core's. Only tensors on a GPU and storages with addresses in ``live`` are copied."""

    def __init__(self, request: Any, live: Collection[int]):
        self._finalize_fns, self._write_fn = request.finalize_fns, request.async_fn
        self._buckets, self._results = request.async_fn_args[1:] or ([], None)
        staged = request.preload_fn() if self._buckets else []
        for _, _, (_, tensors) in staged:
            tensors[:] = [(item, t.clone() if t.untyped_storage().data_ptr() in live else t) for item, t in tensors]
        self._buckets[:] = staged  # the same list in the request: nothing else keeps the originals

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, _, (_, tensors) in self._buckets for _, tensor in tensors)

    def write(self) -> list[str]:
        """Write and sync this rank's files, in any thread; returns their names. Raises OSError with the file."""
        results = {}
        for index, bucket in enumerate(self._buckets):
            transforms, _ = self._write_fn.args
            _, result = FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, None, None, use_fsync=True
            )
            if isinstance(result, OSError):
                raise OSError(result.errno, result.strerror or str(result), bucket[0]) from result
            if isinstance(result, Exception):
                raise OSError(f"{type(result).__name__}: {result}: {bucket[0]}") from result
            results[index] = result
        names = [Path(path).name for path, _, _ in self._buckets]
        self._buckets[:] = [(path, name, ([], [])) for path, name, _ in self._buckets]  # frees the copies
        if self._results is not None:
            self._results.put(results)
        return names

    def finalize(self) -> None:
        """Collective, after every rank has written: write the checkpoint's ``.metadata``."""
        for finalize in self._finalize_fns:
            finalize()
