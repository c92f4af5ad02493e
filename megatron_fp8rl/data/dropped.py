"""Count skipped prompts, log each once in ``data/dropped.jsonl``, and raise an error if there are too many."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fp8rl.data.checkpoint_dir import errors_name
from megatron_fp8rl.data.unchanged import DataChangedError

_MIN_PROMPTS = 500  # smaller samples are not significant


class RowError(ValueError):
    """A row or problem is skipped for the given reason. ``row``: its name if known, such as "row 3 of math"."""

    def __init__(self, message: str, *, row: str | None = None) -> None:
        super().__init__(message)
        self.row = row


@contextmanager
def row_errors() -> Iterator[None]:
    """Convert any exception in the block to a RowError, except that the file has changed."""
    try:
        yield
    except (RowError, DataChangedError):
        raise
    except Exception as error:
        raise RowError(f"cannot be used: {type(error).__name__}: {error}") from error


class TooManyDroppedError(ValueError):
    """Too many prompts cannot be used; the data or the configuration is wrong."""


class DroppedLog:
    """Counts and logs skipped prompts. ``run_dir``: None writes no file. A resumed run does not repeat entries."""

    def __init__(self, run_dir: Path | None, max_share: float):
        self._path = None if run_dir is None else run_dir / "data" / "dropped.jsonl"
        self._max_share = max_share
        self._named: set[str] = set()
        self.num_kept = self.num_dropped = 0
        if self._path is not None and self._path.exists():
            self._named = {json.loads(line)["prompt"] for line in self._path.read_text().splitlines() if line.strip()}

    def add(self, name: str, reason: str) -> None:
        """Count one prompt. Raises TooManyDroppedError."""
        self.num_dropped += 1
        if name not in self._named:
            self._named.add(name)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with errors_name(self._path), self._path.open("a") as file:
                    file.write(json.dumps({"prompt": name, "reason": reason}) + "\n")
        seen = self.num_kept + self.num_dropped
        expected = self._max_share * seen
        is_excessive = not self.num_kept or self.num_dropped > expected + 3 * math.sqrt(expected)  # by chance: 1 in 700
        if seen >= _MIN_PROMPTS and is_excessive:
            where = "" if self._path is None else f"; all are listed in {self._path}"
            raise TooManyDroppedError(
                f"{self.num_dropped} of {seen} prompts cannot be used, more than data.max_dropped = "
                f"{self._max_share:g}; last reason: {reason}{where}. Fix the data, or raise sampling.max_prompt_tokens "
                "or data.max_dropped"
            )
