"""Pieces of completions, joined."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_fp8rl.config import SamplingConfig
from megatron_fp8rl.rollout.completions import (
    Answer,
    PartialCompletion,
    Sampling,
    Segment,
    read_answer,
    read_prompt_logprobs,
    write_answer,
    write_request,
)


def segment(tokens: list[int], reason: str, experts: np.ndarray | None = None) -> Segment:
    return Segment(
        token_ids=tokens, rollout_logprobs=[-t / 10 for t in tokens], finish_reason=reason, routed_experts=experts
    )


def decode(token_ids) -> str:
    return "".join(chr(97 + t) for t in token_ids)


def through_bytes(*segments: Segment, **fields) -> Answer:
    return read_answer(write_answer(Answer(segments=list(segments), **fields)))


def test_an_answer_is_read_as_it_was_written():
    experts = [np.arange(12, dtype=np.uint16).reshape(3, 2, 2), np.arange(3, dtype=np.uint16).reshape(1, 3, 1)]
    logprobs = [float(np.float32(-1.1)), float(np.float32(-1e-7))]
    fields = dict(rollout_logprobs=logprobs, finish_reason="length")
    written = [
        Segment(token_ids=(4, 151_935), routed_experts=experts[0], text="v\u00e4\ud800", **fields),
        Segment(token_ids=(5, 6), routed_experts=experts[1], **fields),
    ]
    answer = through_bytes(*written, num_cached_tokens=7, prompt_logprobs=[-0.5, -2.0])
    first, second = answer.segments
    assert (first.token_ids, first.rollout_logprobs, first.finish_reason) == ((4, 151_935), logprobs, "length")
    assert (first.text, second.text, second.token_ids) == ("v\u00e4\ud800", None, (5, 6))
    for read, one in zip(answer.segments, experts, strict=True):
        assert (read.routed_experts == one).all() and read.routed_experts.dtype == np.uint16
    assert answer.num_cached_tokens == 7 and read_prompt_logprobs(answer, 3) == [-0.5, -2.0]


def test_an_answer_of_no_tokens():
    """Of a request that a pause ended before its first token."""
    (read,) = through_bytes(segment([], "abort")).segments
    assert read == Segment(token_ids=[], rollout_logprobs=[], finish_reason="abort", routed_experts=None)


def test_a_read_answer_does_not_hold_its_text_twice():
    """Rows are views of the numbers of their answer, without the header."""
    (read,) = through_bytes(replace(segment([1, 2], "stop"), text="a" * 10_000)).segments
    memory = np.asarray(read.token_ids)
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    assert memory.nbytes == 16 and memory.base is None


@pytest.mark.parametrize("logprobs", [[-1.0], [], [-1.0, float("-inf")], [-1.0, float("nan")]])
def test_a_missing_logprob_is_refused(logprobs):
    with pytest.raises(ValueError, match="2 tokens without a log-probability for each"):
        through_bytes(replace(segment([4, 5], "stop"), rollout_logprobs=logprobs))


def test_a_missing_logprob_of_a_prompt_is_refused():
    for logprobs, number in (([-1.0, -2.0], 2), (None, 0)):
        with pytest.raises(ValueError, match=f"returned {number} log-probabilities for a prompt of 4 tokens"):
            read_prompt_logprobs(through_bytes(prompt_logprobs=logprobs), 4)


def test_an_unknown_reason_is_refused():
    with pytest.raises(ValueError, match="ended a completion with finish_reason 'error'"):
        through_bytes(segment([4], "error"))


def test_the_text_is_the_engines_where_it_wrote_it():
    part = PartialCompletion(seed=0)
    part.extend(segment([1, 2], "abort"), 1, give_up=False)
    part.extend(replace(segment([3], "stop"), text="the engine's"), 2, give_up=False)
    assert part.complete(decode, ()).text == "the engine's"
    part = PartialCompletion(seed=0)
    part.extend(replace(segment([1], "stop"), text="old"), 1, give_up=False)
    part.extend(segment([2], "abort"), 2, give_up=True)  # ended before the engine wrote it
    assert part.complete(decode, ()).text == "bc"


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


def test_a_stop_string_ends_the_completion_before_tokens_of_the_same_step():
    part = PartialCompletion(seed=0)
    drafted = dict(num_draft_tokens=4, num_accepted_tokens=3)
    (read,) = through_bytes(replace(segment([1, 2, 3, 4, 5], "stop"), text="bcdef", **drafted)).segments
    part.extend(read, 1, give_up=False)
    completion = part.complete(decode, ("d", "cd"))
    assert (completion.text, completion.token_ids, len(completion.rollout_logprobs)) == ("bcd", (1, 2, 3), 3)
    assert (completion.num_draft_tokens, completion.num_accepted_tokens) == (4, 3)
    part = PartialCompletion(seed=0)
    part.extend(replace(segment([1, 2, 3], "stop"), text="the engine's", **drafted), 1, give_up=False)
    assert part.complete(decode, ("x", "d")).text == "the engine's"  # the stop string is complete in the last token


def test_drafts_are_counted_in_the_ranks_of_tokens():
    from megatron_fp8rl.rollout.vllm_plugin.drafts import ACCEPTED, counts_of_drafts, mark

    steps = [1, mark(4), ACCEPTED, ACCEPTED, mark(2), 17, None]  # an ordinary step; 4 drafts, 2 accepted; 2 drafts
    assert counts_of_drafts(steps) == (6, 2)


def test_a_request_stops_at_every_end_token_and_finds_stop_strings_in_special_tokens():
    sampling = Sampling.of(SamplingConfig(stop_token_ids=(9, 262), stop_strings=("</answer>",)), (256, 262), {262, 0})
    body = write_request([1], [PartialCompletion(seed=0)], sampling)
    assert body["sampling_params"]["stop_token_ids"] == [256, 262, 9]
    assert body["sampling_params"]["skip_special_tokens"] is False and body["dropped_token_ids"] == [0, 262]
