"""What the scored groups of one step say about reward, length and policy version. Pure.

In: the groups that the rollout stream hands to the loop. Out: metrics of ``reward/`` and ``rollout/``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from megatron_fp8rl.observe.metrics import key_part
from megatron_fp8rl.types import Rollout, RolloutGroup

FULL_REWARD = 1.0


def passes(rollout: Rollout) -> bool:
    """Whether the completion earned the full reward."""
    return rollout.reward >= FULL_REWARD


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Metrics over all completions of ``groups``; empty when there is none."""
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
