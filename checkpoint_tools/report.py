"""The summary that a conversion prints: tensors, speed, and what was skipped or is missing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint_tools import digests
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.workers import Volume, format_rate
from megatron_fp8rl.names import registry


@dataclass
class Report:
    num_tensors: int = 0
    volume: Volume = field(default_factory=lambda: Volume(0, 0))
    has_tokenizer: bool = True
    notes: list[str] = field(default_factory=list)

    def add_source(self, source: HfFolder, num_hub_files: int) -> None:
        """Add the tensors and code that the conversion ignores, and the digests that its source was compared with."""
        for reason, count in Counter(source.skipped.values()).items():
            example = next(name for name, why in source.skipped.items() if why == reason)
            self.notes.append(f"skipped: {count} tensors ({example}{', ...' if count > 1 else ''}): {reason}")
        if ignored := registry.ignored_keys(source.config):
            self.notes.append(ignored)
        if source.custom_code:
            self.notes.append(f"skipped: custom code of the folder ({', '.join(source.custom_code)})")
        if source.recorded_digests:
            self.notes.append(f"source: every tensor has the digest in {digests.FILE}")
        elif num_hub_files:
            self.notes.append(f"source: {num_hub_files} of {len(source.files)} files have the digest of the Hub")
        else:
            self.notes.append(f"source: no digests are known, so a flipped bit could not be seen ({digests.FILE})")


@contextmanager
def report_conversion(source: Path, target: Path) -> Iterator[Report]:
    """Measure the time of a conversion and print its report after success."""
    report, start = Report(), time.monotonic()
    yield report
    seconds = time.monotonic() - start
    print(f"{source} -> {target}")
    print(
        f"  {report.num_tensors} tensors, {format_rate(report.volume, seconds)}, each read back from the disk and equal"
    )
    for note in report.notes:
        print(f"  {note}")
    if not report.has_tokenizer:
        print(f"  no tokenizer in {source}: the result has none either")
