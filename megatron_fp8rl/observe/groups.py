"""Metrics of one step's scored groups: reward, length and policy version. Pure.

In: the groups that the rollout stream returns. Out: ``reward/`` and ``rollout/`` metrics, and ``eval/`` metrics.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from megatron_fp8rl.algo.pass_at_k import Estimate, accuracy, pass_at_ks, powers_of_two
from megatron_fp8rl.observe.metrics import key_part
from megatron_fp8rl.types import Rollout, RolloutGroup

FULL_REWARD = 1.0


def passes(rollout: Rollout) -> bool:
    """Whether the completion got the full reward."""
    return rollout.reward >= FULL_REWARD


def pass_counts(groups: Sequence[RolloutGroup]) -> list[tuple[int, int]]:
    """(completions, passed completions) of every problem."""
    return [(len(group.rollouts), sum(map(passes, group.rollouts))) for group in groups]


def evaluation_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """``eval/`` metrics over held-out problems with equally many completions each; empty if there are none."""
    counted = group_metrics(groups)
    if not counted:
        return {}
    counts = pass_counts(groups)
    ks = [k for k in powers_of_two(min(sampled for sampled, _ in counts)) if k > 1]
    estimates: dict[str, Estimate] = {"pass_rate": accuracy(counts)}
    if ks:
        estimates |= {f"pass_at_{k}": estimate for k, estimate in pass_at_ks(counts, ks).items()}
    intervals = {
        f"eval/{name}{end}/mean": value
        for name, estimate in estimates.items()
        for end, value in (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high))
    }
    return {
        "eval/score/mean": counted["reward/score/mean"],
        **intervals,
        "eval/length/mean": counted["rollout/length/mean"],
        "eval/num_prompts/sum": len(groups),
        "eval/num_completions/sum": counted["rollout/num_completions/sum"],
    }


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics over all completions of ``groups``; empty if there are none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    completions = [rollout.completion for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [len(completion.token_ids) for completion in completions]
    num_tokens = sum(lengths)
    surprisal = -sum(sum(completion.rollout_logprobs) for completion in completions)

    by_environment: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        by_environment[rollout.prompt.environment].append(rollout.reward)
    by_part: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            by_part[name].append(value)
    filled = [group for group in groups if group.rollouts]
    return {
        "reward/score/mean": statistics.fmean(rewards),
        "reward/score/std": statistics.pstdev(rewards),
        "reward/score/min": min(rewards),
        "reward/score/max": max(rewards),
        "reward/pass_rate/mean": statistics.fmean(map(passes, rollouts)),
        "reward/pass_any/mean": statistics.fmean(any(map(passes, group.rollouts)) for group in filled),
        "reward/zero_variance/mean": statistics.fmean(len({r.reward for r in g.rollouts}) == 1 for g in filled),
        "reward/failed/mean": statistics.fmean(rollout.status == "score_failed" for rollout in rollouts),
        **{
            f"reward/score_{key_part(environment)}/mean": statistics.fmean(values)
            for environment, values in sorted(by_environment.items())
        },
        **{f"reward/part_{key_part(name)}/mean": statistics.fmean(values) for name, values in sorted(by_part.items())},
        "rollout/length/mean": num_tokens / len(lengths),
        "rollout/length/max": max(lengths),
        "rollout/length/min": min(lengths),
        "rollout/truncated/mean": statistics.fmean(c.finish_reason == "length" for c in completions),
        "rollout/aborted/mean": statistics.fmean(c.finish_reason == "abort" for c in completions),
        "rollout/surprisal/mean": surprisal / max(1, num_tokens),
        "rollout/num_tokens/sum": num_tokens,
        "rollout/num_completions/sum": len(rollouts),
        "rollout/version/min": min(completion.min_version for completion in completions),
        "rollout/version/max": max(completion.max_version for completion in completions),
        "rollout/mixed_versions/mean": statistics.fmean(c.min_version != c.max_version for c in completions),
    }
