"""What an estimate of GPU memory is made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TIGHT = 0.92  # share of a GPU beyond which the allocator's fragments decide whether a run survives


@dataclass(frozen=True, kw_only=True)
class Part:
    """One use of memory."""

    name: str
    num_bytes: int
    formula: str  # how the number comes about, in numbers


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak memory of one process on one GPU."""

    title: str
    parts: tuple[Part, ...]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def share(self) -> float:
        return self.total_bytes / self.capacity_bytes

    def part(self, name: str) -> Part:
        """The part called ``name``. Raises KeyError when there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)
