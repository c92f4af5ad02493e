"""Downloaded files against the SHA-256 under which the Hugging Face Hub publishes them.

In:  the files of a checkpoint. Out: nothing, or an error that names the file which is not the published one.

The hub's client leaves the digest of every large file beside what it downloads: in its cache a file is a link to a blob
of that name, in a folder of one's own there is ``.cache/huggingface/download/NAME.metadata``. No network is needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.work import Bucket, Progress, WorkOptions, results

_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 4 << 20
_CLOCK_MARGIN_S = 1.0  # between writing a file and noting when: the client's own margin


def published_sha256(file: Path) -> str | None:
    """The digest of a file as it was published; None when nothing says so, or it was changed since the download."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        _, digest, when, *_ = note.read_text().splitlines()
        changed = file.stat().st_mtime > float(when) + _CLOCK_MARGIN_S
    except (OSError, ValueError):
        return None
    return digest if _SHA256.fullmatch(digest) and not changed else None


def check_files(files: Sequence[Path], work: WorkOptions) -> int:
    """Compare the files whose published digest is known; returns how many. Raises CheckpointError with all others."""
    known = {str(file): digest for file in files if (digest := published_sha256(file)) is not None}
    if not known:
        return 0
    buckets = [Bucket(i, (file,), Path(file).stat().st_size) for i, file in enumerate(known)]
    problems: list[str] = []
    with Progress("check of files", sum(bucket.num_bytes for bucket in buckets)) as progress:
        for bucket, found in results(_Digest(), buckets, work.workers):
            (file,) = bucket.names
            progress.advance(bucket.num_bytes)
            if found["sha256"] != known[file]:
                said = f"SHA-256 {found['sha256'][:16]}... instead of {known[file][:16]}... on the Hub"
                problems.append(f"{Path(file).name}: damaged: {said}. Fetch the file again")
    if problems:
        raise CheckpointError(files[0].parent, problems)
    return len(known)


@dataclass
class _Digest:
    """The job: the digest of one file."""

    def run(self, bucket: Bucket) -> dict[str, Any]:
        digest = hashlib.sha256()
        with open(bucket.names[0], "rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
        return {"sha256": digest.hexdigest()}
