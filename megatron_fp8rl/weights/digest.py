"""A 64-bit digest of a tensor: its bytes in their order, its dtype and its shape.

The trainer digests what it sends and the engine what it holds, each on its own device; equal strings mean equal
tensors. The hash detects damage, it is no defence against an adversary: a changed tensor passes with probability 2^-64.

    word_i = bytes 8 i .. 8 i + 7, little endian, the last one padded with zeros
    digest = mix(sum_i mix(word_i + (i + 1) * GOLDEN) + blake2b(dtype, shape))          modulo 2^64

``mix`` is the bijective finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014). Adding a multiple of GOLDEN first makes equal words at different places count differently. Integer
addition is associative, so any device and any order of summation gives the same value.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_CHUNK_WORDS = 1 << 21  # 16 MiB of words at a time: temporaries stay small on a GPU and in cache on a CPU


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


def _mix_tensor_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 words, in place. torch shifts int64 arithmetically, so the sign is masked off."""
    for shift, multiplier in itertools.zip_longest(_SHIFTS, _MULTIPLIERS):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if multiplier is not None:
            x *= _signed(multiplier)
    return x


def _mix_int(x: int) -> int:
    for shift, multiplier in itertools.zip_longest(_SHIFTS, _MULTIPLIERS):
        x ^= x >> shift
        if multiplier is not None:
            x = x * multiplier & _MASK
    return x


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _finish(total: int, tensor: Tensor) -> str:
    return f"{_mix_int(((total & _MASK) + _header(tensor.dtype, tuple(tensor.shape))) & _MASK):016x}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _positions(num_words: int, device: torch.device, first: int = 0) -> Tensor:
    return torch.arange(first + 1, first + num_words + 1, device=device, dtype=torch.int64).mul_(_signed(_GOLDEN))


def _digest_large(tensor: Tensor) -> str:
    data = _bytes(tensor)
    total = 0
    for start in range(0, data.numel(), 8 * _CHUNK_WORDS):
        chunk = data[start : start + 8 * _CHUNK_WORDS]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        words = chunk.view(torch.int64)
        total += int(_mix_tensor_(words + _positions(words.numel(), words.device, start // 8)).sum())
    return _finish(total, tensor)


def _digest_group(tensors: Sequence[Tensor]) -> list[str]:
    """Digests of several small tensors of one device in one pass over their concatenation."""
    device = tensors[0].device
    padding = torch.zeros(8, dtype=torch.uint8, device=device)
    pieces: list[Tensor] = []
    num_words: list[int] = []
    for tensor in tensors:
        data = _bytes(tensor)
        pieces.append(data)
        if data.numel() % 8:
            pieces.append(padding[: -data.numel() % 8])
        num_words.append(-(-data.numel() // 8))
    words = torch.cat(pieces).view(torch.int64)
    ends = list(itertools.accumulate(num_words, initial=0))
    positions = torch.cat([_positions(n, device) for n in num_words])
    # Sums of segments as differences of a running sum; both wrap modulo 2^64.
    running = torch.cat([words.new_zeros(1), torch.cumsum(_mix_tensor_(words + positions), 0)])
    totals = running[torch.tensor(ends, device=device)].tolist()
    return [_finish(end - start, t) for t, start, end in zip(tensors, totals, totals[1:])]


def _digest_on_gpu(tensors: Sequence[Tensor]) -> list[str]:
    from megatron_fp8rl.weights import digest_kernel  # imports Triton

    totals = digest_kernel.sums([t.detach().contiguous() for t in tensors])
    return [_finish(total, tensor) for total, tensor in zip(totals, tensors, strict=True)]


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """:func:`digest` of each tensor. On a GPU one kernel reads all of them; elsewhere small ones are hashed together."""
    tensors = list(tensors)
    if tensors and all(t.is_cuda and t.device == tensors[0].device for t in tensors):
        return _digest_on_gpu(tensors)
    result: list[str] = [""] * len(tensors)
    group: list[int] = []
    group_bytes = 0

    def flush() -> None:
        nonlocal group_bytes
        for index, value in zip(group, _digest_group([tensors[i] for i in group]) if group else []):
            result[index] = value
        group.clear()
        group_bytes = 0

    for index, tensor in enumerate(tensors):
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes >= 8 * _CHUNK_WORDS:
            result[index] = _digest_large(tensor)
            continue
        if group and (group_bytes + num_bytes > 8 * _CHUNK_WORDS or tensors[group[0]].device != tensor.device):
            flush()
        group.append(index)
        group_bytes += num_bytes
    flush()
    return result


def digest(tensor: Tensor) -> str:
    """16 hexadecimal digits that depend on every byte of ``tensor``, on their order, on the dtype and on the shape."""
    return digests([tensor])[0]


def sum_words(words: Tensor, places: Tensor) -> Tensor:
    """The sum of the formula over int64 ``words`` at ``places`` (counted from 0), modulo 2^64: int64 scalar."""
    return _mix_tensor_(words + (places + 1) * _signed(_GOLDEN)).sum()


def digest_of_sum(total: int, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """The digest of a tensor of this dtype and shape whose words have the sum ``total``."""
    return f"{_mix_int(((total & _MASK) + _header(dtype, shape)) & _MASK):016x}"


def combine(named_digests: Mapping[str, str]) -> str:
    """One digest of many, independent of their order: 16 hexadecimal digits."""
    text = "\n".join(f"{name} {named_digests[name]}" for name in sorted(named_digests))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
