"""Every change of a tensor changes its digest; grouping and device do not."""

import pickle

import numpy as np
import pytest
import torch

from megatron_fp8rl.weight_sync import digest as module
from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, combine, digest, digests, prepare_values
from megatron_fp8rl.weight_sync.verify import Expected, WeightMismatch, all_match, verify

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


SENT = {"norm.weight": "n2", "q.weight": "q2", "q.weight_scale_inv": "s2", "k.weight": "k2", "k.weight_scale_inv": "t2"}
BEFORE = {name: digest.replace("2", "1") for name, digest in SENT.items()}


def report(held: dict[str, str], rank: int = 0, version: int | None = 7) -> dict:
    return {"rank": rank, "version": version, "combined": combine(held), "digests": held}


def mismatches(held: dict[str, str]) -> list[tuple[str, str]]:
    with pytest.raises(WeightMismatch) as error:
        verify([[report(SENT)], [report(held)]], Expected(7, [SENT]), Expected(6, [BEFORE]))
    assert {m.worker for m in error.value.mismatches} == {"replica 1 rank 0"}
    assert all(m.name in str(error.value) and m.kind in str(error.value) for m in error.value.mismatches)
    return [(m.name, m.kind) for m in error.value.mismatches]


def test_equal_passes():
    replicas = [[report(SENT)], [report(dict(reversed(SENT.items())))]]
    verify(replicas, Expected(7, [SENT]))
    assert all_match(replicas, Expected(7, [SENT]))


def test_one_digest_of_everything_tells_that_something_is_wrong():
    other = {name: digest + "'" for name, digest in SENT.items()}
    expected = Expected(7, [SENT, other])
    assert all_match([[report(other, rank=1), report(SENT)]], expected)
    for workers in (
        [report(SENT), report(SENT, rank=1)],
        [report(SENT), report(other | {"q.weight": "xx"}, rank=1)],
        [report(SENT), report(other, rank=1, version=None)],
        [report(SENT, version=6), report(other, rank=1)],
        [report(SENT)],
        [report(SENT), report(SENT), report(other, rank=1)],
    ):
        assert not all_match([workers], expected)
        assert not all_match([[report(SENT), report(other, rank=1)], workers], expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"q.weight": "xx"}, ("q.weight", "corrupted")),
        ({"norm.weight": "xx"}, ("norm.weight", "corrupted")),
        ({"q.weight": "q1"}, ("q.weight", "stale")),
        ({"norm.weight": "n1"}, ("norm.weight", "stale")),
        ({"q.weight_scale_inv": "xx"}, ("q.weight", "mis-scaled")),
        ({"q.weight_scale_inv": "s1"}, ("q.weight_scale_inv", "stale")),
        ({"other.weight": "xx"}, ("other.weight", "extra")),
        ({"k.weight": None}, ("k.weight", "missing")),
    ],
)
def test_one_wrong_tensor(change, expected):
    held = {name: digest for name, digest in (SENT | change).items() if digest is not None}
    assert mismatches(held) == [expected]


def test_wrong_bytes_with_wrong_scales_are_not_a_matter_of_scales():
    assert mismatches(SENT | {"q.weight": "xx", "q.weight_scale_inv": "yy"}) == [
        ("q.weight", "corrupted"),
        ("q.weight_scale_inv", "corrupted"),
    ]


def test_slices_of_ranks_are_compared_with_their_own():
    other = {name: digest + "'" for name, digest in SENT.items()}
    expected = Expected(7, [SENT, other])
    verify([[report(other, rank=1), report(SENT, rank=0)]], expected)
    with pytest.raises(WeightMismatch, match="q.weight in replica 0 rank 1: corrupted"):
        verify([[report(SENT, rank=0), report(other | {"q.weight": "q2"}, rank=1)]], expected)


@pytest.mark.parametrize("version", [6, None])
def test_version(version):
    with pytest.raises(WeightMismatch, match=f"replica 0 rank 0: has policy version {version}, not 7"):
        verify([[report(SENT, version=version)]], Expected(7, [SENT]))


def test_a_worker_that_does_not_report():
    with pytest.raises(WeightMismatch, match=r"replica 0: workers \[1\] reported, 2 were expected"):
        verify([[report(SENT, rank=1)]], Expected(7, [SENT, SENT]))


def test_the_message_stays_short_and_the_error_travels():
    with pytest.raises(WeightMismatch) as error:
        verify([[report({})]], Expected(7, [{f"w{i}": "x" for i in range(1000)}]))
    assert len(str(error.value).splitlines()) == 12 and "and 990 more" in str(error.value)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.mismatches == error.value.mismatches and str(again) == str(error.value)
