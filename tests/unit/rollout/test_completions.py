"""Pieces of completions, joined."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_fp8rl.rollout.completions import (
    PartialCompletion,
    Segment,
    read_choice,
    read_prompt_logprobs,
    write_answer,
    write_choice,
)


def segment(tokens: list[int], reason: str, experts: np.ndarray | None = None) -> Segment:
    return Segment(
        token_ids=tokens, rollout_logprobs=[-t / 10 for t in tokens], finish_reason=reason, routed_experts=experts
    )


def decode(token_ids) -> str:
    return "".join(chr(97 + t) for t in token_ids)


def through_json(answer: dict) -> dict:
    return json.loads(json.dumps(answer))


def test_an_answer_is_read_as_it_was_written():
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    logprobs = [float(np.float32(-1.1)), float(np.float32(-1e-7))]
    written = write_answer([write_choice((4, 151_935), logprobs, "length", experts)], prompt_logprobs=[-0.5, -2.0])
    answer = through_json(written)
    (choice,) = answer["choices"]
    read = read_choice(choice)
    assert (read.token_ids, read.rollout_logprobs, read.finish_reason) == ([4, 151_935], logprobs, "length")
    assert (read.routed_experts == experts).all() and read.routed_experts.dtype == np.uint8
    assert read_prompt_logprobs(answer, 3) == [-0.5, -2.0]


def test_an_answer_of_no_tokens():
    """Of a request that a pause ended before its first token."""
    read = read_choice(through_json(write_choice((), None, "abort", None)))
    assert read == Segment(token_ids=[], rollout_logprobs=[], finish_reason="abort", routed_experts=None)


@pytest.mark.parametrize("logprobs", [[-1.0], None, [-1.0, float("-inf")], [-1.0, float("nan")]])
def test_a_missing_logprob_is_refused(logprobs):
    with pytest.raises(ValueError, match="2 tokens but not the log-probability of each"):
        read_choice(write_choice((4, 5), logprobs, "stop", None))


def test_a_missing_logprob_of_a_prompt_is_refused():
    with pytest.raises(ValueError, match="2 log-probabilities of a prompt of 4 tokens"):
        read_prompt_logprobs(write_answer([], prompt_logprobs=[-1.0, -2.0]), 4)


def test_an_unknown_reason_is_refused():
    with pytest.raises(ValueError, match="ended a completion with 'error'"):
        read_choice(write_choice((4,), [-1.0], "error", None))


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
