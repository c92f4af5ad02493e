"""Every way in which an engine can hold the wrong thing is told apart and named."""

import pickle

import pytest

from megatron_fp8rl.weight_sync.digest import combine
from megatron_fp8rl.weight_sync.verify import Expected, WeightMismatch, holds_all, verify

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
    assert holds_all(replicas, Expected(7, [SENT]))


def test_one_digest_of_everything_tells_that_something_is_wrong():
    other = {name: digest + "'" for name, digest in SENT.items()}
    expected = Expected(7, [SENT, other])
    assert holds_all([[report(other, rank=1), report(SENT)]], expected)
    for workers in (
        [report(SENT), report(SENT, rank=1)],
        [report(SENT), report(other | {"q.weight": "xx"}, rank=1)],
        [report(SENT), report(other, rank=1, version=None)],
        [report(SENT, version=6), report(other, rank=1)],
        [report(SENT)],
        [report(SENT), report(SENT), report(other, rank=1)],
    ):
        assert not holds_all([workers], expected)
        assert not holds_all([[report(SENT), report(other, rank=1)], workers], expected)


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
