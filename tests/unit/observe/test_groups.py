"""Statistics of a step's rollouts, against values counted by hand."""

from dataclasses import replace

import pytest

from megatron_fp8rl.evaluate import summarize, table
from megatron_fp8rl.observe.display import headline
from megatron_fp8rl.observe.groups import evaluation_metrics, group_metrics
from megatron_fp8rl.types import Prompt, Rollout, RolloutGroup, single_turn
from tests.helpers.samples import make_completion


def make_group(environment: str, rewards, lengths, *, finish="stop", status="scored", versions=(3, 3)) -> RolloutGroup:
    """One group whose tokens all have a rollout log-probability of -0.5."""
    prompt = Prompt(prompt_id=f"{environment}/0", environment=environment, token_ids=(1,), text="?", answer="!")
    rollouts = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        spans = {"min_version": versions[0], "max_version": versions[1]}
        completion = make_completion((7,) * length, -0.5, finish_reason=finish, **spans)
        rollouts.append(
            Rollout(prompt=prompt, index=index, branches=single_turn(prompt, completion), reward=reward, status=status)
        )
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_statistics_count_completions_and_groups():
    metrics = group_metrics(
        [
            make_group("chain_sum", [1.0, 0.0, 0.0, 1.0], [2, 4, 6, 4]),
            make_group("products", [0.0] * 4, [8] * 4, finish="length", status="truncated", versions=(2, 3)),
        ]
    )
    assert metrics == pytest.approx(
        {
            "reward/score/mean": 0.25,
            "reward/score/std": (0.25 * 0.75) ** 0.5,  # of a coin with p = 1/4
            "reward/score/min": 0.0,
            "reward/score/max": 1.0,
            "reward/pass_rate/mean": 0.25,
            "reward/pass_any/mean": 0.5,
            "reward/zero_variance/mean": 0.5,
            "reward/failed/mean": 0.0,
            "reward/score_chain_sum/mean": 0.5,
            "reward/score_products/mean": 0.0,
            "rollout/length/mean": 6.0,
            "rollout/length/max": 8,
            "rollout/length/min": 2,
            "rollout/prompt_length/mean": 1.0,
            "rollout/truncated/mean": 0.5,
            "rollout/aborted/mean": 0.0,
            "rollout/surprisal/mean": 0.5,
            "rollout/num_tokens/sum": 48,
            "rollout/num_completions/sum": 8,
            "rollout/version/min": 2,
            "rollout/version/max": 3,
            "rollout/mixed_versions/mean": 0.5,
        }
    )


def test_acceptance_is_a_metric_of_steps_with_drafts():
    group = make_group("chain_sum", [1.0, 0.0], [4, 8])
    plain = group_metrics([group])
    counts = ({"num_draft_tokens": 6, "num_accepted_tokens": 2}, {"num_draft_tokens": 2, "num_accepted_tokens": 2})
    drafted = [
        replace(r, branches=single_turn(group.prompt, replace(r.completions[0], **numbers)))
        for r, numbers in zip(group.rollouts, counts, strict=True)
    ]
    metrics = group_metrics([replace(group, rollouts=tuple(drafted))])
    assert metrics == plain | {"speculation/acceptance/mean": 0.5, "speculation/tokens_per_step/mean": 12 / 8}


def test_partial_rewards_are_no_pass_and_no_rollouts_no_metrics():
    metrics = group_metrics([make_group("a", [0.99, 1.0], [1, 1])])
    assert metrics["reward/pass_rate/mean"] == 0.5
    assert group_metrics([]) == {}


@pytest.mark.parametrize(
    ("parts", "reward", "rate"),
    [
        ({"right": 0.0, "form": 1.0}, 1.0, None),  # a sum of parts whose meaning is unknown
        ({"math": 1.0, "format": 1.0}, 0.8 + 0.2, 1.0),
        ({"math": 1.0, "format": 1.0}, 0.9999999999999999, 1.0),
        ({"math": 1.0, "format": 0.0}, 0.8, 1.0),  # right without the form
        ({"math": 0.0, "format": 1.0}, 1.5, 0.0),
        ({"number": 1.0}, 0.5, 1.0),  # weight 0.5
        ({"code": 0.9, "length": -0.1}, 0.8, 0.0),
        ({"model": 3.7}, 3.7, None),
        ({"length": 0.0}, 0.0, None),
        ({"mine": 1.0}, 1.0, 1.0),
        ({"right": 0.0, "form": 1.0, "is_right": 0.0}, 1.0, 0.0),
        ({"right": 1.0, "form": 0.0, "is_right": 1.0}, 1.0, 1.0),
        ({"is_right": 1.0}, 0.8 + 0.2, 1.0),
        ({"model": 3.7, "is_right": 1.0}, 3.7, 1.0),
        ({"math": 1.0, "is_right": 0.0}, 2.0, 0.0),  # both have to say so
        ({"number": 17.0, "style": 0.5}, 17.5, None),  # a count of numbers, by a user
        ({}, 1.0, 1.0),
        ({}, 0.5, 0.0),
    ],
)
def test_the_pass_rate_counts_right_answers_or_is_absent(parts, reward, rate):
    group = make_group("rows", [reward] * 4, [2] * 4)
    group = replace(group, rollouts=tuple(replace(rollout, reward_parts=parts) for rollout in group.rollouts))
    assert group_metrics([group]).get("reward/pass_rate/mean") == rate
    assert evaluation_metrics([group]).get("eval/pass_rate/mean") == rate
    assert ("eval/pass_at_2/mean" in evaluation_metrics([group])) == (rate is not None)
    summary = summarize([group], [1, 2])
    assert (summary["overall"]["accuracy"] or {}).get("value") == rate
    header, row = table(summary).splitlines()
    assert row.startswith("rows")
    assert (header.endswith("reward"), row.endswith(f"{reward:.3f}")) == (
        (True, True) if rate is None else (False,) * 2
    )
    assert ("eval reward" in " ".join(headline(evaluation_metrics([group])))) == (rate is None)


def test_without_any_score_there_is_no_pass_rate_and_a_lost_score_fails():
    lost = make_group("a", [0.0, 0.0], [1, 1], status="score_failed")
    assert not {"reward/pass_rate/mean", "reward/pass_any/mean"}.intersection(group_metrics([lost]))
    assert "eval/pass_rate/mean" not in evaluation_metrics([lost])
    assert summarize([lost], (1,))["overall"]["accuracy"] is None
    assert summarize([lost], (1,))["overall"]["not_scored"] == 1.0
    metrics = group_metrics([lost, make_group("a", [1.0, 1.0], [1, 1])])
    assert metrics["reward/pass_rate/mean"] == 0.5 and metrics["reward/failed/mean"] == 0.5
