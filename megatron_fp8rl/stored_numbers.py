"""Numbers of sampled tokens that a token store holds (rollout/token_store.py): a few words here, fetched where they are read.

In: which bytes of which answer. Out: arrays. Trainer rank 0 refers to them in completions and samples without having them;
the ranks that train them fetch theirs, many at once with :func:`fetch`. NumPy fetches what it is given one by one.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

ROWS_PATH = "/fp8rl/rows"
_DEADLINE_S = 300.0  # for each transfer of a part
_PART_BYTES = 64 << 20  # of one request
_MAX_THREADS = 8


class StoreError(RuntimeError):
    """A token store cannot be reached, or no longer holds what is asked."""


@dataclass(frozen=True, kw_only=True)
class Store:
    """Where a token store answers."""

    url: str
    token: str
    log: str  # the file with its output, on its node

    def error(self, problem: object) -> StoreError:
        return StoreError(f"the token store at {self.url} failed: {problem}; look into {self.log}")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Entry:
    """An answer that a store holds: on trainer rank 0, until nothing refers to it any more."""

    store: Store
    key: int


class Piece(NamedTuple):
    """Consecutive numbers of an answer."""

    entry: Entry
    first: int  # byte
    count: int  # of items


class Stored:
    """An array [N, ...] in a store. Slices and sums of arrays refer to their pieces; every other use fetches them."""

    __slots__ = ("_found", "dtype", "pieces", "shape", "total")

    def __init__(
        self, pieces: Sequence[Piece], dtype: np.dtype, item: Sequence[int] = (), total: float | None = None
    ) -> None:
        self.pieces, self.dtype = tuple(pieces), np.dtype(dtype)
        self.shape = (sum(piece.count for piece in pieces), *item)
        self.total = total  # the sum of all numbers, if it is known
        self._found: np.ndarray | None = None

    @property
    def is_here(self) -> bool:
        """Whether the numbers have been fetched."""
        return self._found is not None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def forget(self) -> None:
        """Let go of what was fetched; the store still has it."""
        self._found = None

    def take(self, numbers: np.ndarray) -> None:
        """Have the numbers, which were fetched."""
        numbers.flags.writeable = False
        self._found = numbers

    def item_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def sum(self) -> float:
        return float(np.asarray(self).sum()) if self.total is None else self.total

    def max(self) -> Any:
        return np.asarray(self).max()

    def any(self) -> bool:
        return bool(np.asarray(self).any())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return np.asarray(self)[index]
        begin, end, step = index.indices(len(self))
        if step != 1:
            return np.asarray(self)[index]
        found, start = [], 0
        for piece in self.pieces:
            low, high = max(begin - start, 0), min(end - start, piece.count)
            if low < high:
                found.append(Piece(piece.entry, piece.first + low * self.item_bytes(), high - low))
            start += piece.count
        part = Stored(found, self.dtype, self.shape[1:])
        if self._found is not None:
            part.take(self._found[index])
        return part

    def __add__(self, other: Stored) -> Stored:
        total = None if self.total is None or other.total is None else self.total + other.total
        return Stored([*self.pieces, *other.pieces], self.dtype, self.shape[1:], total)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._found
        if found is None:
            (found,) = _numbers([self])
        return np.array(found, dtype, copy=copy)


def fetch(arrays: Iterable[Stored]) -> None:
    """Fetch all numbers that are not here, from all stores at once. Raises StoreError with the store's address."""
    missing = [one for one in arrays if not one.is_here]
    for one, numbers in zip(missing, _numbers(missing), strict=True):
        one.take(numbers)


@dataclass
class _Transfer:
    """One request: which bytes, and where they go."""

    wanted: list[tuple[int, int, int]] = field(default_factory=list)  # key, first byte, bytes
    places: list[memoryview] = field(default_factory=list)
    num_bytes: int = 0


def _numbers(arrays: Sequence[Stored]) -> list[np.ndarray]:
    found = [np.empty(one.shape, one.dtype) for one in arrays]
    transfers: dict[Store, list[_Transfer]] = {}
    for one, numbers in zip(arrays, found, strict=True):
        place, start = memoryview(numbers.reshape(-1).view(np.uint8)), 0
        for entry, first, count in one.pieces:
            size = count * one.item_bytes()
            parts = transfers.setdefault(entry.store, [_Transfer()])
            if parts[-1].num_bytes and parts[-1].num_bytes + size > _PART_BYTES:
                parts.append(_Transfer())
            parts[-1].wanted.append((entry.key, first, size))
            parts[-1].places.append(place[start : start + size])
            parts[-1].num_bytes += size
            start += size
    if len(transfers) == 1:
        _read(*next(iter(transfers.items())))
    elif transfers:
        with ThreadPoolExecutor(min(len(transfers), _MAX_THREADS), thread_name_prefix="fetch tokens") as threads:
            list(threads.map(_read, transfers.keys(), transfers.values()))
    return found


def _read(store: Store, transfers: Sequence[_Transfer]) -> None:
    connection = http.client.HTTPConnection(urlsplit(store.url).netloc, timeout=_DEADLINE_S)
    headers = {"Authorization": f"Bearer {store.token}"}
    try:
        for transfer in transfers:
            connection.request("POST", ROWS_PATH, json.dumps(transfer.wanted), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise store.error(f"status {response.status}: {response.read().decode(errors='replace')[:1000]}")
            for place in transfer.places:
                while place:
                    if not (count := response.readinto(place)):
                        raise store.error("its answer is cut off")
                    place = place[count:]
            response.read()
    except (http.client.HTTPException, OSError) as error:
        raise store.error(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
