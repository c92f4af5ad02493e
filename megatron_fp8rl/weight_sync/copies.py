"""Batched copies between fixed addresses in few kernel launches, and the parts of a message as tensors."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.schedule import Message, Part


class Copies:
    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]):
        """``pairs``: (target, source) of equal shape; the source is converted to the dtype of the target."""
        alike = [(t, s) for t, s in pairs if t.dtype == s.dtype and t.is_contiguous() and s.is_contiguous()]
        chosen = {id(t) for t, _ in alike}
        self._pairs = [*_merged(alike), *((t, s) for t, s in pairs if id(t) not in chosen)]

    def __len__(self) -> int:
        return len(self._pairs)

    def __call__(self) -> None:
        """Copy on the current stream."""
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)


def _merged(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copies as flat bytes; merge pairs that are adjacent at both ends."""
    runs: list[list[Any]] = []  # [target, source, bytes]: first tensors of a run
    for target, source in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        num_bytes = target.numel() * target.element_size()
        if runs:
            first, first_source, so_far = runs[-1]
            follows = (
                first.data_ptr() + so_far == target.data_ptr()
                and first_source.data_ptr() + so_far == source.data_ptr()
                and first.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
                and first_source.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            )
            if follows:
                runs[-1][2] += num_bytes
                continue
        runs.append([target, source, num_bytes])
    for target, source, num_bytes in runs:
        if num_bytes:
            yield _flat(target, num_bytes), _flat(source, num_bytes)


def _flat(tensor: Tensor, num_bytes: int) -> Tensor:
    """uint8 [num_bytes] starting at the first byte of ``tensor``."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (num_bytes,))


def parts_in(memory: Tensor, message: Message) -> Iterator[tuple[Part, Tensor]]:
    """Yield every part of a message with its tensor in ``memory``, uint8 [bytes of the message]. Makes one call of
    PyTorch per part, because there are tens of thousands."""
    typed: dict[str, Tensor] = {}
    for part in message.parts:
        name = part.dtype
        if name not in typed:
            typed[name] = memory.view(getattr(torch, name))
        flat, shape = typed[name], part.shape
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        yield part, flat.as_strided(shape, strides, flat.storage_offset() + part.offset // flat.element_size())
