"""The vocabulary entries from which a sampler with top-k, top-p or min-p chose each token.

A token has at most ceil(vocabulary / 32) int32 words, the size of a bit mask. They are ascending ids if these take
fewer words, otherwise the mask: entry v is bit v % 32 of word v // 32. A token has no word if every entry was kept.
With 151,936 entries these are at most 19 kB per token, and 4 bytes per kept entry up to 4,747 entries.

Shapes: C = tokens, K = their words, W = words of a bit mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BITS = 32  # of a word


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptEntries:
    """The kept entries of C tokens; slices and joins like a sequence of tokens."""

    words: np.ndarray  # int32 [K], token by token
    lengths: np.ndarray  # int32 [C] words of each token
    vocab_size: int

    @classmethod
    def from_bits(cls, bits: np.ndarray, vocab_size: int) -> KeptEntries:
        """Entries of uint8 masks [C, 4 W], in which entry v is bit v % 8 of byte v // 8."""
        words_CW = np.ascontiguousarray(bits).view("<i4")
        counts = np.bitwise_count(words_CW.view(np.uint32)).sum(axis=1, dtype=np.int64)
        are_ids = (counts < words_CW.shape[1]) & (counts < vocab_size)
        are_masks = ~are_ids & (counts < vocab_size)
        lengths = np.where(are_ids, counts, are_masks * words_CW.shape[1]).astype(np.int32)
        words = np.empty(int(lengths.sum()), np.int32)
        words[np.repeat(are_ids, lengths)] = _ids(words_CW[are_ids])
        words[np.repeat(are_masks, lengths)] = words_CW[are_masks].ravel()
        return cls(words=words, lengths=lengths, vocab_size=vocab_size)

    @classmethod
    def none(cls, num_tokens: int, vocab_size: int) -> KeptEntries:
        """Entries of tokens whose distribution was not truncated."""
        return cls(words=np.empty(0, np.int32), lengths=np.zeros(num_tokens, np.int32), vocab_size=vocab_size)

    @classmethod
    def join(cls, parts: Sequence[KeptEntries | None], lengths: Sequence[int]) -> KeptEntries | None:
        """Parts of ``lengths`` tokens, one after another; None if all are None, which stands for the whole vocabulary.
        Raises ValueError if a part has another length, or they are of different vocabularies."""
        sizes = {part.vocab_size for part in parts if part is not None}
        if not sizes:
            return None
        if len(sizes) > 1:
            raise ValueError(f"kept entries of vocabularies of {sorted(sizes)} entries cannot be joined")
        vocab_size = sizes.pop()
        known = [cls.none(n, vocab_size) if part is None else part for part, n in zip(parts, lengths, strict=True)]
        if (actual := list(map(len, known))) != list(lengths):
            raise ValueError(f"there are kept entries of {actual} tokens, expected {list(lengths)}")
        if len(known) == 1:
            return known[0]
        words, numbers = (np.concatenate([getattr(part, name) for part in known]) for name in ("words", "lengths"))
        return cls(words=words, lengths=numbers, vocab_size=vocab_size)

    @classmethod
    def from_bytes(cls, content: bytes | memoryview | np.ndarray) -> KeptEntries:
        """The inverse of :meth:`to_bytes`."""
        vocab_size, num_tokens = np.frombuffer(content, "<i8", 2).tolist()
        lengths, words = np.split(np.frombuffer(content, "<i4", offset=16), [num_tokens])
        return cls(words=words, lengths=lengths, vocab_size=vocab_size)

    def to_bytes(self) -> bytes:
        """Little-endian: vocabulary and number of tokens in int64, then lengths and words in int32."""
        head = np.array([self.vocab_size, len(self)], "<i8")
        return head.tobytes() + self.lengths.astype("<i4").tobytes() + self.words.astype("<i4").tobytes()

    @property
    def width(self) -> int:  # W
        return -(-self.vocab_size // _BITS)

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, KeptEntries) else NotImplemented

    def __getitem__(self, tokens: slice) -> KeptEntries:
        """Consecutive tokens; the step is 1."""
        first, last, _ = tokens.indices(len(self))
        return self.split([first, max(0, last - first)])[1]

    def split(self, lengths: Sequence[int]) -> list[KeptEntries]:
        """Consecutive parts of ``lengths`` tokens, as views."""
        starts, ends = self.starts(), np.cumsum([0, *lengths]).tolist()
        return [
            KeptEntries(
                words=self.words[starts[first] : starts[last]],
                lengths=self.lengths[first:last],
                vocab_size=self.vocab_size,
            )
            for first, last in itertools.pairwise(ends)
        ]

    def select(self, tokens: np.ndarray) -> KeptEntries:
        """The tokens of int64 indices, in their order."""
        lengths, starts = self.lengths[tokens], self.starts()[:-1][tokens]
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return KeptEntries(words=self.words[places], lengths=lengths, vocab_size=self.vocab_size)

    def starts(self) -> np.ndarray:
        """int64 [C + 1]: the first word of each token, and K."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def are_masks(self) -> np.ndarray:
        """bool [C]: tokens with a bit mask."""
        return self.lengths == self.width

    def counts(self) -> np.ndarray:
        """int64 [C]: kept entries of each token."""
        counts, are_masks = np.where(self.lengths, self.lengths, self.vocab_size).astype(np.int64), self.are_masks()
        masks = self.words[np.repeat(are_masks, self.lengths)].view(np.uint32).reshape(-1, self.width)
        counts[are_masks] = np.bitwise_count(masks).sum(axis=1, dtype=np.int64)
        return counts

    def contain(self, token_ids: np.ndarray) -> np.ndarray:
        """bool [C]: whether each token's entry was kept."""
        are_masks, token_ids = self.are_masks(), np.asarray(token_ids, np.int64)
        hits = (self.words == np.repeat(token_ids, self.lengths)) & ~np.repeat(are_masks, self.lengths)
        contained = self.lengths == 0
        contained[np.repeat(np.arange(len(self)), self.lengths)[hits]] = True
        ids = token_ids[are_masks]
        words = self.words[self.starts()[:-1][are_masks] + ids // _BITS]
        contained[are_masks] = (words >> (ids % _BITS)) & 1 != 0
        return contained


def _ids(masks_CW: np.ndarray) -> np.ndarray:
    """int32: the entries of bit masks, row by row, ascending."""
    rows, columns = np.nonzero(masks_CW)
    bits = np.unpackbits(masks_CW[rows, columns].astype("<i4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    words, places = np.nonzero(bits)
    return (columns[words] * _BITS + places).astype(np.int32)
