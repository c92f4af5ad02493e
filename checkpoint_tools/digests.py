"""SHA-256 of every tensor in ``digests.json``, because a safetensors file has no checksum.

In:  rows of tensors in order, as they are read or written.
Out: a digest per tensor, compared with the recorded digest.

Every folder that these tools write has a ``digests.json``, by Hugging Face tensor name. A digest covers a tensor's
bytes in C order, little endian. Type and shape are in the header of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint_tools.errors import CheckpointError
from megatron_fp8rl.data.safetensors_file import raw_bytes

FILE = "digests.json"
_FORMAT = 1


def write(folder: Path, tensors: Mapping[str, str], *, source: str) -> None:
    """Record the digests of a folder's tensors and the name of the checkpoint from which they were converted."""
    content = {"format": _FORMAT, "algorithm": "sha256", "source": source, "tensors": dict(tensors)}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read(folder: Path) -> dict[str, str]:
    """Recorded digests by Hugging Face name; empty without a file. Raises CheckpointError when it is unreadable."""
    file = folder / FILE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        if content["format"] != _FORMAT or content["algorithm"] != "sha256":
            raise ValueError(f"format {content['format']}, algorithm {content['algorithm']}")
        return dict(content["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        problem = f"cannot be read ({error}). Restore the file, or delete it to convert without digests"
        raise CheckpointError(file, problem) from error


class TensorDigests:
    """Computes digests from rows that arrive in order for each tensor; ``done`` holds those of complete tensors.
    ``path``: the checkpoint, for errors. ``expected``: recorded digests; tensors without a recorded digest are not
    compared."""

    def __init__(self, path: object, expected: Mapping[str, str] | None = None):
        self.done: dict[str, str] = {}
        self._path = path
        self._expected = expected or {}
        self._open: dict[str, tuple[Any, int]] = {}  # (hash so far, next row)

    def add(self, name: str, first: int, rows: Tensor, num_rows: int) -> None:
        """Add rows from ``first`` on of a tensor of ``num_rows``; skips rows that were added before. Raises
        CheckpointError when a complete tensor's digest is not the recorded one."""
        digest, position = self._open.setdefault(name, (hashlib.sha256(), 0))
        if first > position:
            raise ValueError(f"{name}: rows {position} to {first} are missing from its digest")
        new = rows[position - first :]
        if len(new):
            digest.update(raw_bytes(new))
        position += len(new)
        self._open[name] = digest, position
        if position < num_rows:
            return
        del self._open[name]
        self.done[name] = value = digest.hexdigest()
        recorded = self._expected.get(name, value)
        if recorded != value:
            raise CheckpointError(
                self._path,
                f"{name}: damaged: SHA-256 {value[:16]}... instead of {recorded[:16]}... in {FILE}. Restore the file "
                f"of this tensor; if the weights were changed on purpose, delete {FILE}",
            )
