"""Numbers of the tokens of a sequence, as compact as their bytes.

A :class:`Row` behaves like a tuple of Python numbers: it is immutable, and equal to any sequence of the same numbers. It
takes 4 bytes for a token id or a log-probability, where a tuple takes 32 to 36, and NumPy and pickle read it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


class Row(Sequence):
    """A read-only array of numbers, [N], that NumPy reads without a copy."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.view()
        self._array.flags.writeable = False

    @classmethod
    def of_ids(cls, values: Sequence[int]) -> Row:
        """Token ids, as int32."""
        return values if isinstance(values, Row) else cls(np.asarray(values, np.int32))

    @classmethod
    def of_flags(cls, values: Sequence[bool]) -> Row:
        return values if isinstance(values, Row) else cls(np.asarray(values, np.bool_))

    @classmethod
    def of_floats(cls, values: Sequence[float]) -> Row:
        """As float32, which holds what engines return, or as float64 where a number needs it."""
        if isinstance(values, Row):
            return values
        array = np.asarray(values)
        if array.dtype != np.float32:
            array = array.astype(np.float64)
            single = array.astype(np.float32)
            array = single if np.array_equal(array, single, equal_nan=True) else array
        return cls(array)

    @classmethod
    def joined_ids(cls, parts: Iterable[Sequence[int]]) -> Row:
        """Token ids, one part after the other."""
        return cls(np.concatenate([np.empty(0, np.int32), *(np.asarray(part, np.int32) for part in parts)]))

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.tolist())

    def __getitem__(self, index: int | slice) -> Any:
        return Row(self._array[index]) if isinstance(index, slice) else self._array[index].item()

    def __add__(self, other: Sequence[float]) -> Row:
        more = np.asarray(other, self._array.dtype)
        return Row(np.concatenate([self._array, more]) if len(self) else more)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Row | tuple | list):
            return NotImplemented
        found = np.asarray(other)
        # A literal such as -0.1 has no float32 of its own.
        found = found.astype(np.float32) if self._array.dtype == np.float32 and found.dtype == np.float64 else found
        return np.array_equal(self._array, found, equal_nan=found.dtype.kind == "f")

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __reduce__(self) -> tuple[type[Row], tuple[np.ndarray]]:
        return Row, (self._array,)

    def __repr__(self) -> str:
        return repr(tuple(self))
