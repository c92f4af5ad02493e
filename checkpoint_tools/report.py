"""The last lines of a conversion: what was made, how fast, what was left out and what is missing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint_tools.work import rate_of


@dataclass
class Converted:
    """What a command tells about its result."""

    num_tensors: int = 0
    num_bytes: int = 0
    has_tokenizer: bool = True
    notes: list[str] = field(default_factory=list)

    def left_out(self, reasons: Mapping[str, str]) -> None:
        """Count tensors by the reason why they are not converted, with the name of one."""
        for reason, count in Counter(reasons.values()).items():
            example = next(name for name, why in reasons.items() if why == reason)
            self.notes.append(f"left out: {count} tensors ({example}{', ...' if count > 1 else ''}): {reason}")


@contextmanager
def say_converted(source: Path, target: Path) -> Iterator[Converted]:
    """Time a conversion and, when it has succeeded, print what it made."""
    said, start = Converted(), time.monotonic()
    yield said
    seconds = time.monotonic() - start
    print(f"{source} -> {target}")
    print(f"  {said.num_tensors} tensors, {rate_of(said.num_bytes, seconds)}, each read back from the disk and equal")
    for note in said.notes:
        print(f"  {note}")
    if not said.has_tokenizer:
        print(f"  no tokenizer in {source}: the result has none either")
