"""Group-relative advantages, the overlong rules, and what becomes a sample."""

import dataclasses
import math

import numpy as np
import pytest

from megatron_fp8rl.algo import advantages
from megatron_fp8rl.algo import samples as algo_samples
from megatron_fp8rl.algo.load_function import FunctionError, load_advantage
from megatron_fp8rl.algo.samples import NonFiniteRewardError, RoutedExpertsError, has_signal, overlong_penalty
from megatron_fp8rl.config import AlgoConfig, RunConfig, SamplingConfig
from megatron_fp8rl.types import Prompt, Rollout, RolloutGroup, single_turn
from tests.helpers.models import small_model
from tests.helpers.samples import advantages_of, logprobs_of, make_completion, mask_of
from tests.tolerances import FLOAT64_ORDER

MODEL = small_model((1, 8, 1, 1, 8, 8))
PROMPT = Prompt(prompt_id="sum/7", environment="sum", token_ids=(1, 2, 3), text="", answer="")


def config(**algo) -> RunConfig:
    return RunConfig(name="x", model=MODEL, algo=AlgoConfig(**algo), sampling=SamplingConfig(max_completion_tokens=10))


def to_samples(groups, cfg, version):
    return algo_samples.to_samples(groups, load_advantage(cfg.algo), cfg.algo, cfg.sampling, version)


def group(*rollouts: tuple[float, int], **changes) -> RolloutGroup:
    """From (reward, completion length); the limit of 10 tokens truncates. ``changes`` apply to the first rollout."""
    made = [
        Rollout(
            prompt=PROMPT,
            index=i,
            reward=reward,
            status="truncated" if length == 10 else "scored",
            branches=single_turn(
                PROMPT,
                make_completion(
                    range(length),
                    [-0.1 * t for t in range(length)],
                    finish_reason="length" if length == 10 else "stop",
                    min_version=3,
                    max_version=4,
                ),
            ),
        )
        for i, (reward, length) in enumerate(rollouts)
    ]
    made[0] = dataclasses.replace(made[0], **changes)
    return RolloutGroup(prompt=PROMPT, rollouts=tuple(made))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_advantages_match_numpy(name):
    rewards = [0.0, 1.0, 1.0, 0.25, 0.5]
    expected = np.array(rewards) - np.mean(rewards)
    if name == "grpo":
        expected /= np.std(rewards, ddof=1) + 1e-6
    actual = load_advantage(AlgoConfig(advantage=name))(rewards)
    assert actual == pytest.approx(expected.tolist(), rel=FLOAT64_ORDER["rtol"])
    assert sum(actual) == pytest.approx(0, abs=FLOAT64_ORDER["rtol"])


@pytest.mark.parametrize("rewards", [[], [1.0], [0.3] * 4])
def test_equal_rewards_have_no_advantage(rewards):
    assert advantages.grpo(rewards) == [0.0] * len(rewards)


def test_sample_fields_align_with_tokens():
    samples = to_samples([group((1.0, 4), (0.0, 2))], config(advantage="dr_grpo"), version=5)
    first, second = samples
    assert first.name == "sum/7#0" and second.name == "sum/7#1" and first.environment == "sum"
    assert first.token_ids == (1, 2, 3, 0, 1, 2, 3) and first.num_prompt_tokens == 3
    assert mask_of(first) == [False] * 3 + [True] * 4
    assert logprobs_of(first) == [0.0, 0.0, 0.0, 0.0, -0.1, -0.2, -0.1 * 3]
    assert advantages_of(first) == [0.0] * 3 + [0.5] * 4 and advantages_of(second) == [0.0] * 3 + [-0.5] * 2
    assert first.staleness == 2


@pytest.mark.parametrize("zero_variance", ["keep", "drop", "refill"])
def test_groups_without_variance(zero_variance):
    groups = [group((1.0, 2), (1.0, 3)), group((1.0, 2), (0.0, 3))]
    cfg = config(zero_variance=zero_variance)
    samples = to_samples(groups, cfg, version=3)
    assert len(samples) == (4 if zero_variance == "keep" else 2)
    assert [has_signal(g, cfg.algo, cfg.sampling) for g in groups] == [False, True]
    if zero_variance == "keep":
        assert set(advantages_of(samples[0])) == {0.0}


def test_failed_scores_and_aborted_completions_do_not_count():
    whole = group((1.0, 2), (0.0, 2), (0.0, 2))
    failed = group((9.0, 2), (1.0, 2), (0.0, 2), (0.0, 2), status="score_failed", detail="late")
    expected = [advantages_of(s) for s in to_samples([whole], config(), version=3)]
    assert [advantages_of(s) for s in to_samples([failed], config(), version=3)] == expected
    aborted = group((9.0, 2), (1.0, 2), (0.0, 2), (0.0, 2))
    completion = dataclasses.replace(aborted.rollouts[0].completions[0], finish_reason="abort")
    rollouts = (
        dataclasses.replace(aborted.rollouts[0], branches=single_turn(PROMPT, completion)),
        *aborted.rollouts[1:],
    )
    samples = to_samples([dataclasses.replace(aborted, rollouts=rollouts)], config(), version=3)
    assert [advantages_of(s) for s in samples] == expected


def test_overlong_keep_mask_penalty():
    rollouts = group((1.0, 4), (0.0, 4), (0.0, 10))
    assert len(to_samples([rollouts], config(overlong="keep"), version=3)) == 3
    masked = to_samples([rollouts], config(overlong="mask", advantage="dr_grpo"), version=3)
    assert [s.name for s in masked] == ["sum/7#0", "sum/7#1"]
    assert [advantages_of(s)[-1] for s in masked] == [0.5, -0.5]
    punished = to_samples(
        [group((1.0, 4), (1.0, 8), (1.0, 10))],
        config(overlong="penalty", overlong_buffer_tokens=4, advantage="dr_grpo"),
        version=3,
    )
    assert [advantages_of(s)[-1] for s in punished] == pytest.approx([0.5, 0.0, -0.5])  # rewards 1, 0.5, 0


@pytest.mark.parametrize(
    ("num_tokens", "buffer", "penalty"), [(6, 4, 0), (7, 4, 0.25), (9, 4, 0.75), (10, 4, 1), (9, 0, 0), (10, 0, 1)]
)
def test_soft_overlong_punishment(num_tokens, buffer, penalty):
    """DAPO eq. 13 with limit 10."""
    assert overlong_penalty(num_tokens, 10, AlgoConfig(overlong_buffer_tokens=buffer)) == penalty


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(reward):
    with pytest.raises(NonFiniteRewardError, match=r"sum/7#0.*environment sum"):
        to_samples([group((reward, 2), (0.0, 2))], config(), version=3)


def test_missing_logprobs_are_named():
    completion = make_completion((1, 2), (0.0,))
    with pytest.raises(ValueError, match="sum/7#0: 1 log-probabilities for 2 tokens"):
        to_samples([group((1.0, 2), (0.0, 2), branches=single_turn(PROMPT, completion))], config(), version=3)


def test_a_record_of_experts_that_cannot_be_replayed_is_named():
    moe = dataclasses.replace(MODEL, family="qwen3_moe", num_layers=2, num_experts=8, experts_per_token=2)
    cfg = dataclasses.replace(config(router_replay="rollout"), model=moe)
    good = np.tile(np.array([5, 7], dtype=np.uint8), (20, 2, 1))
    one_token = np.zeros_like(good)
    one_token[19, 1, 0] = 1

    def sampled(experts, cfg=cfg):
        tokens = tuple(range(18))
        completion = make_completion(tokens, (-0.1,) * 18, routed_experts=experts)
        groups = [group((1.0, 18), (0.0, 0), branches=single_turn(PROMPT, completion))]
        if cfg.algo.router_replay == "rollout":
            algo_samples.require_experts(groups, cfg.model)
        return to_samples(groups, cfg, version=3)

    for experts in (good, one_token):
        assert sampled(experts)[0].routed_experts is experts
    for experts, problem in (
        (None, "record_routed_experts True"),
        (good[1:], r"shape \(19, 2, 2\), expected \(20, 2, 2\)"),
        (good + 1, "expert 8 of 8"),
        (0 * good, "expert 0 in every layer for all of its 20 tokens"),
    ):
        with pytest.raises(RoutedExpertsError, match=f"sum/7#0.*{problem}.*--algo.router_replay old or off"):
            sampled(experts)
        assert sampled(experts, config())[0].routed_experts is experts, "nothing is replayed"


def test_an_advantage_function_that_returns_nonsense_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nonsense.py").write_text(
        "def nan(rewards):\n    return [float('nan')] * len(rewards)\n\n\ndef one(rewards):\n    return [1.0]\n"
    )
    for name in ("nan", "one"):
        with pytest.raises(FunctionError, match=f"--algo.advantage = 'nonsense:{name}': returned .* for each reward"):
            to_samples([group((1.0, 2), (0.0, 2))], config(advantage=f"nonsense:{name}"), version=3)


@pytest.mark.parametrize("oldest_trained", [3, 4])
def test_tokens_of_older_weights_are_marked_in_the_microbatch(oldest_trained):
    """A completion that continued after two publications; with a window, its first tokens may be too old to train."""
    from megatron_fp8rl.data.packing import pack
    from megatron_fp8rl.data.sample_columns import SampleColumns

    whole = group((1.0, 6), (0.0, 2))
    (branch,) = whole.rollouts[0].branches
    context, completion = branch.segments
    spans = dataclasses.replace(completion, version_spans=((0, 3), (1, 4), (4, 5)), max_version=5)
    branch = dataclasses.replace(branch, segments=(context, spans))
    rollouts = (dataclasses.replace(whole.rollouts[0], branches=(branch,)), whole.rollouts[1])
    sampling = SamplingConfig(max_completion_tokens=10, max_staleness=5 - oldest_trained, window_groups=8)
    cfg = dataclasses.replace(config(), sampling=sampling)
    samples = to_samples([RolloutGroup(prompt=PROMPT, rollouts=rollouts)], cfg, version=5)
    (sample, *others) = SampleColumns.from_samples(samples).samples()
    (batch,) = pack([sample], data_size=1, data_rank=0, max_tokens=16, alignment=1)
    (mb,) = batch.microbatches
    is_trained = [oldest_trained <= 3, *5 * [True]]
    assert mb.loss_mask_T.tolist() == [False, False, *is_trained, False]
    assert (mb.stale_T & mb.loss_mask_T).tolist() == [False, False, is_trained[0], True, True, True, *3 * [False]]
    assert len(others) == (oldest_trained == 3)  # all of its tokens have version 3
    fresh = to_samples([whole], config(), version=3)
    assert pack(fresh, data_size=1, data_rank=0, max_tokens=32, alignment=1)[0].microbatches[0].stale_T is None
