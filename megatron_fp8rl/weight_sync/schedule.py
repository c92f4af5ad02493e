"""Which bytes travel from which trainer rank to which engine rank, and in which round. Pure and deterministic.

In:  a :class:`Plan`. Out: a :class:`SendSchedule`: rounds of messages. Trainer ranks and engine workers compute equal
schedules from the same configuration, so only a version number has to be agreed on.

    round 0    every sender's first ``bucket_bytes``, one message per engine rank
    round 1    the next ``bucket_bytes``, while the engines load round 0
    ...

A message holds the intersection of what a sender holds and what an engine rank keeps: two ranges of one axis. If
several trainer ranks hold the same part (data-parallel replicas, tensors replicated over tensor-parallel ranks), the
one with the fewest bytes so far sends it. The engine ranks of all replicas receive the same messages.

Parts of FP8 tensors start and end at block edges, so each is quantized by itself. A "gathered" tensor, whose parts do
not, is assembled in BF16 on the rank that sends its first part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron_fp8rl.config import FP8_BLOCK, ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.weight_sync.plan import ITEM_BYTES, Plan, Range, Source, Transfer, scale_range

_ALIGNMENT_BYTES = 64  # of every part in a message: a cache line, and enough for any vector load


def aligned(num_bytes: int) -> int:
    """The aligned offset at which the next part of a message begins, after ``num_bytes``."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """The position of a part's bytes in the tensor that contains it: rows of ``row`` bytes each."""

    first: int  # offset of the part's first byte in the tensor
    row: int  # bytes in a row of the part
    pitch: int  # bytes from the start of one row to the next
    num_rows: int
    total: int  # bytes of the tensor

    def words(self, word_bytes: int) -> tuple[int, int, int] | None:
        """(first word, words per row, words from row to row) for a digest; None for a part that cuts words.

        The last word of a tensor may be short: it is zero-padded.
        """
        is_last = self.num_rows == 1 and self.first + self.row == self.total
        if self.first % word_bytes or (self.row % word_bytes and not is_last):
            return None
        if self.num_rows > 1 and self.pitch % word_bytes:
            return None
        row = -(-self.row // word_bytes)
        return self.first // word_bytes, row, row if self.num_rows == 1 else self.pitch // word_bytes

    def cut_words(self) -> list[int]:
        """Words of 8 bytes, in order, that this part shares with others; empty unless :meth:`words` is None."""
        if self.words(8) is not None:
            return []
        starts = (self.first + number * self.pitch for number in range(self.num_rows))
        edges = (edge for start in starts for edge in (start, start + self.row))
        return sorted({edge // 8 for edge in edges if edge % 8 and edge != self.total})


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows or columns of one wire tensor, contiguous in a message. For scales, all counts are in blocks."""

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
        if self.is_scale:
            return "float32"
        return "float8_e4m3fn" if self.transfer.is_fp8 else self.transfer.dtype

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the engine rank's slice that contains this part."""
        shape = list(self.shape)
        shape[self.transfer.axis] = self.kept[1] - self.kept[0]
        return tuple(shape)

    @property
    def extent(self) -> Extent:
        """The extent of this part in the engine rank's slice."""
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
        """:meth:`Extent.cut_words` in the slice's digest."""
        return [] if self.dtype == "float32" else self.extent.cut_words()


@dataclass(frozen=True)
class Message:
    """What one trainer rank sends to one engine rank (of every replica) in one round."""

    sender: int
    engine_rank: int
    parts: tuple[Part, ...]
    num_bytes: int
    out_offset: int  # in the sender's slot for this round
    in_offset: int  # in what the engine rank receives in this round


@dataclass(frozen=True)
class Gathering:
    """A tensor that is assembled in BF16 on ``collector`` before quantization."""

    transfer: Transfer
    collector: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Round:
    """Messages that travel together."""

    messages: tuple[Message, ...]
    gatherings: tuple[Gathering, ...]

    def sent_by(self, sender: int) -> list[Message]:
        return [m for m in self.messages if m.sender == sender]

    def received_by(self, engine_rank: int) -> list[Message]:
        return [m for m in self.messages if m.engine_rank == engine_rank]


@dataclass(frozen=True)
class SendSchedule:
    """One publication from all trainer ranks to the engine ranks of a replica."""

    rounds: tuple[Round, ...]
    num_engine_ranks: int

    @cached_property
    def senders(self) -> list[int]:
        return sorted({m.sender for r in self.rounds for m in r.messages})

    def out_bytes(self, sender: int) -> int:
        """Maximum bytes that ``sender`` sends to one replica in a round."""
        return max((m.out_offset + m.num_bytes for r in self.rounds for m in r.sent_by(sender)), default=0)

    def in_bytes(self, engine_rank: int) -> int:
        """Maximum bytes that an engine rank receives in a round."""
        return max((m.in_offset + m.num_bytes for r in self.rounds for m in r.received_by(engine_rank)), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes that one replica receives."""
        return sum(part.num_bytes for r in self.rounds for m in r.messages for part in m.parts)


@dataclass(frozen=True)
class _Item:
    """A range of one tensor that one sender sends in one piece."""

    transfer: Transfer
    index: int  # of the transfer in the plan
    span: Range
    gathering: Gathering | None


def _part(transfer: Transfer, is_scale: bool, span: Range, kept: Range, offset: int) -> Part:
    shape = [-(-n // FP8_BLOCK) for n in transfer.shape] if is_scale else list(transfer.shape)
    if is_scale:
        span, kept = scale_range(span), scale_range(kept)
    shape[transfer.axis] = span[1] - span[0]
    return Part(transfer, is_scale, span[0], span[1], kept, tuple(shape), offset)


def _kept(transfer: Transfer, engine_rank: int, whole: bool) -> Range | None:
    return (0, transfer.shape[transfer.axis]) if whole else transfer.slices[engine_rank]


def _message_parts(items: list[_Item], engine_rank: int, whole: bool) -> tuple[tuple[Part, ...], int]:
    """The parts of a sender's items for one engine rank, and their total size.

    Data precede scales and rows precede columns, so that tensors which are adjacent in an engine (the stacked experts
    of a layer) are adjacent in the message and written by one copy.
    """
    entries: list[tuple[tuple[bool, int, int, int], Transfer, Range, Range]] = []
    for item in items:
        kept = _kept(item.transfer, engine_rank, whole)
        if kept is None:
            continue
        span = max(item.span[0], kept[0]), min(item.span[1], kept[1])
        if span[0] < span[1]:
            axis = item.transfer.axis
            entries.append(((False, axis, item.index, span[0]), item.transfer, span, kept))
            if item.transfer.is_fp8:
                entries.append(((True, axis, item.index, span[0]), item.transfer, span, kept))
    parts, offset = [], 0
    for key, transfer, span, kept in sorted(entries, key=lambda entry: entry[0]):
        part = _part(transfer, key[0], span, kept, offset)
        parts.append(part)
        offset += aligned(part.num_bytes)
    return tuple(parts), offset


def _pieces(transfer: Transfer, source: Source, limit: int) -> list[Range]:
    """Split a source into pieces of at most about ``limit`` bytes; rows can be cut at any block edge."""
    row_bytes = math.prod(transfer.shape[1:]) * ITEM_BYTES["float8_e4m3fn" if transfer.is_fp8 else transfer.dtype]
    if transfer.axis != 0 or len(transfer.shape) == 1 or transfer.quantize == "gathered":
        return [(source.start, source.stop)]
    step = max(1, limit // (row_bytes * FP8_BLOCK)) * FP8_BLOCK
    first = source.start + step - source.start % FP8_BLOCK
    edges = [source.start, *range(first, source.stop, step), source.stop]
    return list(zip(edges, edges[1:]))


def _items_by_sender(plan: Plan, model: ModelConfig, limit: int) -> dict[int, list[_Item]]:
    """Everything that each trainer rank sends, in plan order."""
    weights = registry.weights(model)
    holders: dict[str, dict[int, list[int]]] = {}
    loads = [0] * plan.trainer.world_size
    by_sender: dict[int, list[_Item]] = {}
    for index, transfer in enumerate(plan.transfers):
        if transfer.mcore_name not in holders:
            shards = plan.trainer.holders(weights[transfer.mcore_name], model)
            holders = {transfer.mcore_name: {ranks[0]: ranks for ranks in shards}}  # parts of one tensor are adjacent
        replicas = holders[transfer.mcore_name]
        row_bytes = math.prod(transfer.shape) // transfer.shape[transfer.axis] * (1 if transfer.is_fp8 else 2)
        sources = []
        for source in transfer.sources:
            rank = min(replicas[source.rank], key=lambda r: (loads[r], r))
            loads[rank] += row_bytes * (source.stop - source.start)
            sources.append(Source(rank, source.start, source.stop))
        if transfer.quantize == "gathered":
            gathering = Gathering(transfer, sources[0].rank, tuple(sources))
            item = _Item(transfer, index, (0, transfer.shape[transfer.axis]), gathering)
            by_sender.setdefault(gathering.collector, []).append(item)
            continue
        for source in sources:
            items = [_Item(transfer, index, span, None) for span in _pieces(transfer, source, limit)]
            by_sender.setdefault(source.rank, []).extend(items)
    return by_sender


def _fill_rounds(items: list[_Item], num_engine_ranks: int, whole: bool, limit: int) -> list[list[_Item]]:
    """Divide a sender's items into rounds of at most ``limit`` bytes (or one piece that is larger by itself)."""
    rounds: list[list[_Item]] = []
    filled = limit + 1
    for item in items:
        num_bytes = sum(_message_parts([item], rank, whole)[1] for rank in range(num_engine_ranks))
        if filled + num_bytes > limit:
            rounds.append([])
            filled = 0
        rounds[-1].append(item)
        filled += num_bytes
    return rounds


def plan_schedule(plan: Plan, model: ModelConfig, *, bucket_bytes: int, whole: bool = False) -> SendSchedule:
    """The messages of one publication.

    A sender puts at most ``bucket_bytes`` into a round, and less if many senders feed few engine ranks, so that an
    engine rank receives about as much. With ``whole``, every engine rank receives every tensor whole, as vLLM's loaders
    expect.
    """
    num_engine_ranks = plan.engine.tensor
    num_senders = len({s.rank for t in plan.transfers for s in t.sources})
    limit = max(1, bucket_bytes * min(num_engine_ranks, num_senders) // num_senders)
    by_sender = {
        sender: _fill_rounds(items, num_engine_ranks, whole, limit)
        for sender, items in sorted(_items_by_sender(plan, model, limit).items())
    }
    rounds = []
    for number in range(max(map(len, by_sender.values()))):
        messages, received = [], [0] * num_engine_ranks
        gatherings: list[Gathering] = []
        for sender, rounds_of_sender in by_sender.items():
            if number >= len(rounds_of_sender):
                continue
            sent = 0
            gatherings += [item.gathering for item in rounds_of_sender[number] if item.gathering is not None]
            for rank in range(num_engine_ranks):
                parts, num_bytes = _message_parts(rounds_of_sender[number], rank, whole)
                if parts:
                    messages.append(Message(sender, rank, parts, num_bytes, sent, received[rank]))
                    sent += num_bytes
                    received[rank] += num_bytes
        rounds.append(Round(tuple(messages), tuple(gatherings)))
    return SendSchedule(tuple(rounds), num_engine_ranks)
