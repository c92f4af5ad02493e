"""Offload weights, gradients and optimizer state of a policy to the host, and restore them bitwise; no collectives.

It moves storages, not tensors: every view of a buffer becomes valid again once its storage is restored. Megatron-Core's
helper for the optimizer replaces ``tensor.data`` instead, which would detach FP32 parameters from their buffers.

    params      parameter buffers and the reference model    copied to host memory; for FP8 parameters the rowwise data
                                                             (columnwise is rebuilt, scales are not offloaded)
    gradients   gradient buffers, except for weights in the  discarded; restored as zeros
                same memory (shared_memory.py)
    optimizer   FP32 master weights and Adam's moments       copied to host memory; on the GPU only during a step, so
                                                             that activations can use their memory before

Adam steps in pieces. While it updates a piece, the states of the next one come and those of the last one leave, each
direction on its own stream. Master weights stay on the GPU until the parameters are rounded from them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from megatron_fp8rl.kernels.fp8_parameter import is_fp8
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches
from megatron_fp8rl.trainer.optimizer.fp8_params import consecutive
from megatron_fp8rl.trainer.optimizer.shared_memory import bytes_of_weights

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from megatron_fp8rl.trainer.optimizer.optimizer import Optimizer

Part = Literal["params", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)

_ALIGNMENT_BYTES = 512  # of each storage within the host buffer
_ALLOCATION_DEADLINE_S = 600.0


class HostMemory:
    """Host memory for offloading, ``sizes`` in bytes by part. A thread allocates it while the process waits for
    engines: locking tens of GiB takes longer than filling them."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        self._ready: dict[str, Tensor] = {}
        self._thread = threading.Thread(target=self._allocate, args=(sizes, device), name="host-memory", daemon=True)
        self._thread.start()

    def _allocate(self, sizes: Mapping[str, int], device: torch.device) -> None:
        for part, num_bytes in sizes.items():
            with contextlib.suppress(RuntimeError):  # there is too little: the release that needs it says so
                self._ready[part] = _allocated(num_bytes, device)

    def take(self, part: Part) -> Tensor:
        """uint8 [bytes of the part], once; empty if there is none, or not before a deadline."""
        self._thread.join(_ALLOCATION_DEADLINE_S)
        return self._ready.pop(part, torch.empty(0, dtype=torch.uint8))


class _Storages:
    """Storages that are offloaded together, and the reusable host buffer for the bytes that are kept, if any."""

    def __init__(self, part: Part, memory: HostMemory | None) -> None:
        self._part, self._memory = part, memory
        self._to_host = part != "gradients"
        self._away: dict[torch.UntypedStorage, tuple[int, int, Tensor]] = {}  # size, bytes that are kept, their copy
        self._device = torch.device("cpu")
        self._host = torch.empty(0, dtype=torch.uint8)

    def __bool__(self) -> bool:
        return bool(self._away)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process may be ending
            self._unpin()

    def release(self, storages: dict[torch.UntypedStorage, int], device: torch.device) -> None:
        """Free ``storages``; the first bytes of each, as many as its value, are kept."""
        self._device, offset = device, 0
        if self._to_host:
            self._reserve(sum(map(_aligned, storages.values())))
        for storage, kept in storages.items():
            self._away[storage] = storage.nbytes(), kept, self._host[offset : offset + kept]
            offset += _aligned(kept)
            self._send(storage)
        _synchronize(device)
        for storage, kept in storages.items():
            storage.resize_(0 if self._to_host else kept)

    def restore(self) -> None:
        """Reallocate every storage with its kept bytes, which arrive on the current stream. Without a host copy, the
        other bytes are zeros."""
        for storage in self._away:  # memory is mapped for the next one while bytes of the last one are copied
            self._allocate(storage)
            self._fetch(storage)
        self._away = {}

    def of(self, adam: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """What is away of ``params`` and their states, once for each tensor."""
        tensors = (x for parameter in params for x in (parameter, *adam.state[parameter].values()))
        storages = (x.untyped_storage() for x in tensors if isinstance(x, Tensor))
        return [storage for storage in storages if storage in self._away]

    def step(self, adam: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        """``step`` of ``adam``, whose states are away. Its parameters stay on the device until :meth:`drop`."""
        device, groups = torch.get_device_module(self._device), adam.param_groups
        main, coming, going = device.current_stream(), device.Stream(), device.Stream()
        pieces = [
            (group, group["params"][some])
            for group in groups
            for some in consecutive([parameter.numel() for parameter in group["params"]])
        ]
        storages = [self.of(adam, params) for _, params in pieces]

        def move(index: int, stream: Any, copy: Callable[[torch.UntypedStorage], None]) -> Any:
            stream.wait_stream(main)
            with device.stream(stream):
                for storage in storages[index]:
                    copy(storage)
            event = device.Event()
            event.record(stream)
            return event

        def fetch(index: int) -> Any:
            for storage in storages[index]:
                self._allocate(storage)  # in memory of the main stream
            return move(index, coming, self._fetch)

        def free(index: int, left: Any) -> None:
            left.synchronize()
            for storage in {*storages[index]} - {parameter.untyped_storage() for parameter in pieces[index][1]}:
                storage.resize_(0)

        arrived, left = [fetch(0)] if pieces else [], []
        try:
            for index, (group, params) in enumerate(pieces):
                if index + 1 < len(pieces):
                    arrived.append(fetch(index + 1))
                main.wait_event(arrived[index])
                adam.param_groups = [piece := group | {"params": params}]
                step()
                if "step" in piece and params[-1] is group["params"][-1]:
                    group["step"] = piece["step"]
                left.append(move(index, going, self._send))
                if index:
                    free(index - 1, left[index - 1])
        finally:
            adam.param_groups = groups
        if pieces:
            free(len(pieces) - 1, left[-1])

    def drop(self) -> None:
        """Free what :meth:`step` left on the device."""
        _synchronize(self._device)
        for storage in self._away:
            storage.resize_(0)

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(max(self._away[storage][0], storage.nbytes()))  # gradients may be back where weights are not

    def _fetch(self, storage: torch.UntypedStorage) -> None:
        _, kept, host = self._away[storage]
        if self._to_host:
            _bytes_of(storage, self._device)[:kept].copy_(host, non_blocking=True)
        else:
            _bytes_of(storage, self._device)[kept:].zero_()

    def _send(self, storage: torch.UntypedStorage) -> None:
        _, kept, host = self._away[storage]
        if self._to_host:
            host.copy_(_bytes_of(storage, self._device)[:kept], non_blocking=True)

    def _reserve(self, num_bytes: int) -> None:
        if self._memory is not None and not self._host.numel():
            self._host = self._memory.take(self._part)
        if self._host.numel() < num_bytes:
            self._unpin()
            self._host = _allocated(num_bytes, self._device)

    def _unpin(self) -> None:
        if self._device.type == "cuda" and self._host.numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))


class Offload:
    """Offloads ``parts`` of a policy (``optim.offload``). Other parts are always on the GPU."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: Optimizer,
        reference: Sequence[nn.Module],
        *,
        parts: Sequence[Part],
        device: torch.device,
        memory: HostMemory | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._models: list[nn.Module] = [chunk.module for chunk in chunks]
        self._reference = reference
        self._parts: dict[Part, _Storages] = {part: _Storages(part, memory) for part in parts}

    @property
    def offloaded(self) -> tuple[Part, ...]:
        return tuple(part for part, storages in self._parts.items() if storages)

    def release(self, *parts: Part) -> None:
        """Offload ``parts`` and release PyTorch's cached memory to the device."""
        for part in parts:
            memory = self._parts.get(part)
            if memory is not None and not memory:
                memory.release(self._storages_of(part), self._device)
                if part == "params":
                    self._forget_copies()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self, *parts: Part) -> None:
        for part in parts or self.offloaded:
            if memory := self._parts.get(part):
                if part == "optimizer":
                    clear_weight_caches()  # frees memory; a step is about to change the weights
                memory.restore()
        _synchronize(self._device)  # a release may overwrite the host copies after this

    @contextlib.contextmanager
    def resident(self, *parts: Part) -> Iterator[None]:
        """Load ``parts``, or all state, to the GPU for the block; restore the previous placement afterwards."""
        before = [part for part in self.offloaded if part in (parts or PARTS)]
        if not before:
            yield
            return
        with span("colocated", apart=True):
            self.restore(*before)
        try:
            yield
        finally:
            with span("colocated", apart=True):
                self.release(*before)

    @contextlib.contextmanager
    def streamed(self) -> Iterator[None]:
        """For the block of an optimizer step: states of Adam come and leave while it steps. All are on the device in
        the block if Adam has no moments yet, or not Adam alone reads them."""
        memory = self._parts.get("optimizer")
        if not memory or not self._optimizer.may_step_in_pieces or not self._has_own_states(memory):
            with self.resident("optimizer"):
                yield
            return
        clear_weight_caches()  # as in :meth:`restore`
        with contextlib.ExitStack() as stack:
            stack.callback(memory.drop)
            for adam in self._adams():
                adam.step = functools.partial(self._step, memory, adam, adam.step)
                stack.callback(delattr, adam, "step")
            yield

    @staticmethod
    def _step(memory: _Storages, adam: torch.optim.Optimizer, step: Callable[[], Any]) -> None:
        with span("colocated", apart=True):
            memory.step(adam, step)

    def require(self, *parts: Part) -> None:
        """Raise RuntimeError if one of ``parts`` is offloaded: its tensors have no memory to read."""
        if missing := [part for part in parts if part in self.offloaded]:
            raise RuntimeError(f"{', '.join(missing)} of the policy are offloaded; call policy.offload.restore() first")

    def _storages_of(self, part: Part) -> dict[torch.UntypedStorage, int]:
        """Unique storages of a part, in an order that depends only on the tensors, with the number of bytes to keep."""
        params = unique_storages(self._params())
        gradients = unique_storages(buffer.grad_data for buffer in self._buffers())
        shared = bytes_of_weights(list(self._buffers()))
        if part == "params":
            return {storage: shared.get(key, storage.nbytes()) for key, storage in params.items()}
        if part == "gradients":  # weights are offloaded with the parameters
            return {storage: shared.get(key, 0) for key, storage in gradients.items()}
        # FP32 parameters serve as master weights, and the optimizer's gradients are views of the buffers.
        others = params | gradients
        states = unique_storages(self._states())
        return {storage: storage.nbytes() for key, storage in states.items() if key not in others}

    def _forget_copies(self) -> None:
        """Free cached FP8 copies and columnwise data, as large as the rowwise data; the next pass makes them again."""
        clear_weight_caches()
        for parameter in (parameter for model in self._models for parameter in model.parameters()):
            if is_fp8(parameter):
                parameter.update_usage(rowwise_usage=True, columnwise_usage=False)

    def _buffers(self) -> Iterator:
        for chunk in self._chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _params(self) -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for parameter in (
            parameter for module in (*self._models, *self._reference) for parameter in module.parameters()
        ):
            if type(parameter.data) is Tensor:  # a quantized parameter wraps tensors that are in the buffers
                yield parameter.data

    def _states(self) -> Iterator[Tensor]:
        for adam in self._adams():
            for group in adam.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in adam.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _adams(self) -> Iterator[torch.optim.Optimizer]:
        megatron = self._optimizer.megatron
        return (part.optimizer for part in getattr(megatron, "chained_optimizers", [megatron]))

    def _has_own_states(self, memory: _Storages) -> bool:
        """Whether every parameter of the optimizer has states, and shares none of ``memory``."""
        storages: list[torch.UntypedStorage] = []
        for adam in self._adams():
            params = [parameter for group in adam.param_groups for parameter in group["params"]]
            if not all(adam.state.get(parameter) for parameter in params):
                return False
            storages += memory.of(adam, params)
        return len(storages) == len(set(storages))


def unique_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage.data_ptr(), storage)
    return storages


def _allocated(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] of host memory, page-locked for a GPU. PyTorch's pinned allocator rounds up to powers of two,
    which may double a node's memory use."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    return memory


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
