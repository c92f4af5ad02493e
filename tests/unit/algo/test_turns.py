"""Trajectories of several turns and branches become samples in which every token keeps its own log-probability."""

import random

import numpy as np
import pytest
import torch

from megatron_fp8rl.algo.load_function import load_advantage
from megatron_fp8rl.algo.mismatch import mismatch_metrics
from megatron_fp8rl.algo.samples import require_experts, to_samples
from megatron_fp8rl.algo.turns import turn_of_tokens
from megatron_fp8rl.config import AlgoConfig, RunConfig, SamplingConfig
from megatron_fp8rl.types import Completion, Context, Prompt, Rollout, RolloutGroup, Trajectory, single_turn
from tests.helpers.models import small_model
from tests.helpers.samples import advantages_of, logprobs_of, make_completion, mask_of
from tests.unit.algo.algo_cases import LocalReducer, packed, with_logprobs

MODEL = small_model((2, 8, 1, 1, 8, 8), experts=(8, 2, 0))
PROMPT = Prompt(prompt_id="sum/7", environment="sum", token_ids=(1, 2, 3), text="", answer="")


def config(**algo) -> RunConfig:
    return RunConfig(name="x", model=MODEL, algo=AlgoConfig(**algo), sampling=SamplingConfig(max_completion_tokens=10))


def sampled(*token_ids: int, version: int = 0, reason: str = "stop", experts=None) -> Completion:
    logprobs = [-token / 128 for token in token_ids]
    versions = {"min_version": version, "max_version": version}
    return make_completion(token_ids, logprobs, finish_reason=reason, routed_experts=experts, **versions)


def given(*token_ids: int) -> Context:
    return Context(token_ids=token_ids, role="tool")


def rollout(index: int, reward: float, *branches: Trajectory, turns: tuple[float, ...] = (), **changes) -> Rollout:
    fields = dict(prompt=PROMPT, index=index, branches=branches, reward=reward, status="scored", turn_rewards=turns)
    return Rollout(**fields | changes)


def samples_of(*rollouts: Rollout, version: int = 5, **algo):
    cfg = config(**algo)
    return to_samples(
        [RolloutGroup(prompt=PROMPT, rollouts=rollouts)], load_advantage(cfg.algo), cfg.algo, cfg.sampling, version
    )


def test_what_was_sampled_is_trained_and_what_was_given_is_not():
    turns = Trajectory(
        segments=(given(1, 2, 3), sampled(40, 41, version=3), given(50), sampled(42, version=2), given(51))
    )
    first, second = samples_of(rollout(0, 1.0, turns), rollout(1, 0.0, *single_turn(PROMPT, sampled(43))))
    assert first.token_ids == (1, 2, 3, 40, 41, 50, 42), "the result of a tool that nobody read is left out"
    assert mask_of(first) == [False, False, False, True, True, False, True] and first.num_prompt_tokens == 3
    assert logprobs_of(first) == [0.0, 0.0, 0.0, -40 / 128, -41 / 128, 0.0, -42 / 128]
    assert [a != 0 for a in advantages_of(first)] == mask_of(first) and len(set(advantages_of(first))) == 2
    assert (first.staleness, second.staleness) == (3, 5) and second.token_ids == (1, 2, 3, 43)


def test_branches_are_samples_of_their_own_with_the_same_advantage():
    kept = Trajectory(segments=(given(1, 2, 3), sampled(40)))
    rewritten = Trajectory(segments=(given(1, 2, 9, 9), sampled(41, 42)))
    actual = samples_of(rollout(0, 1.0, kept, rewritten), rollout(1, 0.0, kept))
    assert [sample.name for sample in actual] == ["sum/7#0/0", "sum/7#0/1", "sum/7#1"]
    assert advantages_of(actual[0])[-1] == advantages_of(actual[1])[-1] == -advantages_of(actual[2])[-1] > 0
    assert actual[1].token_ids == (1, 2, 9, 9, 41, 42) and actual[1].num_prompt_tokens == 4


def test_advantages_by_turn_compare_the_reward_from_that_turn_on():
    def of(index: int, *turns: float) -> Rollout:
        segments = [given(1, 2, 3)]
        for _ in turns:
            segments += [sampled(40), given(50)]
        return rollout(index, sum(turns), Trajectory(segments=tuple(segments)), turns=turns)

    actual = samples_of(of(0, 1.0, 0.0), of(1, 0.0, 1.0), of(2, 0.5), advantage="dr_grpo", advantage_unit="turn")
    # Returns: turn 1: 1, 1, 0.5; turn 2: 0, 1.
    by_turn = [
        [a for a, is_loss in zip(advantages_of(sample), mask_of(sample), strict=True) if is_loss] for sample in actual
    ]
    assert by_turn[0] == pytest.approx([1 / 6, -0.5]) and by_turn[1] == pytest.approx([1 / 6, 0.5])
    assert by_turn[2] == pytest.approx([-1 / 3])
    whole = samples_of(of(0, 1.0, 0.0), of(1, 0.0, 1.0), of(2, 0.5), advantage="dr_grpo")
    assert [advantages_of(sample)[-1] for sample in whole] == pytest.approx([1 / 6, 1 / 6, -1 / 3])
    assert not samples_of(of(0, 1.0, 0.0), of(1, 0.0, 1.0)), "equal whole rewards teach nothing"
    assert len(samples_of(of(0, 1.0, 0.0), of(1, 0.0, 1.0), advantage_unit="turn")) == 2
    with pytest.raises(ValueError, match="sum/7#0: 1 rewards for 2 turns"):
        wrong = rollout(0, 1.0, of(0, 1.0, 0.0).branches[0], turns=(1.0,))
        samples_of(wrong, of(1, 0.0, 1.0), advantage_unit="turn")


def test_overlong_rules_look_at_the_longest_turn_and_at_the_end():
    long = Trajectory(segments=(given(1), sampled(*range(10)), given(5), sampled(41)))
    short = Trajectory(segments=(given(1), sampled(40)))
    cut = Trajectory(segments=(given(1), sampled(*range(10), reason="length")))
    punished = samples_of(rollout(0, 1.0, long), rollout(1, 1.0, short), overlong="penalty", advantage="dr_grpo")
    assert advantages_of(punished[0])[-1] == -0.5 and advantages_of(punished[1])[-1] == 0.5
    rollouts = rollout(0, 1.0, cut, status="truncated"), rollout(1, 0.0, short), rollout(2, 0.5, short)
    assert [sample.name for sample in samples_of(*rollouts, overlong="mask")] == ["sum/7#1", "sum/7#2"]
    limited = rollout(0, 1.0, short, status="truncated")  # by the turns of its session
    assert [sample.name for sample in samples_of(limited, *rollouts[1:], overlong="mask")] == ["sum/7#1", "sum/7#2"]


def test_experts_of_all_turns_are_one_record():
    rng = np.random.default_rng(1)
    record = rng.integers(1, 8, (6, 2, 2)).astype(np.uint8)
    turns = Trajectory(
        segments=(given(1, 2, 3), sampled(40, 41, experts=record[:4]), given(5), sampled(42, experts=record[4:]))
    )
    group = RolloutGroup(prompt=PROMPT, rollouts=(rollout(0, 1.0, turns), rollout(1, 0.0, turns)))
    require_experts([group], config(router_replay="rollout").model)
    np.testing.assert_array_equal(samples_of(*group.rollouts)[0].routed_experts, record)
    short = Trajectory(segments=(*turns.segments[:3], sampled(42, experts=record[5:])))
    with pytest.raises(ValueError, match=r"sum/7#0 has routed experts of shape \(1, 2, 2\), expected \(2, 2, 2\)"):
        require_experts([RolloutGroup(prompt=PROMPT, rollouts=(rollout(0, 1.0, short),))], config().model)


def test_turns_are_counted_within_their_sequence():
    rng = random.Random(3)
    masks = [[rng.random() < 0.5 for _ in range(rng.randrange(1, 12))] for _ in range(40)]
    mask_T = torch.tensor([flag for mask in masks for flag in mask])
    ids_T = torch.tensor([i for i, mask in enumerate(masks) for _ in mask])
    expected = []
    for mask in masks:
        turn = 0
        for i, flag in enumerate(mask):
            turn += flag and not (i and mask[i - 1])
            expected.append(turn)
    assert turn_of_tokens(mask_T, ids_T).tolist() == expected


def test_the_mismatch_is_known_by_turn():
    turns = Trajectory(segments=(given(1, 2, 3), sampled(40, 41), given(50), sampled(42)))
    samples = samples_of(rollout(0, 1.0, turns), rollout(1, 0.0, *single_turn(PROMPT, sampled(43))))
    batch = with_logprobs(packed(samples)[0])
    report = mismatch_metrics([batch], AlgoConfig(), LocalReducer())
    assert [(part.label, part.num_tokens) for part in report.by_turn] == [("1", 3), ("2", 1)]
    (mb,) = batch.microbatches
    (t,) = [t for t in range(len(mb.targets_T)) if mb.targets_T[t] == 42 and mb.loss_mask_T[t]]
    d = abs(mb.old_logprobs_T[t].double() - mb.rollout_logprobs_T[t].double()).item()
    assert report.by_turn[1].abs_logprob_diff_max == d > 0


def test_turns_of_interleaved_conversations_are_compared_in_order_of_time():
    """Conversations A, B, A: the returns follow time, and the advantages reach the tokens of their turns."""
    a = Trajectory(segments=(given(1, 2, 3), sampled(40), given(50), sampled(41)))
    b = Trajectory(segments=(given(1, 9), sampled(42)))
    interleaved = rollout(0, 7.0, a, b, turns=(1.0, 4.0, 2.0), turn_order=(0, 2, 1))
    straight = rollout(
        1, 0.0, Trajectory(segments=(given(1), sampled(60), given(5), sampled(61), given(5), sampled(62)))
    )
    samples = samples_of(interleaved, straight, advantage="dr_grpo", advantage_unit="turn")
    # Returns by time: 7 (turn 1, in A), 6 (turn 2, in B), 4 (turn 3, in A); those of the other rollout are 0.
    by_turn = [
        [a for a, is_loss in zip(advantages_of(sample), mask_of(sample), strict=True) if is_loss] for sample in samples
    ]
    assert by_turn == [pytest.approx([3.5, 2.0]), pytest.approx([3.0]), pytest.approx([-3.5, -3.0, -2.0])]
    assert interleaved.last_completion.token_ids == (41,)
    cut = Trajectory(segments=(given(1, 9), sampled(42, reason="length")))
    assert rollout(0, 1.0, a, cut, turn_order=(0, 2, 1)).finish_reason == "stop"
    assert rollout(0, 1.0, a, cut, turn_order=(0, 1, 2)).finish_reason == "length"
