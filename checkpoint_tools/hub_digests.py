"""Compare downloaded files with the SHA-256 that the Hugging Face Hub publishes. Needs no network.

The Hub's client stores the digest of every large file. In its cache a file is a link to a blob of that name; in other
folders ``.cache/huggingface/download/NAME.metadata`` contains it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.workers import Bucket, Progress, WorkerOptions, run_jobs

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CLOCK_MARGIN_S = 1.0  # between the end of a download and its recorded time; the Hub client uses the same


def hub_sha256(file: Path) -> str | None:
    """The published digest of a file; None when it is unknown or the file changed after the download."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    metadata = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        _, digest, time, *_ = metadata.read_text().splitlines()
        changed = file.stat().st_mtime > float(time) + _CLOCK_MARGIN_S
    except (OSError, ValueError):
        return None
    return digest if _SHA256.fullmatch(digest) and not changed else None


def check_hub_digests(files: Sequence[Path], options: WorkerOptions) -> int:
    """Compare the files whose digest is known; returns their number. Raises CheckpointError that names bad files."""
    known = {str(file): digest for file in files if (digest := hub_sha256(file)) is not None}
    if not known:
        return 0
    buckets = [Bucket(i, (file,), Path(file).stat().st_size) for i, file in enumerate(known)]
    problems: list[str] = []
    with Progress("check of files", sum(bucket.num_bytes for bucket in buckets)) as progress:
        for bucket, result in run_jobs(_FileDigest(), buckets, options.workers):
            (file,) = bucket.names
            progress.advance(bucket.num_bytes)
            if result["sha256"] != known[file]:
                digests = f"SHA-256 {result['sha256'][:16]}... instead of {known[file][:16]}... on the Hub"
                problems.append(f"{Path(file).name}: damaged: {digests}. Fetch the file again")
    if problems:
        raise CheckpointError(files[0].parent, problems)
    return len(known)


@dataclass
class _FileDigest:
    def run(self, bucket: Bucket) -> dict[str, Any]:
        with open(bucket.names[0], "rb") as stream:
            return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
