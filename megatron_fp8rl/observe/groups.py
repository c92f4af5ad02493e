"""Metrics of one step's scored groups: reward, length and policy version. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_fp8rl.algo.pass_at_k import Estimate, accuracy, pass_at_ks, powers_of_two
from megatron_fp8rl.observe.metrics import key_part
from megatron_fp8rl.types import IS_RIGHT, Completion, Rollout, RolloutGroup

FULL_REWARD = 1.0
ACCEPTANCE = "speculation/acceptance/mean"
_COMPARING = ("exact", "number", "choice", "math", "code")
_WITHOUT_MEANING = frozenset(("length", "model"))


def passes(rollout: Rollout) -> bool | None:
    """Whether the answer is right; None if the reward does not say so.

    If rewards compare answers, test programs or return the part "is_right", all of these parts must be 1, whatever
    their weights. Otherwise the reward must be 1. A sum of several other parts, a length penalty and a reward model's
    score say nothing.
    """
    parts = rollout.reward_parts
    compared = [value for name, value in parts.items() if name in _COMPARING or name == IS_RIGHT]
    if compared:
        if not 0 <= min(compared) <= max(compared) <= FULL_REWARD:
            return None  # a user's part with the name of a built-in reward
        return min(compared) >= FULL_REWARD
    if len(parts) > 1 or not _WITHOUT_MEANING.isdisjoint(parts):
        return None
    return rollout.reward >= FULL_REWARD


def has_pass_rate(groups: Sequence[RolloutGroup]) -> bool:
    """Whether each completion passes or does not. Completions without a score fail, unless none has a score."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if rollout.status != "score_failed"]
    return bool(scored or not rollouts) and all(passes(rollout) is not None for rollout in scored)


def pass_counts(groups: Sequence[RolloutGroup]) -> list[tuple[int, int]]:
    """(completions, passed completions) of every problem."""
    return [(len(group.rollouts), sum(map(bool, map(passes, group.rollouts)))) for group in groups]


def evaluation_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """``eval/`` metrics over held-out problems with equally many completions each; empty if there are none."""
    counted = group_metrics(groups)
    if not counted:
        return {}
    counts = pass_counts(groups)
    ks = [k for k in powers_of_two(min(sampled for sampled, _ in counts)) if k > 1]
    has_rate = has_pass_rate(groups)
    estimates: dict[str, Estimate] = {"pass_rate": accuracy(counts)} if has_rate else {}
    if ks and has_rate:
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
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    by_rollout = [rollout.completions for rollout in rollouts]
    ends = [rollout.finish_reason for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [sum(len(completion.token_ids) for completion in completions) for completions in by_rollout]
    num_tokens = sum(lengths)
    surprisal = -sum(c.rollout_logprobs.sum() for completions in by_rollout for c in completions)

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
        **_pass_metrics(filled),
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
        "rollout/prompt_length/mean": statistics.fmean(len(rollout.prompt.token_ids) for rollout in rollouts),
        "rollout/truncated/mean": statistics.fmean(
            end == "length" or r.status == "truncated" for r, end in zip(rollouts, ends, strict=True)
        ),
        "rollout/aborted/mean": statistics.fmean(end == "abort" for end in ends),
        "rollout/surprisal/mean": surprisal / max(1, num_tokens),
        "rollout/num_tokens/sum": num_tokens,
        "rollout/num_completions/sum": len(rollouts),
        **_kept_metrics(by_rollout),
        **_draft_metrics(by_rollout),
        **_version_metrics(by_rollout),
        **_session_metrics(rollouts, by_rollout),
    }


def _pass_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The pass rates; empty if the reward does not say which completions pass."""
    if not has_pass_rate(groups):
        return {}
    passed = [[bool(passes(rollout)) for rollout in group.rollouts] for group in groups]
    return {
        "reward/pass_rate/mean": statistics.fmean(value for values in passed for value in values),
        "reward/pass_any/mean": statistics.fmean(map(any, passed)),
    }


def _kept_metrics(by_rollout: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Vocabulary entries that top-k, top-p and min-p kept; empty if nothing was truncated."""
    kept = [c.kept.counts() for completions in by_rollout for c in completions if c.kept is not None]
    num_tokens = sum(map(len, kept))
    return {"rollout/kept_entries/mean": sum(int(c.sum()) for c in kept) / num_tokens} if num_tokens else {}


def _draft_metrics(by_rollout: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Acceptance of drafts; empty if the engines verified none."""
    completions = [completion for rollout in by_rollout for completion in rollout]
    num_drafts = sum(completion.num_draft_tokens for completion in completions)
    num_accepted = sum(completion.num_accepted_tokens for completion in completions)
    if not num_drafts:
        return {}
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        ACCEPTANCE: num_accepted / num_drafts,
        "speculation/tokens_per_step/mean": num_tokens / max(1, num_tokens - num_accepted),
    }


def _version_metrics(by_rollout: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Which policy versions sampled; empty if nothing was sampled."""
    spans = [[(c.min_version, c.max_version) for c in completions] for completions in by_rollout]
    ranges = [(min(low for low, _ in span), max(high for _, high in span)) for span in spans if span]
    if not ranges:
        return {}
    return {
        "rollout/version/min": min(low for low, _ in ranges),
        "rollout/version/max": max(high for _, high in ranges),
        "rollout/mixed_versions/mean": statistics.fmean(low != high for low, high in ranges),
    }


def _session_metrics(rollouts: Sequence[Rollout], by_rollout: Sequence[Sequence[Completion]]) -> dict[str, float]:
    """Metrics of the prefix cache and, if there are sessions, of turns and branches."""
    completions = [completion for rollout in by_rollout for completion in rollout]
    turns = list(map(len, by_rollout))
    num_read = sum(completion.num_prompt_tokens for completion in completions)
    metrics: dict[str, float] = {}
    if num_read:
        num_cached = sum(completion.num_cached_tokens for completion in completions)
        metrics |= {"rollout/prefill_saved/sum": num_cached, "rollout/prefill_saved/mean": num_cached / num_read}
    if max(turns) < 2 and not any(rollout.seconds for rollout in rollouts):
        return metrics
    context = [
        len(segment.token_ids)
        for rollout in rollouts
        for branch in rollout.branches[:1]
        for segment in branch.segments[1:]
        if not isinstance(segment, Completion)
    ]
    for name in sorted({name for rollout in rollouts for name in rollout.seconds}):
        spent = [rollout.seconds.get(name, 0.0) for rollout in rollouts]
        metrics |= {f"session/{key_part(name)}/s": statistics.fmean(spent)}
    return metrics | {
        "session/turns/mean": statistics.fmean(turns),
        "session/turns/max": max(turns),
        "session/given_tokens/mean": sum(context) / len(rollouts),
        "session/forked/mean": statistics.fmean(len(rollout.branches) > 1 for rollout in rollouts),
        "session/num_branches/sum": sum(len(rollout.branches) for rollout in rollouts),
    }


def pass_rates(problems: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Pass rate by id of problems, which are rows of ``problems.jsonl``; empty where passing has no meaning."""
    rows = sorted(problems, key=lambda row: row["prompt_id"])
    return {
        row["prompt_id"]: row["num_passed"] / row["num_completions"] for row in rows if row["num_passed"] is not None
    }
