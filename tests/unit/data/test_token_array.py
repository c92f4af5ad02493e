"""Token arrays behave like tuples of Python numbers, and take as many bytes as their arrays."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Completion, Context, Trajectory

IDS, FLOATS = (5, 151_935, 0), (-0.5, -0.1, 0.0)


def completion(**fields) -> Completion:
    known = dict(token_ids=IDS, rollout_logprobs=FLOATS, finish_reason="stop", min_version=1, max_version=1)
    return Completion(**known | fields)


def test_it_is_the_tuple_of_its_numbers():
    row, values = TokenArray.from_ids(IDS), IDS
    assert row == values and values == row and list(row) == list(values) and tuple(row) == values
    assert row == list(values) and row != (*values, 1) and row != values[:-1] and row != "x"
    assert row[0] == values[0] and type(row[0]) is type(values[0]) and row[-1] == values[-1]
    assert row[1:] == values[1:] and isinstance(row[1:], TokenArray) and values[0] in row and hash(row) == hash(values)
    assert (
        row + values[:1] == (*values, values[0]) and TokenArray.from_ids(()) + IDS == IDS and repr(row) == repr(values)
    )
    for protocol in (4, 5):
        assert pickle.loads(pickle.dumps([row, row[1:], row[::2]], protocol)) == [row, row[1:], row[::2]]
    assert not TokenArray.from_ids(()) and TokenArray.from_ids(()) == ()


def test_floats_are_single_where_nothing_is_lost():
    exact = TokenArray.from_floats(np.float32(FLOATS).tolist())
    assert np.asarray(exact).dtype == np.float32 and np.asarray(TokenArray.from_floats(FLOATS)).dtype == np.float64
    assert exact == np.float32(FLOATS).tolist() and TokenArray.from_floats(FLOATS) == FLOATS
    assert TokenArray.from_floats((float("nan"),)) == (float("nan"),)  # recordings hold it


def test_it_cannot_be_changed():
    given = np.arange(3, dtype=np.int32)
    row = TokenArray(given)
    with pytest.raises(TypeError):
        row[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(row)[0] = 1
    np.array(row)[0] = 1
    np.array(row, np.int32)[0] = 1
    assert row == (0, 1, 2)


def test_a_completion_keeps_eight_bytes_a_token():
    ids, logprobs = np.arange(10_000, dtype=np.int32), np.linspace(-9, 0, 10_000, dtype=np.float32)
    actual = completion(token_ids=ids.tolist(), rollout_logprobs=logprobs.tolist())
    assert actual == completion(token_ids=ids, rollout_logprobs=logprobs) == replace(actual)
    assert 80_000 < len(pickle.dumps(actual)) < 81_000 and pickle.loads(pickle.dumps(actual)) == actual
    assert actual != completion(token_ids=ids[:-1], rollout_logprobs=logprobs[:-1])


def test_a_trajectory_joins_its_segments():
    assert Trajectory(segments=(Context(token_ids=(1, 2), role="prompt"), completion())).token_ids == (1, 2, *IDS)
    assert Trajectory(segments=()).token_ids == ()
