"""A compact sequence with one number for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class TokenArray(Sequence):
    """A read-only array [N] of token ids or log-probabilities that behaves like a tuple of Python numbers. It equals
    any sequence of the same numbers. A number takes 4 bytes (8 in float64); in a tuple it takes 32 to 36."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.view()
        self._array.flags.writeable = False

    @classmethod
    def from_ids(cls, values: Sequence[int]) -> TokenArray:
        """Token ids, as int32."""
        return values if isinstance(values, TokenArray) else cls(np.asarray(values, np.int32))

    @classmethod
    def from_floats(cls, values: Sequence[float]) -> TokenArray:
        """As float32, or as float64 if a number needs it."""
        if isinstance(values, TokenArray):
            return values
        array = np.asarray(values)
        if array.dtype != np.float32:
            array = array.astype(np.float64)
            single = array.astype(np.float32)
            array = single if np.array_equal(array, single, equal_nan=True) else array
        return cls(array)

    @property
    def array(self) -> np.ndarray:
        return self._array

    def sum(self) -> float:
        """The sum of the numbers, added in their own precision."""
        return float(self._array.sum())

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.tolist())

    def __getitem__(self, index: int | slice) -> Any:
        return TokenArray(self._array[index]) if isinstance(index, slice) else self._array[index].item()

    def __add__(self, other: Sequence[float]) -> TokenArray:
        if isinstance(other, TokenArray) and (not len(self) or not len(other)):
            return self if len(self) else other
        return TokenArray(np.concatenate([self._array, np.asarray(other, self._array.dtype)]))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TokenArray | tuple | list):
            return NotImplemented
        array = np.asarray(other)
        if self._array.dtype == np.float32 and array.dtype == np.float64:
            array = array.astype(np.float32)  # float32 cannot represent a literal such as -0.1
        return np.array_equal(self._array, array, equal_nan=array.dtype.kind == "f")

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __reduce__(self) -> tuple[type[TokenArray], tuple[np.ndarray]]:
        return TokenArray, (self._array,)

    def __repr__(self) -> str:
        return repr(tuple(self))
