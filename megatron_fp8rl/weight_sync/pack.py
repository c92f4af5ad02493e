"""Fill the messages of a trainer rank: quantize its parameters directly into the memory that engines read.

In: this rank's parameters, and a schedule of their parts by round and engine rank. Out: the bytes of a round in the
sender's slot, their digest sums, and whether all are finite. Runs on every trainer rank. Addresses are computed once,
so a publication takes a few kernel launches per round, regardless of the number of experts.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, has_nan, is_fp8
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.precision import quantizers
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.precision.quantizers import Quantization
from megatron_fp8rl.weight_sync.copies import Copies, parts_in
from megatron_fp8rl.weight_sync.part_sums import PartSums
from megatron_fp8rl.weight_sync.plan import Transfer
from megatron_fp8rl.weight_sync.schedule import Gathering, Part, Round

Copied = tuple[Tensor, Tensor]  # (target, source)


class LocalShards:
    """This rank's parameters, as parts of Hugging Face tensors."""

    def __init__(self, parameters: Mapping[str, Tensor], trainer: TrainerLayout, model: ModelConfig, rank: int):
        self._parameters = dict(parameters)
        self._trainer = trainer
        self._model = model
        self._rank = rank
        self._weights = registry.weights(model)
        self._cuts: dict[str, tuple[int, int, tuple[int, ...]]] = {}

    def addresses(self) -> list[int]:
        """Addresses of the parameters. If they change, all prepared copies are invalid."""
        parameters = self._parameters.values()
        parts = [
            part for parameter in parameters for part in (fp8_weight(parameter) if is_fp8(parameter) else [parameter])
        ]
        return [part.data_ptr() for part in parts]

    def are_fp8(self, transfer: Transfer) -> bool:
        """Whether this rank stores a tensor as FP8 bytes and scales, which are sent unchanged."""
        return transfer.is_fp8 and is_fp8(self._tensor(transfer.mcore_name))

    def pieces(self, transfer: Transfer, start: int, stop: int) -> list[tuple[Tensor, int, int]]:
        """Return the views that form [start, stop) of the transfer's axis, as (view, first, end) in order. Views of FP8
        parameters contain bytes. Raises ValueError for those that would be requantized or sent in BF16."""
        tensor = self._tensor(transfer.mcore_name)
        if is_fp8(tensor):
            if transfer.quantize == "gathered":
                raise ValueError(
                    f"{transfer.name}: its parts on trainer ranks cut blocks of {transfer.block_size}, and FP8 "
                    "parameters cannot be quantized again. Choose --precision.params bf16"
                )
            if transfer.quantize == "never":
                raise ValueError(
                    f"{transfer.name}: trainer rank {self._rank} stores it in FP8, but it is sent in BF16. Choose "
                    "--precision.params bf16"
                )
            tensor = fp8_weight(tensor).data
        return [
            (tensor.narrow(transfer.axis, position, end - first), first, end)
            for position, first, end in self._ranges(transfer, start, stop)
        ]

    def scales(self, transfer: Transfer, start: int, stop: int) -> list[tuple[Tensor, int, int]]:
        """Return the scales of :meth:`pieces` of an FP8 parameter, as (view, first block, end block). Raises ValueError
        if a piece cuts a block, because bytes and scales would have to be recomputed."""
        scale, views = fp8_weight(self._tensor(transfer.mcore_name)).scale, []
        size = transfer.block_size
        for position, first, end in self._ranges(transfer, start, stop):
            if position % size or first % size or (end % size and end != stop):
                raise ValueError(
                    f"{transfer.name}: trainer rank {self._rank} stores [{first}, {end}) of axis {transfer.axis} at "
                    f"{position}, which cuts blocks of {size}. Choose --precision.params bf16"
                )
            first_block, end_block = transfer.blocks((first, end))
            view = scale.narrow(transfer.axis, position // size, end_block - first_block)
            views.append((view, first_block, end_block))
        return views

    def _ranges(self, transfer: Transfer, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (position in this rank's tensor, first, end) for this rank's parts of [start, stop) of the axis."""
        weight = self._weights[transfer.mcore_name]
        size, rank, _ = self._shard(transfer.mcore_name)
        part = next((i for i, (name, _) in enumerate(weight.parts) if name == transfer.name), 0)  # a copy is of part 0
        position = 0
        for piece in slicing.slices(weight, self._model, size, rank):
            first, end = max(piece.start, start), min(piece.stop, stop)
            if piece.part == part and first < end:
                yield position + first - piece.start, first, end
            position += piece.size

    def _shard(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """Return (number of shards, index and shape of this rank's shard)."""
        cut = self._cuts.get(name)
        if cut is None:
            weight = self._weights[name]
            shards = self._trainer.holders(weight, self._model)
            number = next(i for i, ranks in enumerate(shards) if self._rank in ranks)
            shape = slicing.shard_shape(weight, self._model, len(shards))
            cut = self._cuts[name] = len(shards), number, shape
        return cut

    def _tensor(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise RuntimeError(
                f"{name}: the plan assigns it to trainer rank {self._rank}, but the model there has no such parameter; "
                "plan and model have different layouts"
            )
        tensor, expected = self._parameters[name], self._shard(name)[2]
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the model configuration says {expected}")
        return tensor if is_fp8(tensor) else tensor.detach()


class RoundPacker:
    """Fills one round of this rank's messages. Call it once per publication."""

    def __init__(self, number: Round, slot: Tensor, shards: LocalShards, *, rank: int, group: dist.ProcessGroup | None):
        self._messages = number.sent_by(rank)
        self._gatherings = [
            TensorGather(gathering, shards, rank, slot.device, group)
            for gathering in number.gatherings
            if any(source.rank == rank for source in gathering.sources)
        ]
        whole = {g.transfer.name: g.whole for g in self._gatherings if g.whole is not None}
        self._joins: list[tuple[Tensor, list[Tensor]]] = []  # matrices whose pieces cut blocks, or are not BF16
        copies: list[Copied] = []
        self._as_they_are: list[tuple[Part, Tensor, Tensor]] = []  # FP8 parameters: (part, bytes, scales) in the slot
        quantizations: dict[QuantFormat, list[Quantization]] = {}
        self._parts: list[tuple[Part, Tensor]] = []
        for message in self._messages:
            memory = slot[message.out_offset : message.out_offset + message.num_bytes]
            views = list(parts_in(memory, message))
            self._parts += views
            by_key = {(part.name, part.start): tensor for part, tensor in views}
            for part, target in views:
                if part.is_scale:
                    continue
                if shards.are_fp8(part.transfer) and part.name not in whole:
                    scale = by_key[part.transfer.scale_name, part.blocks[0]]
                    copies += _raw_copies(part, shards, target, scale)
                    self._as_they_are.append((part, target, scale))
                    continue
                if part.name in whole:
                    view = whole[part.name].narrow(part.transfer.axis, part.start, part.stop - part.start)
                    pieces = [(view, part.start, part.stop)]
                else:
                    pieces = shards.pieces(part.transfer, part.start, part.stop)
                if part.transfer.is_fp8:
                    scale = by_key[part.transfer.scale_name, part.blocks[0]]
                    chosen = quantizations.setdefault(part.transfer.format, [])
                    chosen += self._quantizations(part, pieces, target, scale)
                else:
                    axis = part.transfer.axis
                    copies += [(target.narrow(axis, a - part.start, b - a), view) for view, a, b in pieces]
        self._copy = Copies(copies)
        self._quantize = [quantizers.prepare(chosen, fmt) for fmt, chosen in quantizations.items()]
        self._sums = PartSums([(tensor, part.extent) for part, tensor in self._parts])

    def _quantizations(
        self, part: Part, pieces: list[tuple[Tensor, int, int]], target: Tensor, scale: Tensor
    ) -> Iterator[Quantization]:
        """Quantize each piece alone if its edges are block edges; join the others in BF16 first."""
        size = part.transfer.block_size
        alone = all(
            view.dtype == torch.bfloat16 and (first - part.start) % size == 0 and (end % size == 0 or end == part.stop)
            for view, first, end in pieces
        )
        if not alone:
            joined = torch.empty(target.shape, dtype=torch.bfloat16, device=target.device)
            axis = part.transfer.axis
            for view, first, end in pieces:
                self._joins.append((joined.narrow(axis, first - part.start, end - first), view))
            pieces = [(joined, part.start, part.stop)]
        for view, first, end in pieces:
            if part.transfer.axis == 1:  # columns have one piece
                yield view, target, scale
            else:
                block, end_block = part.transfer.blocks((first - part.start, end - part.start))
                rows = target.narrow(0, first - part.start, end - first)
                yield view, rows, scale.narrow(0, block, end_block - block)

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Tensor]:
        """Fill the messages on the current stream; return (result of :class:`PartSums`, bool [] all finite). Collective
        over the ranks that share a gathered tensor of this round."""
        gather_all(self._gatherings)
        return self.fill()

    @torch.no_grad()
    def fill(self) -> tuple[Tensor, Tensor]:
        """Like a call, but with the present content of gathered tensors, and not collective."""
        for target, view in self._joins:
            target.copy_(view)
        self._copy()
        for quantize in self._quantize:
            quantize()
        return self._sums(), self._all_finite()

    def _all_finite(self) -> Tensor:
        # A non-finite FP8 block has a non-finite scale. Sums of BF16 values in float32 do not overflow.
        scales = [tensor.reshape(-1) for part, tensor in self._parts if part.dtype == "float32"]
        others = [tensor.sum(dtype=torch.float32)[None] for part, tensor in self._parts if part.dtype == "bfloat16"]
        numbers = [~has_nan(data) for _, data, _ in self._as_they_are]
        numbers += [quantizers.is_finite(tensor) for part, tensor in self._parts if part.dtype == "uint8"]
        if not scales and not others:
            return torch.tensor(True)
        return torch.stack([torch.cat(scales + others).isfinite().all(), *numbers]).all()

    def not_finite(self) -> list[str]:
        bad_names = {part.transfer.name: None for part, tensor in self._parts if not quantizers.is_finite(tensor)}
        bad_names |= {part.name: None for part, data, _ in self._as_they_are if has_nan(data)}
        return list(bad_names)


def _raw_copies(part: Part, shards: LocalShards, target: Tensor, scale: Tensor) -> Iterator[Copied]:
    """Yield the copies of an FP8 parameter's bytes and scales into the slot."""
    axis, first_block = part.transfer.axis, part.blocks[0]
    for view, first, end in shards.pieces(part.transfer, part.start, part.stop):
        yield target.narrow(axis, first - part.start, end - first), view
    for view, first, end in shards.scales(part.transfer, part.start, part.stop):
        yield scale.narrow(axis, first - first_block, end - first), view


class TensorGather:
    """Assembles a tensor on one rank, in the dtype of its plan, from parts of several ranks. :func:`gather_all` fills
    ``whole`` on the collector; None elsewhere. ``group`` is for CPUs; GPUs use the default group."""

    def __init__(
        self,
        gathering: Gathering,
        shards: LocalShards,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ):
        self.transfer = transfer = gathering.transfer
        self.whole: Tensor | None = None
        self._collector = gathering.collector
        self._group = group if device.type == "cpu" else None
        self._own: list[Copied] = []  # this rank's pieces
        self._receive: list[tuple[Tensor, Tensor, int]] = []  # (view of the whole, receive buffer, source rank)
        self._send: Tensor | None = None
        dtype, is_collector = getattr(torch, transfer.dtype), rank == gathering.collector
        if is_collector:
            self.whole = torch.empty(transfer.shape, dtype=dtype, device=device)
        for source in gathering.sources:
            shape = list(transfer.shape)
            shape[transfer.axis] = source.stop - source.start
            if is_collector:
                place = self.whole.narrow(transfer.axis, source.start, source.stop - source.start)
            else:
                place = torch.empty(shape, dtype=dtype, device=device) if source.rank == rank else None
            if source.rank == rank:
                for view, first, end in shards.pieces(transfer, source.start, source.stop):
                    self._own.append((place.narrow(transfer.axis, first - source.start, end - first), view))
                if not is_collector:
                    self._send = place
            elif is_collector:
                self._receive.append((place, torch.empty(shape, dtype=dtype, device=device), source.rank))

    def start(self) -> list[dist.P2POp]:
        """Copy this rank's pieces; return the sends and receives."""
        for target, view in self._own:
            target.copy_(view)
        operations = [dist.P2POp(dist.irecv, memory, peer, self._group) for _, memory, peer in self._receive]
        if self._send is not None:
            operations.append(dist.P2POp(dist.isend, self._send, self._collector, self._group))
        return operations

    def finish(self) -> None:
        for place, memory, _ in self._receive:
            place.copy_(memory)


@torch.no_grad()
def gather_all(gathers: Sequence[TensorGather]) -> None:
    """Gather. Collective over ranks with parts of these tensors; all must pass them in the same order."""
    operations = [operation for gather in gathers for operation in gather.start()]
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    for gather in gathers:
        gather.finish()
