"""Bring the tensors of a plan together on trainer rank 0, bucket by bucket.

In:  this rank's parameters under their global Megatron names, and a :class:`Plan`.
Out: on rank 0 every bucket's tensors, byte for byte as the wire carries them.
Runs on every trainer rank. Each rank sends one message per bucket, and only what the plan says it owns.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import FP8_BLOCK, ModelConfig
from megatron_fp8rl.kernels.blockwise import Scales, canonical, quantize_weight
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, has_nan, is_fp8, plain
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.weight_sync.plan import ALIGNMENT_BYTES, Bucket, Plan, Source, Transfer, aligned, scale_range

Result = TypeVar("Result")
# What one source contributes to one transfer: (part as it travels, scales of an FP8 part).
Piece = tuple[Tensor, Tensor | None]


class TrainerRankError(RuntimeError):
    """Another trainer rank failed with an error that cannot travel; the message quotes it."""


def together(work: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """Collective: do ``work`` on every rank; when any rank fails, all raise the error of the lowest one that did.

    Without this a failure on one rank would leave the others waiting in their next collective. ``group`` runs on the
    CPU; None means that there is one rank.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # whatever it is, the other ranks have to hear of it
        error = caught
    if group is None:
        if error is not None:
            raise error
        return result  # type: ignore[return-value]
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return result  # type: ignore[return-value]
    errors: list[bytes | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, _pickled(error), group=group)
    rank, first = next((rank, e) for rank, e in enumerate(errors) if e is not None)
    if rank == dist.get_rank(group):
        raise error  # type: ignore[misc]
    raise pickle.loads(first) from error


def _pickled(error: Exception | None) -> bytes | None:
    """The error in a form that survives the way to another rank, or its text."""
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # classes whose arguments do not rebuild them fail in ways of their own
        data = pickle.dumps(TrainerRankError(f"{type(error).__name__}: {error}"))
    return data


def _part_shape(transfer: Transfer, source: Source) -> tuple[int, ...]:
    shape = list(transfer.shape)
    shape[transfer.axis] = source.stop - source.start
    return tuple(shape)


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // FP8_BLOCK) for n in shape)


def _message_layout(bucket: Bucket, rank: int) -> list[tuple[int, torch.dtype, tuple[int, ...]]]:
    """(transfer index, dtype, shape) of the tensors in the message of ``rank``, in order."""
    layout = []
    for index, transfer in enumerate(bucket.transfers):
        for source in transfer.sources:
            if source.rank == rank:
                shape = _part_shape(transfer, source)
                if transfer.quantize == "at_source":
                    layout += [(index, torch.float8_e4m3fn, shape), (index, torch.float32, _blocks(shape))]
                else:
                    layout += [(index, getattr(torch, transfer.dtype), shape)]
    return layout


class Gather:
    """The movement of one plan's tensors to rank 0.

    ``group`` is for small agreements on the CPU (None: one rank), ``device`` where parameters live: messages travel
    over ``group`` from a CPU, over the default group from a GPU. With ``in_canonical_form`` FP8 blocks travel in the form
    that vLLM's loaders would give them. Parameters that are FP8 themselves travel as they are.
    """

    def __init__(
        self,
        plan: Plan,
        model: ModelConfig,
        parameters: Mapping[str, Tensor],
        *,
        scales: Scales,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        in_canonical_form: bool = False,
    ):
        self.plan = plan
        self.model = model
        self.parameters = dict(parameters)
        self.scales: Scales = scales
        self.rank = rank
        self.group = group
        self.device = device
        self._in_canonical_form = in_canonical_form

    def check(self) -> None:
        """Raise RuntimeError when this rank's model does not hold what the plan expects of it, and ValueError for an
        FP8 parameter that would have to be quantized a second time."""
        for transfer in self.plan.transfers:
            if all(source.rank != self.rank for source in transfer.sources):
                continue
            if transfer.mcore_name not in self.parameters:
                raise RuntimeError(
                    f"{transfer.name}: by the plan trainer rank {self.rank} holds {transfer.mcore_name}, but its model "
                    "has no such parameter; the plan's layout is not the model's"
                )
            if transfer.quantize == "gathered" and is_fp8(self.parameters[transfer.mcore_name]):
                raise ValueError(
                    f"{transfer.name}: its parts on trainer ranks cut blocks of {FP8_BLOCK}, and FP8 parameters are not "
                    "quantized again. Choose --precision.params bf16"
                )

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> dict[int, Piece]:
        """This rank's pieces of a bucket by transfer index, quantized where the plan says so. No communication."""
        parts: dict[int, Tensor] = {}
        as_they_are: dict[int, Piece] = {}
        split: dict[str, dict[str, Tensor]] = {}
        fp8: dict[str, dict[str, Piece]] = {}
        for index, transfer in enumerate(bucket.transfers):
            if all(source.rank != self.rank for source in transfer.sources):
                continue
            name = transfer.mcore_name
            if transfer.is_fp8 and is_fp8(self.parameters[name]):
                if name not in fp8:
                    fp8[name] = self._split_fp8(name)
                as_they_are[index] = fp8[name][transfer.name]
                continue
            if name not in split:
                held = registry.to_hf(name, plain(self.parameters[name]), self.model, *self._place(name))
                split[name] = dict(held)
            parts[index] = split[name][transfer.name].to(getattr(torch, transfer.dtype))
        pieces: dict[int, Piece] = {index: (part, None) for index, part in parts.items()}
        at_source = [i for i in parts if bucket.transfers[i].quantize == "at_source"]
        self._require_numbers(bucket, as_they_are)
        pieces |= as_they_are | self._quantize({i: parts[i] for i in at_source})
        return {index: pieces[index] for index in sorted(pieces)}

    def _require_numbers(self, bucket: Bucket, pieces: dict[int, Piece]) -> None:
        """Raise ValueError for NaN among bytes that are not quantized here; elsewhere their scale would tell."""
        if pieces and torch.stack(wrong := [has_nan(data) for data, _ in pieces.values()]).any():
            found = [bucket.transfers[index].name for index, is_nan in zip(pieces, wrong, strict=True) if is_nan]
            raise ValueError(
                f"not published, for they hold NaN: {', '.join(found[:5])} on trainer rank {self.rank}; lower optim.lr "
                "and resume from the last checkpoint"
            )

    def _place(self, name: str) -> tuple[int, int]:
        """(number of shards of a parameter, which of them this rank holds)."""
        ranks = self.plan.trainer.shards(registry.weight(name, self.model), self.model)
        return len(ranks), ranks.index(self.rank)

    def _split_fp8(self, name: str) -> dict[str, Piece]:
        """This rank's bytes and scales of each Hugging Face tensor that an FP8 parameter is made of."""
        held, weight = fp8_weight(self.parameters[name]), registry.weight(name, self.model)
        size, rank = self._place(name)
        data = slicing.split(weight, self.model, held.data.view(torch.uint8), size, rank)
        scales = slicing.split(weight, self.model, held.scale, size, rank, block=FP8_BLOCK)
        pieces = [(part.view(torch.float8_e4m3fn), scale) for part, scale in zip(data, scales, strict=True)]
        if self._in_canonical_form:
            pieces = [canonical(*piece) for piece in pieces]
        return {part: piece for (part, _), piece in zip(weight.parts, pieces, strict=True)}

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = quantize_weight(weight, self.scales)
        return canonical(*found) if self._in_canonical_form else found

    def _quantize(self, parts: dict[int, Tensor]) -> dict[int, Piece]:
        """Quantize matrices, those of equal width in one call: whole blocks of rows can be stacked without mixing."""
        stacks: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, part in parts.items():
            alone = 0 if part.shape[0] % FP8_BLOCK == 0 else index + 1
            stacks[part.shape[1], alone].append(index)
        pieces: dict[int, Piece] = {}
        for members in stacks.values():
            stacked = torch.cat([parts[i] for i in members]) if len(members) > 1 else parts[members[0]]
            data, scale = self._quantized(stacked)
            rows = [parts[i].shape[0] for i in members]
            blocks = [-(-n // FP8_BLOCK) for n in rows]
            pieces |= dict(zip(members, zip(data.split(rows), scale.split(blocks))))
        return pieces

    def collect(self, bucket: Bucket, own: dict[int, Piece]) -> dict[int, list[Piece]]:
        """Collective: all pieces of a bucket on rank 0, by transfer index in the order of its sources; {} elsewhere."""
        if self.rank != 0:
            self._send(bucket, own)
            return {}
        by_rank = {0: own} | self._receive(bucket)
        return {
            index: [by_rank[source.rank][index] for source in transfer.sources]
            for index, transfer in enumerate(bucket.transfers)
        }

    @property
    def _data_group(self) -> dist.ProcessGroup | None:
        return self.group if self.device.type == "cpu" else None

    def _send(self, bucket: Bucket, own: dict[int, Piece]) -> None:
        chunks = []
        for piece in own.values():
            for tensor in piece:
                if tensor is not None:
                    data = tensor.contiguous().reshape(-1).view(torch.uint8)
                    chunks.append(torch.nn.functional.pad(data, (0, -data.numel() % ALIGNMENT_BYTES)))
        if chunks:
            dist.send(torch.cat(chunks), dst=0, group=self._data_group)

    def _receive(self, bucket: Bucket) -> dict[int, dict[int, Piece]]:
        ranks = sorted({s.rank for t in bucket.transfers for s in t.sources} - {0})
        layouts = {rank: _message_layout(bucket, rank) for rank in ranks}
        messages, waiting = {}, []
        for rank, layout in layouts.items():
            num_bytes = sum(aligned(math.prod(shape) * dtype.itemsize) for _, dtype, shape in layout)
            messages[rank] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            waiting.append(dist.irecv(messages[rank], src=rank, group=self._data_group))
        for request in waiting:
            request.wait()
        return {rank: _unpack_message(messages[rank], layout) for rank, layout in layouts.items()}

    @torch.no_grad()
    def assemble(self, bucket: Bucket, pieces: dict[int, list[Piece]], tensors: Mapping[str, Tensor]) -> None:
        """Rank 0: write a bucket's pieces into ``tensors``, its wire tensors by name. Quantizes what came in BF16."""
        for index, transfer in enumerate(bucket.transfers):
            target = tensors[transfer.name]
            if transfer.quantize == "gathered":
                whole = torch.cat([part for part, _ in pieces[index]], dim=transfer.axis)
                data, scale = self._quantized(whole)
                target.copy_(data)
                tensors[transfer.scale_name].copy_(scale)
                continue
            for source, (part, scale) in zip(transfer.sources, pieces[index]):
                target.narrow(transfer.axis, source.start, source.stop - source.start).copy_(part)
                if scale is not None:
                    first, end = scale_range((source.start, source.stop))
                    tensors[transfer.scale_name].narrow(transfer.axis, first, end - first).copy_(scale)


def _unpack_message(message: Tensor, layout: list[tuple[int, torch.dtype, tuple[int, ...]]]) -> dict[int, Piece]:
    pieces: dict[int, Piece] = {}
    offset = 0
    for index, dtype, shape in layout:
        num_bytes = math.prod(shape) * dtype.itemsize
        tensor = message[offset : offset + num_bytes].view(dtype).view(shape)
        pieces[index] = (pieces[index][0], tensor) if index in pieces else (tensor, None)
        offset += aligned(num_bytes)
    return pieces
