"""SHA-256 of every tensor, beside the checkpoint: what a safetensors file cannot tell about itself.

In:  rows of tensors as they are read or written, in order. Out: a digest of each, compared with the recorded one.

``digests.json`` lies in every folder that these tools write. A digest is taken of a tensor's bytes in C order, little
endian, under its Hugging Face name; type and shape are in the header of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.safetensors_file import raw_bytes

FILE = "digests.json"
_FORMAT = 1


def write(folder: Path, tensors: Mapping[str, str], **about: Any) -> None:
    """Record the digests of a folder's tensors, with what else is to be said of their origin."""
    content = {"format": _FORMAT, "algorithm": "sha256", **about, "tensors": dict(tensors)}
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read(folder: Path) -> dict[str, str]:
    """Recorded digests by Hugging Face name; empty when there are none. Raises CheckpointError when unreadable."""
    file = folder / FILE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        if content["format"] != _FORMAT or content["algorithm"] != "sha256":
            raise ValueError(f"format {content['format']}, algorithm {content['algorithm']}")
        return dict(content["tensors"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            file, f"cannot be read ({error}); restore it, or delete it to go without digests"
        ) from error


class Running:
    """Digests of tensors whose rows come in order, those of different tensors mixed. ``done`` has the finished ones.

    ``expected`` are recorded digests to compare with; a tensor that has none is not compared. ``where`` says in errors
    whose tensors these are.
    """

    def __init__(self, where: object, expected: Mapping[str, str] | None = None):
        self.done: dict[str, str] = {}
        self._where = where
        self._expected = expected or {}
        self._open: dict[str, tuple[Any, int]] = {}  # hash so far, next row

    def add(self, name: str, first: int, rows: Tensor, num_rows: int) -> None:
        """Rows ``first`` and following of a tensor of ``num_rows``; those that were seen before are passed over.

        Raises CheckpointError when the tensor is complete and is not the recorded one.
        """
        digest, position = self._open.setdefault(name, (hashlib.sha256(), 0))
        if first > position:
            raise ValueError(f"{name}: rows {position} to {first} were left out of its digest")
        new = rows[position - first :]
        if len(new):
            digest.update(raw_bytes(new))
        position += len(new)
        self._open[name] = digest, position
        if position == num_rows:
            self._finish(name, digest.hexdigest())

    def _finish(self, name: str, value: str) -> None:
        del self._open[name]
        self.done[name] = value
        recorded = self._expected.get(name)
        if recorded is not None and recorded != value:
            raise CheckpointError(
                self._where,
                f"{name}: damaged: SHA-256 {value[:16]}... instead of {recorded[:16]}... in {FILE}. Restore the file "
                f"that holds it; if the weights were changed on purpose, delete {FILE}",
            )
