"""A 64-bit digest of a tensor: its bytes in order, its dtype and its shape.

Equal digests mean equal tensors. They detect corruption, not attacks: a random change passes with probability 2^-64.

    word_i = bytes 8 i .. 8 i + 7, little endian, the last one padded with zeros
    digest = mix(sum_i mix(word_i + (i + 1) * GOLDEN) + blake2b(dtype, shape))          modulo 2^64

``mix`` is the bijective finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014). Adding a multiple of GOLDEN makes equal words at different positions count differently. Integer addition
is associative, so the result depends neither on the device nor on the order of summation.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_CHUNK_WORDS = 1 << 21  # 16 MiB at a time: small temporaries on a GPU, which fit the cache on a CPU


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


def _mix_tensor_(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer to int64 words in place. Masks sign bits, because torch shifts arithmetically."""
    for shift, multiplier in itertools.zip_longest(_SHIFTS, _MULTIPLIERS):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if multiplier is not None:
            x *= _signed(multiplier)
    return x


@functools.lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def headers_of(kinds: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> np.ndarray:
    """Return the (dtype, shape) term of each tensor's digest, uint64, for :func:`values_of_sums`."""
    return np.fromiter(itertools.starmap(_header, kinds), dtype=np.uint64)


def values_of_sums(totals: np.ndarray, headers: np.ndarray) -> np.ndarray:
    """Return digests (uint64) from word sums ((u)int64) and ``headers`` of the same shape."""
    return _mix_array(totals.view(np.uint64) + headers)


def terms_of_words(words: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return each int64 word's term of a tensor's sum, modulo 2^64, int64. ``places`` (int64) count from 0."""
    golden = (places.view(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return _mix_array(words.view(np.uint64) + golden).view(np.int64)


def _mix_array(x: np.ndarray) -> np.ndarray:
    for shift, multiplier in itertools.zip_longest(_SHIFTS, _MULTIPLIERS):
        x = x ^ (x >> np.uint64(shift))
        if multiplier is not None:
            x *= np.uint64(multiplier)
    return x


def _lines(values: np.ndarray) -> str:
    return values.astype(">u8").tobytes().hex("\n", 8)


def _finish(totals: list[int], tensors: Sequence[Tensor]) -> np.ndarray:
    """Return digests from signed 64-bit sums, or from differences of sums."""
    unsigned = np.array([total & _MASK for total in totals], dtype=np.uint64)
    return values_of_sums(unsigned, headers_of((t.dtype, tuple(t.shape)) for t in tensors))


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor to digest instead of ``tensor``: float32 values widened to int64 (``part_sums.py``)."""
    return tensor.view(torch.int32).to(torch.int64) if tensor.dtype == torch.float32 else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _positions(num_words: int, device: torch.device, first: int = 0) -> Tensor:
    return torch.arange(first + 1, first + num_words + 1, device=device, dtype=torch.int64).mul_(_signed(_GOLDEN))


def _digest_large(tensor: Tensor) -> np.ndarray:
    data = _bytes(tensor)
    total = 0
    for start in range(0, data.numel(), 8 * _CHUNK_WORDS):
        chunk = data[start : start + 8 * _CHUNK_WORDS]
        if chunk.numel() % 8 or chunk.storage_offset() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        words = chunk.view(torch.int64)
        total += int(_mix_tensor_(words + _positions(words.numel(), words.device, start // 8)).sum())
    return _finish([total], [tensor])


def _digest_group(tensors: Sequence[Tensor]) -> np.ndarray:
    """Digest several small tensors on one device in one pass over their concatenation."""
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
    # Segment sums are differences of a running sum; both wrap modulo 2^64.
    running = torch.cat([words.new_zeros(1), torch.cumsum(_mix_tensor_(words + positions), 0)])
    totals = running[torch.tensor(ends, device=device)].tolist()
    return _finish([end - start for start, end in itertools.pairwise(totals)], tensors)


def prepare_values(tensors: Sequence[Tensor]) -> Callable[[], np.ndarray]:
    """Return a function that computes ``digests(map(widened, tensors))`` of the memory's current content. Returns
    uint64 [len(tensors)]: formatting takes longer than hashing. All host work is done here, in advance."""
    tensors = [t.detach() for t in tensors]
    if not _on_one_gpu(tensors):
        return lambda: _values(list(map(widened, tensors)))
    from megatron_fp8rl.kernels.triton import digest_tensors  # imports Triton

    sums = digest_tensors.prepare(tensors, widen=True)
    # As int64, to which float32 values are widened.
    kinds = [(torch.int64 if t.dtype == torch.float32 else t.dtype, tuple(t.shape)) for t in tensors]
    headers = headers_of(kinds)
    return lambda: values_of_sums(sums().cpu().numpy(), headers)


def _on_one_gpu(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and all(t.is_cuda and t.device == tensors[0].device for t in tensors)


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """Return the :func:`digest` of each tensor. One GPU kernel reads all; on a CPU small ones are hashed together."""
    return _lines(_values(list(tensors))).split()


def _values(tensors: list[Tensor]) -> np.ndarray:
    if _on_one_gpu(tensors):
        from megatron_fp8rl.kernels.triton import digest_tensors  # imports Triton

        return _finish(digest_tensors.sums(tensors), tensors)
    result = np.zeros(len(tensors), dtype=np.uint64)
    group: list[int] = []
    group_bytes = 0

    def flush() -> None:
        nonlocal group_bytes
        if group:
            result[group] = _digest_group([tensors[i] for i in group])
        group.clear()
        group_bytes = 0

    for index, tensor in enumerate(tensors):
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes >= 8 * _CHUNK_WORDS:
            result[index : index + 1] = _digest_large(tensor)
            continue
        if group and (group_bytes + num_bytes > 8 * _CHUNK_WORDS or tensors[group[0]].device != tensor.device):
            flush()
        group.append(index)
        group_bytes += num_bytes
    flush()
    return result


def digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that depend on all bytes of ``tensor``, their order, the dtype and the shape."""
    return digests([tensor])[0]


def sum_words(words: Tensor, places: Tensor) -> Tensor:
    """Return the formula's sum over int64 ``words`` at ``places`` (from 0), modulo 2^64, as int64 scalar."""
    return _mix_tensor_(words + (places + 1) * _signed(_GOLDEN)).sum()


class Names:
    def __init__(self, names: Iterable[str]):
        self.ordered = sorted(names)
        self._hash = hashlib.blake2b("\n".join([*self.ordered, "", ""]).encode(), digest_size=8)

    def combine(self, lines: str) -> str:
        """Return 16 hexadecimal digits for digests in the order of the names, one per line."""
        whole = self._hash.copy()
        whole.update(lines.encode())
        return whole.hexdigest()


class NamedDigests(Mapping[str, str]):
    """Digests by name from ``values`` (uint64) in the order of ``names``, formatted only on access."""

    def __init__(self, names: Names, values: np.ndarray):
        self._names = names
        self._values = values

    @functools.cached_property
    def combined(self) -> str:
        return self._names.combine(_lines(self._values))

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        return dict(zip(self._names.ordered, _lines(self._values).split(), strict=True))

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.ordered)

    def __len__(self) -> int:
        return len(self._names.ordered)


def combine(named_digests: Mapping[str, str]) -> str:
    """Combine digests, independent of their order, into 16 hexadecimal digits."""
    if isinstance(named_digests, NamedDigests):
        return named_digests.combined
    names = Names(named_digests)
    return names.combine("\n".join(map(named_digests.__getitem__, names.ordered)))
