"""The last lines of a conversion: what was made, how fast, what was left out and what is missing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint_tools import digests
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.work import Volume, rate_of


@dataclass
class Converted:
    """What a command tells about its result."""

    num_tensors: int = 0
    volume: Volume = field(default_factory=lambda: Volume(0, 0))
    has_tokenizer: bool = True
    notes: list[str] = field(default_factory=list)

    def left_out(self, reasons: Mapping[str, str]) -> None:
        """Count tensors by the reason why they are not converted, with the name of one."""
        for reason, count in Counter(reasons.values()).items():
            example = next(name for name, why in reasons.items() if why == reason)
            self.notes.append(f"left out: {count} tensors ({example}{', ...' if count > 1 else ''}): {reason}")

    def checked(self, source: HfFolder, num_published: int) -> None:
        """Say against what the bytes of the source were compared: digests.json, the Hub's digests, or nothing."""
        if source.own_code:
            self.notes.append(
                f"not used: code that config.json or the folder brings along ({', '.join(source.own_code)})"
            )
        if source.recorded:
            self.notes.append(f"source: every tensor has the digest that {digests.FILE} records")
        elif num_published:
            self.notes.append(f"source: {num_published} of {len(source.files)} files have the digest of the Hub")
        else:
            self.notes.append(f"source: no digests are known, so a flipped bit could not be seen ({digests.FILE})")


@contextmanager
def say_converted(source: Path, target: Path) -> Iterator[Converted]:
    """Time a conversion and, when it has succeeded, print what it made."""
    said, start = Converted(), time.monotonic()
    yield said
    seconds = time.monotonic() - start
    print(f"{source} -> {target}")
    print(f"  {said.num_tensors} tensors, {rate_of(said.volume, seconds)}, each read back from the disk and equal")
    for note in said.notes:
        print(f"  {note}")
    if not said.has_tokenizer:
        print(f"  no tokenizer in {source}: the result has none either")
