"""Pieces of completions, joined."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from megatron_fp8rl.rollout.completions import PartialCompletion, Segment, read_choice


def segment(tokens: list[int], reason: str, experts: np.ndarray | None = None) -> Segment:
    return Segment(
        token_ids=tokens, rollout_logprobs=[-t / 10 for t in tokens], finish_reason=reason, routed_experts=experts
    )


def decode(token_ids) -> str:
    return "".join(chr(97 + t) for t in token_ids)


def test_read_choice():
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    buffer = io.BytesIO()
    np.save(buffer, experts)
    choice = {
        "token_ids": [4, 5],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -1.5}, {"logprob": -0.25}]},
        "routed_experts": base64.b64encode(buffer.getvalue()).decode(),
    }
    read = read_choice(choice)
    assert (read.token_ids, read.rollout_logprobs, read.finish_reason) == ([4, 5], [-1.5, -0.25], "length")
    assert (read.routed_experts == experts).all()


@pytest.mark.parametrize("content", [[{"logprob": -1.0}], [{"logprob": -1.0}, {"logprob": -9999.0}]])
def test_a_missing_logprob_is_refused(content):
    with pytest.raises(ValueError, match="2 tokens but not the log-probability of each"):
        read_choice({"token_ids": [4, 5], "finish_reason": "stop", "logprobs": {"content": content}})


def test_spans_start_where_the_version_changes():
    part = PartialCompletion(seed=9)
    seeds = [part.next_seed()]
    part.extend(segment([1, 2], "abort"), 3, give_up=False)
    seeds.append(part.next_seed())
    part.extend(segment([], "abort"), 4, give_up=False)  # paused again before a token came
    part.extend(None, 4, give_up=False)  # taken back
    seeds.append(part.next_seed())
    part.extend(segment([3], "abort"), 5, give_up=False)
    part.extend(segment([4, 5], "stop"), 5, give_up=False)
    completion = part.complete(decode, ())
    assert completion.token_ids == (1, 2, 3, 4, 5)
    assert completion.rollout_logprobs == (-0.1, -0.2, -0.3, -0.4, -0.5)
    assert completion.version_spans == ((0, 3), (2, 5))
    assert (completion.min_version, completion.max_version) == (3, 5)
    assert completion.finish_reason == "stop"
    assert seeds[0] == 9 and len(set(seeds)) == 3


def test_experts_of_a_prefix_are_those_that_sampled_it():
    part = PartialCompletion(seed=0)
    old, new = np.full((4, 1, 1), 1, np.uint8), np.full((6, 1, 1), 2, np.uint8)
    part.extend(segment([1, 2], "abort", old), 1, give_up=False)
    part.extend(segment([3, 4], "length", new), 2, give_up=False)
    assert part.complete(decode, ()).routed_experts.ravel().tolist() == [1, 1, 1, 1, 2, 2]


def test_a_given_up_completion_is_final():
    part = PartialCompletion(seed=0)
    part.extend(segment([1], "abort"), 1, give_up=True)
    assert part.complete(decode, ()).finish_reason == "abort"


def test_a_stop_string_across_an_interruption_ends_the_completion():
    part = PartialCompletion(seed=0)
    part.extend(segment([1, 2], "abort", np.zeros((5, 1, 1), np.uint8)), 1, give_up=False)
    part.extend(segment([3, 4, 5], "length", np.zeros((8, 1, 1), np.uint8)), 2, give_up=False)
    completion = part.complete(decode, ("cd",))  # tokens 2 and 3
    assert completion.text == "bcd"
    assert completion.finish_reason == "stop"
    assert len(completion.rollout_logprobs) == 3
    assert len(completion.routed_experts) == 6
