"""Schedule the messages from trainer ranks to engine ranks in rounds. Deterministic, without side effects.

Trainer ranks and engine workers compute it from the same :class:`Plan`, so a request contains only a version number.

    round 0    every sender's first ``bucket_bytes``, one message per audience
    round 1    the next ``bucket_bytes``, while the engines load round 0
    ...

An audience is the set of engine ranks that keep the same range of a tensor: one rank for a whole expert, all
data-parallel ranks for a part of attention. A message contains the intersection of the sender's range and its
audience's range. The sender fills it once, and every rank of the audience, in every replica, receives it.

If several trainer ranks store the same part (data-parallel replicas, tensors replicated over tensor-parallel ranks),
the rank with the fewest bytes so far sends it. Among equals, a rank on the rail of its audience sends: GPUs with the
same index in their node, whose network cards share a switch. Every sender spreads its bytes evenly over the rounds.

Parts of FP8 tensors start and end at block edges, so each is quantized separately. The parts of a "gathered" tensor do
not; the rank that sends its first part assembles it in BF16.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.formats import ITEM_BYTES, Range
from megatron_fp8rl.weight_sync.plan import Plan, Source, Transfer

GPUS_PER_NODE = 8  # in a rail-optimized network, for the choice among equal senders
_PIECE = 128  # pieces of a tensor start at multiples of this many rows or columns
_ALIGNMENT_BYTES = 64  # of parts in a message: a cache line, enough for any vector load


def aligned(num_bytes: int) -> int:
    """Round ``num_bytes`` up to the aligned offset of the next part of a message."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Position of a part's bytes in the tensor that contains it, as rows of ``row`` bytes."""

    first: int  # offset of the part's first byte in the tensor
    row: int  # bytes in a row of the part
    pitch: int  # bytes from the start of one row to the next
    num_rows: int
    total: int  # bytes of the tensor

    def words(self, word_bytes: int) -> tuple[int, int, int] | None:
        """Return (first word, words per row, words from row to row) for a digest; None if the part cuts words. The last
        word of a tensor may be short; it is zero-padded."""
        is_last = self.num_rows == 1 and self.first + self.row == self.total
        if self.first % word_bytes or (self.row % word_bytes and not is_last):
            return None
        if self.num_rows > 1 and self.pitch % word_bytes:
            return None
        row = -(-self.row // word_bytes)
        return self.first // word_bytes, row, row if self.num_rows == 1 else self.pitch // word_bytes

    def cut_words(self) -> list[int]:
        """Return the 8-byte words that this part shares with others, in order; empty unless :meth:`words` is None."""
        if self.words(8) is not None:
            return []
        starts = (self.first + number * self.pitch for number in range(self.num_rows))
        edges = (edge for start in starts for edge in (start, start + self.row))
        return sorted({edge // 8 for edge in edges if edge % 8 and edge != self.total})


@dataclass(frozen=True, slots=True)
class Part:
    """Rows or columns of one wire tensor, contiguous in a message. For scales, counts are in blocks."""

    transfer: Transfer
    is_scale: bool
    start: int  # along the transfer's axis of the whole tensor
    stop: int
    kept: Range  # the engine rank's range of the whole tensor
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the message

    @property
    def name(self) -> str:
        return self.transfer.scale_name if self.is_scale else self.transfer.name

    @property
    def dtype(self) -> str:
        fmt = self.transfer.format
        return fmt.scale_dtype if self.is_scale and fmt.scale_dtype else fmt.element

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def blocks(self) -> Range:
        """Blocks of a part of values, which are the range of its scales."""
        return self.transfer.blocks((self.start, self.stop))

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the engine rank's slice that contains this part."""
        shape = list(self.shape)
        shape[self.transfer.axis] = self.kept[1] - self.kept[0]
        return tuple(shape)

    @property
    def extent(self) -> Extent:
        item, first = ITEM_BYTES[self.dtype], self.start - self.kept[0]
        row_bytes = math.prod(self.shape[1:]) * item
        total = math.prod(self.kept_shape) * item
        if self.transfer.axis == 1 and (self.start, self.stop) != self.kept:
            pitch = (self.kept[1] - self.kept[0]) * item
            return Extent(first * item, row_bytes, pitch, self.shape[0], total)
        return Extent(first * row_bytes, self.num_bytes, self.num_bytes, 1, total)

    @property
    def words(self) -> tuple[int, int, int] | None:
        """:meth:`Extent.words` in the slice's digest: words of 8 bytes, or single float32 values."""
        return self.extent.words(4 if self.dtype == "float32" else 8)

    @property
    def cut_words(self) -> list[int]:
        return [] if self.dtype == "float32" else self.extent.cut_words()


@dataclass(frozen=True)
class Message:
    """Bytes that one trainer rank sends in one round to all engine ranks of one audience, in every replica."""

    sender: int
    engine_ranks: tuple[int, ...]  # the audience
    num_bytes: int
    out_offset: int  # in the sender's slot for this round
    in_offset: int  # in an engine rank's memory of this round; :meth:`Round.received_by` sets it
    items: tuple[_Item, ...] = field(repr=False)
    whole: bool = field(repr=False)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts; computed on first use, because a rank reads only the messages that it sends or receives. Values
        precede scales and rows precede columns, so that an engine's stacked experts of a layer are one copy."""
        entries = []
        for item in self.items:
            transfer = item.transfer
            kept = _kept(transfer, self.engine_ranks[0], self.whole)
            span = max(item.span[0], kept[0]), min(item.span[1], kept[1])
            for is_scale in (False, True) if transfer.is_fp8 else (False,):
                entries.append(((is_scale, transfer.axis, item.index, span[0]), transfer, span, kept))
        parts, offset = [], 0
        for key, transfer, span, kept in sorted(entries, key=lambda entry: entry[0]):
            part = _part(transfer, key[0], span, kept, offset)
            parts.append(part)
            offset += aligned(part.num_bytes)
        assert offset == self.num_bytes
        return tuple(parts)


@dataclass(frozen=True)
class Gathering:
    """A tensor that ``collector`` assembles in BF16 before quantization."""

    transfer: Transfer
    collector: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Round:
    messages: tuple[Message, ...]
    gatherings: tuple[Gathering, ...]

    @cached_property
    def _by_sender(self) -> dict[int, list[Message]]:
        messages: dict[int, list[Message]] = {}
        for message in self.messages:
            messages.setdefault(message.sender, []).append(message)
        return messages

    @cached_property
    def _by_engine_rank(self) -> dict[int, list[Message]]:
        return {}

    def sent_by(self, sender: int) -> list[Message]:
        return self._by_sender.get(sender, [])

    def received_by(self, engine_rank: int) -> list[Message]:
        """Return the messages to an engine rank, with consecutive offsets in its memory."""
        received = self._by_engine_rank.get(engine_rank)
        if received is None:
            received, offset = [], 0
            for message in self.messages:
                if engine_rank in message.engine_ranks:
                    received.append(replace(message, in_offset=offset))
                    offset += message.num_bytes
            self._by_engine_rank[engine_rank] = received
        return received


@dataclass(frozen=True)
class SendSchedule:
    rounds: tuple[Round, ...]
    num_engine_ranks: int

    def out_bytes(self, sender: int) -> int:
        """Return the maximum bytes that ``sender`` sends in a round."""
        return max((m.out_offset + m.num_bytes for r in self.rounds for m in r.sent_by(sender)), default=0)

    def in_bytes(self, engine_rank: int) -> int:
        """Return the maximum bytes that an engine rank receives in a round."""
        return max((m.in_offset + m.num_bytes for r in self.rounds for m in r.received_by(engine_rank)), default=0)

    @property
    def num_bytes(self) -> int:
        return sum(len(m.engine_ranks) * p.num_bytes for r in self.rounds for m in r.messages for p in m.parts)


@dataclass(frozen=True, slots=True)
class _Item:
    """A range of one tensor that one sender sends in one round."""

    transfer: Transfer
    index: int  # of the transfer in the plan
    span: Range
    sent: tuple[tuple[tuple[int, ...], int], ...]  # of :func:`_sent`
    gathering: Gathering | None = None

    @property
    def num_bytes(self) -> int:
        """Over all engine ranks of a replica."""
        return sum(len(ranks) * size for ranks, size in self.sent)


def _part(transfer: Transfer, is_scale: bool, span: Range, kept: Range, offset: int) -> Part:
    shape = list(transfer.shape)
    if is_scale:
        shape = list(transfer.format.scale_shape(shape))
        span, kept = transfer.blocks(span), transfer.blocks(kept)
    shape[transfer.axis] = span[1] - span[0]
    return Part(transfer, is_scale, span[0], span[1], kept, tuple(shape), offset)


def _kept(transfer: Transfer, engine_rank: int, whole: bool) -> Range:
    kept = (0, transfer.shape[transfer.axis]) if whole else transfer.slices[engine_rank]
    assert kept is not None
    return kept


@lru_cache(maxsize=4096)
def _audiences(slices: tuple[Range | None, ...], whole: bool, length: int) -> tuple[tuple[Range, tuple[int, ...]], ...]:
    """Return (range, engine ranks that keep it). With ``whole``, ranks that keep any part receive all of it."""
    by_range: dict[Range, list[int]] = {}
    for rank, kept in enumerate(slices):
        if kept is not None and kept[0] < kept[1]:
            by_range.setdefault((0, length) if whole else kept, []).append(rank)
    return tuple((kept, tuple(ranks)) for kept, ranks in by_range.items())


def _sent(transfer: Transfer, span: Range, whole: bool) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return (audience, bytes in its message) for a piece of a tensor."""
    axis, tensors = transfer.axis, tuple(transfer.wire_tensors())
    sent = []
    for kept, ranks in _audiences(transfer.slices, whole, transfer.shape[axis]):
        part = max(span[0], kept[0]), min(span[1], kept[1])
        if part[0] < part[1]:
            ranges = (part, transfer.blocks(part))  # of values and of scales
            sizes = (
                t.num_bytes // t.shape[axis] * (end - first) for t, (first, end) in zip(tensors, ranges, strict=False)
            )
            sent.append((ranks, sum(map(aligned, sizes))))
    return tuple(sent)


def _pieces(transfer: Transfer, index: int, source: Source, limit: int, whole: bool) -> list[_Item]:
    """Split a source at block edges into pieces of about ``limit`` bytes, summed over all receivers."""
    start, stop = source.start, source.stop
    item = _Item(transfer, index, (start, stop), _sent(transfer, (start, stop), whole))
    num_bytes = item.num_bytes
    unit = math.lcm(_PIECE, transfer.block_size)
    if num_bytes <= limit or len(transfer.shape) == 1 or stop - start <= unit:
        return [item] if item.sent else []
    step = max(1, limit * (stop - start) // num_bytes // unit) * unit
    edges = [start, *range(start + step - start % unit, stop, step), stop]
    pieces = (_Item(transfer, index, span, _sent(transfer, span, whole)) for span in itertools.pairwise(edges))
    return [piece for piece in pieces if piece.sent]


def _items_by_sender(plan: Plan, model: ModelConfig, limit: int, whole: bool) -> dict[int, list[_Item]]:
    """Assign all pieces to trainer ranks; return each rank's pieces in plan order."""
    weights = registry.weights(model)
    name, replicas = "", {}
    loads = [0] * plan.trainer.world_size
    by_sender: dict[int, list[_Item]] = {}
    shared: list[tuple[int, _Item, list[int]]] = []  # (bytes, piece, the ranks that hold it)
    for index, transfer in enumerate(plan.transfers):
        if transfer.mcore_name != name:  # parts of one tensor are adjacent
            name = transfer.mcore_name
            replicas = {ranks[0]: ranks for ranks in plan.trainer.holders(weights[name], model)}
        if transfer.quantize == "gathered":
            sources = [Source(min(replicas[s.rank], key=loads.__getitem__), s.start, s.stop) for s in transfer.sources]
            span, collector = (0, transfer.shape[transfer.axis]), sources[0].rank
            gathering = Gathering(transfer, collector, tuple(sources))
            item = _Item(transfer, index, span, _sent(transfer, span, whole), gathering)
            loads[collector] += item.num_bytes
            by_sender.setdefault(collector, []).append(item)
            continue
        for source in transfer.sources:
            holders = replicas[source.rank]
            for item in _pieces(transfer, index, source, limit, whole):
                if len(holders) > 1:
                    shared.append((item.num_bytes, item, holders))
                else:
                    loads[source.rank] += item.num_bytes
                    by_sender.setdefault(source.rank, []).append(item)
    # Largest first, because small pieces balance the senders at the end.
    for num_bytes, item, holders in sorted(shared, key=lambda piece: (-piece[0], piece[1].index, piece[1].span)):
        rails = {rank % GPUS_PER_NODE for rank in item.sent[0][0]}
        least = min(loads[rank] for rank in holders)
        near = [rank for rank in holders if loads[rank] < least + num_bytes]
        rank = min(near, key=lambda r: (r % GPUS_PER_NODE not in rails, loads[r], r))
        loads[rank] += num_bytes
        by_sender.setdefault(rank, []).append(item)
    for items in by_sender.values():
        items.sort(key=lambda item: (item.index, item.span))
    return by_sender


def _fill(sizes: list[int], limit: int) -> list[int]:
    """Return the ends of rounds of at most ``limit`` bytes (or one larger piece)."""
    ends, filled = [], 0
    for number, num_bytes in enumerate(sizes):
        if number and filled + num_bytes > limit:
            ends.append(number)
            filled = 0
        filled += num_bytes
    return [*ends, len(sizes)]


def _spread(sizes: list[int], limit: int, num_rounds: int) -> list[int]:
    """Return the ends of at most ``num_rounds`` nearly equal rounds, none above ``limit``."""
    total = sum(sizes)
    for percent in range(100, 1000, 4):
        ends = _fill(sizes, min(limit, total * percent // (100 * num_rounds)))
        if len(ends) <= num_rounds:
            return ends
    return _fill(sizes, limit)


def _messages(sender: int, items: list[_Item], whole: bool) -> list[Message]:
    sizes: dict[tuple[int, ...], int] = {}
    members: dict[tuple[int, ...], list[_Item]] = {}
    for item in items:
        for audience, num_bytes in item.sent:
            sizes[audience] = sizes.get(audience, 0) + num_bytes
            members.setdefault(audience, []).append(item)
    messages, offset = [], 0
    for audience in sorted(members):
        messages.append(Message(sender, audience, sizes[audience], offset, 0, tuple(members[audience]), whole))
        offset += sizes[audience]
    return messages


def plan_schedule(plan: Plan, model: ModelConfig, *, bucket_bytes: int, whole: bool = False) -> SendSchedule:
    """Schedule a publication, in whose rounds a sender sends at most ``bucket_bytes`` to all engine ranks of a replica.

    With fewer engine ranks than senders it sends less, so that an engine rank receives at most about ``bucket_bytes``
    too. With ``whole``, an engine rank receives the whole of every tensor that it keeps a part of, for vLLM's loaders.
    """
    num_engine_ranks = plan.engine.size
    num_senders = len({s.rank for t in plan.transfers for s in t.sources})
    limit = max(1, bucket_bytes * min(num_engine_ranks, num_senders) // num_senders)
    items = dict(sorted(_items_by_sender(plan, model, limit, whole).items()))
    sizes = {sender: [item.num_bytes for item in sender_items] for sender, sender_items in items.items()}
    num_rounds = max(len(_fill(sender_sizes, limit)) for sender_sizes in sizes.values())
    ends = {sender: [0, *_spread(sender_sizes, limit, num_rounds)] for sender, sender_sizes in sizes.items()}
    rounds = []
    for number in range(num_rounds):
        messages: list[Message] = []
        gatherings: list[Gathering] = []
        for sender, sender_items in items.items():
            chosen = sender_items[slice(*ends[sender][number : number + 2])] if number + 1 < len(ends[sender]) else []
            messages += _messages(sender, chosen, whole)
            gatherings += [item.gathering for item in chosen if item.gathering is not None]
        rounds.append(Round(tuple(messages), tuple(gatherings)))
    return SendSchedule(tuple(rounds), num_engine_ranks)
