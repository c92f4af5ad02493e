"""Every change of a tensor changes its digest; grouping and device do not."""

import numpy as np
import pytest
import torch

from megatron_fp8rl.weight_sync import digest as module
from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, combine, digest, digests, prepare_values

MASK = (1 << 64) - 1


def reference(tensor: torch.Tensor) -> str:
    """The formula of the docstring in Python integers, one word at a time."""
    import hashlib

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    total = sum(
        mix((int(word) + (i + 1) * 0x9E3779B97F4A7C15) & MASK) for i, word in enumerate(np.frombuffer(data, np.uint64))
    )
    header = hashlib.blake2b(f"{str(tensor.dtype)[6:]}{list(tensor.shape)}".encode(), digest_size=8).digest()
    return f"{mix((total + int.from_bytes(header, 'little')) & MASK):016x}"


def samples() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g) for shape in ((3,), (5, 7), (128, 128), (1, 1), (2, 3, 4), (0, 4), ())]
    return [
        *tensors,
        *(t.bfloat16() for t in tensors),
        *(t.to(torch.float8_e4m3fn) for t in tensors),
        torch.zeros(9, dtype=torch.uint8),
        torch.zeros(10, dtype=torch.uint8),
    ]


def test_equals_the_formula_alone_and_in_groups(monkeypatch):
    tensors = samples()
    expected = [reference(t) for t in tensors]
    assert [digest(t) for t in tensors] == expected
    assert digests(tensors) == expected
    assert len(set(expected)) == len(expected)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 16)  # large tensors in pieces, several groups
    assert digests(tensors) == expected


def test_every_bit_counts():
    data = torch.randn(9, 5).bfloat16()
    seen = {digest(data)}
    flat = data.view(torch.uint8).reshape(-1)
    for byte in range(flat.numel()):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            seen.add(digest(data))
            flat[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * flat.numel()


def test_order_counts():
    """Every swap of two different elements, also of elements that differ in their sign alone."""
    data = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, 0.0, -0.0], dtype=torch.bfloat16).repeat(3)
    seen = {digest(data)}
    num_swaps = 0
    bits = data.view(torch.int16)
    for i in range(len(data)):
        for j in range(i):
            if bits[i] != bits[j]:
                swapped = bits.clone()
                swapped[i], swapped[j] = bits[j], bits[i]
                seen.add(digest(swapped.view(torch.bfloat16)))
                num_swaps += 1
    assert len(seen) == 1 + num_swaps


def test_dtype_and_shape_count():
    data = torch.zeros(64, dtype=torch.uint8)
    views = [data, data.view(8, 8), data.view(1, 64), data.view(torch.int16), data.view(torch.bfloat16)]
    views += [data.view(torch.float8_e4m3fn), data.view(torch.float8_e5m2), data[:63]]
    assert len({digest(v) for v in views}) == len(views)


def test_a_slice_is_hashed_as_a_tensor_of_its_own():
    whole = torch.randn(300, 70)
    for part in (whole[1:201], whole[:, 3:40], whole.T):
        assert digest(part) == digest(part.clone(memory_format=torch.contiguous_format))


def test_combine_ignores_order_only():
    assert combine({"a": "1", "b": "2"}) == combine({"b": "2", "a": "1"})
    assert len({combine({"a": "1", "b": "2"}), combine({"a": "2", "b": "1"}), combine({"a": "1"})}) == 3


def test_digests_kept_as_numbers_are_those_of_the_text():
    tensors = {"z.weight": torch.ones(3), "a.weight": torch.arange(40), "m.weight": torch.zeros(2, 5).bfloat16()}
    names = Names(tensors)
    values = prepare_values([tensors[name].view(torch.int16) for name in names.ordered])()
    named = NamedDigests(names, values)
    text = dict(zip(tensors, digests(tensor.view(torch.int16) for tensor in tensors.values()), strict=True))
    assert named == text and list(named) == sorted(tensors) and len(named) == 3
    assert combine(named) == named.combined == combine(text)
    values = values.copy()
    values[1] ^= np.uint64(1)
    assert combine(NamedDigests(names, values)) != combine(named)
    assert combine(NamedDigests(Names(["a.weight", "m.weight", "y.weight"]), named._values)) != combine(named)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_on_cuda():
    assert digests([t.cuda() for t in samples()]) == digests(samples())
