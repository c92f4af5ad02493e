"""What has changed in a message since the publication before, compressed: positions and bytes.

In:  the bytes that a receiver holds, and those that it should. Out: a payload, or None if the whole is not longer.
Runs in the trainer and in engine workers. An update of reinforcement learning moves few weights over the edge between
two E4M3 numbers (docs/scale.md), and a power-of-two scale changes only when the largest weight of its block crosses one.

    payload = zstd( int64 number of changes, int64 number of long gaps,
                    uint16 gaps between changed positions (65535: a long one), uint32 long gaps, uint8 new bytes )

Nothing here proves anything: the digests of a publication do, which are computed from whole tensors at both ends.
"""

from __future__ import annotations

import numpy as np
import torch
import zstandard
from torch import Tensor

_LONG = 0xFFFF
_LEVEL = 1
_PIECE = 1 << 31  # positions of a longer message would not fit a long gap


class DeltaError(ValueError):
    """A payload that is none, or of another message."""


def encode(base: Tensor, new: Tensor) -> bytes | None:
    """The payload that turns ``base`` into ``new``: uint8 [n] on the CPU, n < 2^31. None if it is not shorter."""
    assert base.shape == new.shape and base.numel() < _PIECE
    places = _changed(base, new).numpy()
    if 2 * len(places) >= base.numel():
        return None
    gaps = np.diff(places, prepend=-1) - 1
    is_long = gaps >= _LONG
    short = np.where(is_long, _LONG, gaps).astype("<u2")
    content = (
        np.array([len(places), int(is_long.sum())], dtype="<i8").tobytes(),
        short.tobytes(),
        gaps[is_long].astype("<u4").tobytes(),
        new.numpy()[places].tobytes(),
    )
    payload = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(content))
    return payload if len(payload) < base.numel() else None


def _changed(base: Tensor, new: Tensor) -> Tensor:
    """int64 positions of bytes that differ, in order: of words of 8 bytes first, of which few differ."""
    whole = base.numel() // 8 * 8
    words = [tensor[:whole] if tensor.storage_offset() % 8 == 0 else tensor[:whole].clone() for tensor in (base, new)]
    differ = torch.nonzero(words[0].view(torch.int64) != words[1].view(torch.int64))
    candidates = (8 * differ + torch.arange(8)).reshape(-1)
    rest = whole + torch.nonzero(base[whole:] != new[whole:])[:, 0]
    return torch.cat([candidates[base[candidates] != new[candidates]], rest])


def decode(payload: bytes | memoryview, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64 positions in a message of ``num_bytes``, uint8 new bytes). Raises DeltaError if it is not of such a message."""
    try:
        # Two bytes of a gap, four of a long one and the byte itself for each position: no honest payload is longer.
        content = zstandard.ZstdDecompressor().decompress(payload, max_output_size=16 + 7 * num_bytes)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a delta of weights cannot be read: {error}") from error
    if len(content) < 16:
        raise DeltaError(f"a delta of weights has {len(content)} bytes, fewer than its header")
    count, num_long = (int(n) for n in np.frombuffer(content, "<i8", 2))
    if min(count, num_long) < 0 or len(content) != 16 + 3 * count + 4 * num_long:
        raise DeltaError(f"a delta of weights has {len(content)} bytes for {count} changes and {num_long} long gaps")
    gaps = np.frombuffer(content, "<u2", count, 16).astype(np.int64)
    long = np.flatnonzero(gaps == _LONG)
    if len(long) != num_long:
        raise DeltaError(f"a delta of weights marks {len(long)} long gaps and has {num_long}")
    gaps[long] = np.frombuffer(content, "<u4", num_long, 16 + 2 * count)
    places = np.cumsum(gaps + 1) - 1
    if count and places[-1] >= num_bytes:
        raise DeltaError(f"a delta of weights changes byte {places[-1]} of a message of {num_bytes}")
    return places, np.frombuffer(content, np.uint8, count, 16 + 2 * count + 4 * num_long)


def apply(held: Tensor, payload: bytes | memoryview) -> None:
    """Change ``held``, uint8 [n] on any device, in place. Raises DeltaError and changes nothing if that is impossible."""
    places, values = decode(payload, held.numel())
    where = torch.from_numpy(places).to(held.device)
    held[where] = torch.from_numpy(values.copy()).to(held.device)
