"""Metric glossary: every key that a run may write, with its meaning.

Keys have the form ``what/name/reduce``; ``<name>`` in a key stands for any lower-case word. The observer rejects keys
that are not listed. ``python -m megatron_fp8rl.observe.metrics > docs/metrics.md`` generates the documentation page.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """One key and its meaning."""

    key: str
    meaning: str


GLOSSARY: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric("data/dropped/sum", "Prompts skipped since the run last started; data/dropped.jsonl lists them."),
        Metric("reward/score/mean", "Mean reward of the step's completions."),
        Metric("reward/score/std", "Standard deviation of the reward over the step's completions."),
        Metric("reward/score/min", "Lowest reward in the step."),
        Metric("reward/score/max", "Highest reward in the step."),
        Metric("reward/score_<environment>/mean", "Mean reward of one environment's completions."),
        Metric("reward/part_<name>/mean", "Mean of one reward part, before weighting."),
        Metric("reward/pass_rate/mean", "Fraction of completions with full reward (1)."),
        Metric("reward/pass_any/mean", "Fraction of prompts with at least one full-reward completion."),
        Metric("reward/zero_variance/mean", "Fraction of groups with identical rewards, and so no learning signal."),
        Metric("reward/failed/mean", "Fraction of completions whose scoring failed; their reward is 0."),
        Metric("reward/dropped/mean", "Fraction of completions dropped before training."),
        Metric("reward/advantage/mean", "Mean advantage over the step's loss tokens."),
        Metric("reward/advantage/min", "Lowest advantage in the step."),
        Metric("reward/advantage/max", "Highest advantage in the step."),
    ),
    "Evaluation": (
        Metric("eval/score/mean", "Mean reward on held-out problems."),
        Metric("eval/pass_rate/mean", "Fraction of held-out completions with full reward (1)."),
        Metric("eval/pass_rate_low/mean", "Lower bound of the 95 % interval of `eval/pass_rate/mean` (Wilson score)."),
        Metric("eval/pass_rate_high/mean", "Upper bound of the 95 % interval of `eval/pass_rate/mean`."),
        Metric("eval/pass_at_<k>_low/mean", "Lower bound of the 95 % interval of `eval/pass_at_<k>/mean` (bootstrap)."),
        Metric("eval/pass_at_<k>_high/mean", "Upper bound of the 95 % interval of `eval/pass_at_<k>/mean`."),
        Metric(
            "eval/pass_at_<k>/mean",
            "Unbiased estimate of pass@k on held-out problems: at least one of k completions gets full reward; "
            "k > 1 requires observe.eval_completions > 1.",
        ),
        Metric("eval/length/mean", "Mean completion length on held-out problems, in tokens."),
        Metric("eval/num_prompts/sum", "Number of held-out problems evaluated."),
        Metric("eval/num_completions/sum", "Number of completions sampled for held-out problems."),
    ),
    "Warm start": (
        Metric(
            "sft/expected_pass_rate/mean",
            "Probability that a sampled completion is the reference answer, averaged over held-out problems.",
        ),
    ),
    "Rollouts": (
        Metric("rollout/length/mean", "Mean number of sampled tokens per completion (sessions: summed over turns)."),
        Metric("rollout/length/max", "Most sampled tokens in one completion or session."),
        Metric("rollout/length/min", "Fewest sampled tokens in one completion or session."),
        Metric("rollout/prompt_length/mean", "Mean prompt length of a completion or session, in tokens."),
        Metric("rollout/truncated/mean", "Fraction of completions truncated at max_completion_tokens."),
        Metric("rollout/aborted/mean", "Fraction of completions that the engine aborted."),
        Metric("rollout/surprisal/mean", "Mean of -rollout_logprobs, an estimate of the sampler's entropy, in nats."),
        Metric("rollout/num_tokens/sum", "Number of tokens sampled in the step."),
        Metric("rollout/num_completions/sum", "Number of completions in the step."),
        Metric("rollout/tokens_per_s/mean", "Sampled tokens per second of the span `generate`."),
        Metric("rollout/version/min", "Oldest policy version that sampled a token of the step."),
        Metric("rollout/version/max", "Newest policy version that sampled a token of the step."),
        Metric("rollout/mixed_versions/mean", "Fraction of completions sampled by more than one policy version."),
        Metric("rollout/replicas/min", "Minimum number of available replicas since the last weight update."),
        Metric("rollout/replicas_lost/sum", "Replicas that died since the last weight update."),
        Metric("rollout/replicas_joined/sum", "Replicas that restarted and got weights since the last weight update."),
        Metric("rollout/num_retried/sum", "Prompts resubmitted to another replica because the first one died."),
        Metric("rollout/prefill_saved/sum", "Prompt tokens of the step's requests that came from the prefix cache."),
        Metric("rollout/prefill_saved/mean", "Fraction of the step's prompt tokens that came from the prefix cache."),
        Metric(
            "rollout/window_stale_tokens/mean",
            "Fraction of the step's sampled tokens that were not trained because they exceeded max_staleness.",
        ),
        Metric("rollout/window_complete/sum", "Complete groups that wait for training."),
        Metric(
            "rollout/window_length_bias/mean",
            "Mean completion length of trained groups divided by that of all complete groups since the start; "
            "below 1, training favors short completions.",
        ),
        Metric("rollout/staleness/mean", "Mean age of completions at training time, in policy versions."),
        Metric("rollout/staleness/max", "Maximum age of a completion at training time, in policy versions."),
    ),
    "Sessions": (
        Metric("session/turns/mean", "Mean number of policy turns per session."),
        Metric("session/turns/max", "Most policy turns in one session."),
        Metric("session/given_tokens/mean", "Mean context tokens per session (from tools, users and templates)."),
        Metric("session/forked/mean", "Fraction of sessions with branches because the template rewrote history."),
        Metric("session/num_branches/sum", "Trajectories in the step; each branch of a session counts."),
        Metric("session/<part>/s", "Mean seconds that a session spends in the model, in tools, or in a queue."),
    ),
    "Mismatch between trainer and engine": (
        Metric(
            "mismatch/abs_logprob_diff/mean",
            "Mean of |old_logprobs - rollout_logprobs| over the loss tokens (trainer-engine mismatch).",
        ),
        Metric("mismatch/abs_logprob_diff_turn_<turn>/mean", "The same for one session turn (turns count from 1)."),
        Metric("mismatch/abs_logprob_diff_turn_<turn>/max", "Maximum for one session turn."),
        Metric("mismatch/abs_logprob_diff/max", "Largest |old_logprobs - rollout_logprobs| of a token."),
        Metric("mismatch/kl_k1/mean", "Mean of rollout - old, the k1 estimate of KL(rollout || old)."),
        Metric(
            "mismatch/kl_k3/mean",
            "Mean of w - 1 - log w with w = exp(old - rollout), the low-variance estimate of KL(rollout || old).",
        ),
        Metric(
            "mismatch/multiplicative_error/mean", "Mean of exp|old - rollout|; 1 is perfect, investigate above 1.05."
        ),
        Metric(
            "mismatch/effective_sample_size/mean",
            "(sum w)^2 / (n sum w^2), the effective fraction of n importance-weighted tokens; 1 is perfect.",
        ),
        Metric("mismatch/chi_square/mean", "Mean of w^2 - 1, the chi-square divergence; 0 is perfect."),
        Metric("mismatch/ratio/mean", "Mean importance weight w; its expectation is 1 if engine logprobs are correct."),
        Metric("mismatch/ratio/max", "Largest importance weight of a token."),
        Metric("mismatch/ratio/min", "Smallest importance weight of a token."),
        Metric("mismatch/fraction_corrected/mean", "Fraction of tokens whose importance weight was capped or masked."),
        Metric("mismatch/fraction_vetoed/mean", "Fraction of tokens in vetoed (dropped) sequences."),
    ),
    "Router": (
        Metric(
            "router/agreement/mean",
            "Fraction of tokens for which trainer router (before replay) and engine choose the same experts, "
            "averaged over layers; requires engine.record_routed_experts.",
        ),
        Metric("router/agreement/min", "Router agreement in the layer with the lowest value."),
        Metric("router/agreement_layer_<index>/mean", "Router agreement in one layer, by layer index."),
    ),
    "Loss": (
        Metric("loss/kl_update/mean", "KL(old || trainer), k3 estimate: policy change in this step's updates."),
        Metric("loss/kl_ref/mean", "KL(trainer || reference), k3 estimate, before its coefficient."),
        Metric("loss/entropy/mean", "Mean entropy of the trainer's distribution over the vocabulary, in nats."),
        Metric("loss/update_ratio/mean", "Mean of exp(trainer - old), the ratio that PPO clips."),
        Metric("loss/update_ratio/max", "Largest exp(trainer - old) of a token."),
        Metric("loss/clip_fraction_low/mean", "Fraction of tokens with zero gradient from the lower clip bound."),
        Metric("loss/clip_fraction_high/mean", "Fraction of tokens with zero gradient from the upper clip bound."),
        Metric("loss/clip_fraction_dual/mean", "Fraction of tokens bounded by the dual clip."),
        Metric("loss/nll/mean", "Negative log-likelihood per token of the supervised warm start, in nats."),
        Metric("loss/own_<name>/mean", "Mean over loss tokens of a user-defined loss metric."),
        Metric("loss/own_<name>/max", "Maximum of a user-defined loss metric."),
        Metric("correction/weight/mean", "Mean importance weight after correction, as used in the loss."),
        Metric("correction/weight/max", "Largest importance weight after correction."),
        Metric("correction/fraction_corrected/mean", "Fraction of loss tokens whose weight was capped or masked."),
        Metric("correction/fraction_vetoed/mean", "Fraction of loss tokens in vetoed sequences."),
    ),
    "Training": (
        Metric("train/loss/mean", "Loss, averaged over all loss tokens of all ranks."),
        Metric("train/grad_norm/max", "Largest global gradient norm in the step, before clipping."),
        Metric("train/lr/mean", "Learning rate."),
        Metric("train/entropy/mean", "Mean entropy of the trainer's distribution over the vocabulary, in nats."),
        Metric("train/num_tokens/sum", "Loss tokens in the step, over all ranks."),
        Metric("train/num_sequences/sum", "Sequences with at least one loss token, over all ranks."),
        Metric("train/num_microbatches/sum", "Microbatches per data-parallel rank."),
        Metric("train/num_updates/sum", "Optimizer updates in the step."),
        Metric("train/tokens_per_s/mean", "Loss tokens per second of the span `update`."),
    ),
    "Weight updates": (
        Metric("publish/total/s", "Seconds from the first export until the engines are ready to sample."),
        Metric("publish/pause/s", "Seconds that engines were paused."),
        Metric("publish/num_tensors/sum", "Number of tensors sent."),
        Metric("publish/num_fp8_tensors/sum", "Number of tensors sent as FP8 with scales."),
        Metric("publish/bytes/sum", "Bytes sent to one replica."),
        Metric("publish/version/max", "Policy version in the engines after the update."),
        Metric("publish/kv_amax_key/max", "Largest |key| after RoPE covered by the FP8 KV cache scales."),
        Metric("publish/kv_amax_value/max", "Largest |value| covered by the FP8 KV cache scales."),
    ),
    "GPU memory": (
        *(
            Metric(f"memory/{phase}_{kind}/max", f"{what} while {doing}, in bytes, maximum over the ranks.")
            for phase, doing in (
                ("rollout", "the engines sample"),
                ("train", "the trainer trains"),
                ("publish", "weights are published"),
            )
            for kind, what in (
                ("allocated", "Peak memory allocated by the trainer"),
                ("reserved", "Peak memory reserved by the trainer's allocator"),
                ("device", "Memory of all processes at the end of the phase"),
            )
        ),
    ),
    "Time": (
        Metric("time/step/s", "Seconds of the whole step."),
        Metric("time/rollouts/s", "Seconds that the training loop waited for scored rollouts."),
        Metric("time/generate/s", "Seconds of sampling; concurrent with training if max_staleness > 0."),
        Metric("time/score/s", "Seconds of scoring."),
        Metric("time/pack/s", "Seconds of computing advantages and packing."),
        Metric("time/old_logprobs/s", "Seconds of the forward pass that computes the trainer's log-probabilities."),
        Metric("time/mismatch/s", "Seconds of measuring trainer-engine mismatch."),
        Metric("time/update/s", "Seconds of forward, backward and optimizer."),
        Metric("time/publish/s", "Seconds of publishing the weights."),
        Metric("time/colocated/s", "Seconds of moving engine and trainer state in and out of GPU memory."),
        Metric("time/calibrate_kv/s", "Seconds of calibrating the FP8 KV cache scales on the first prompts."),
        Metric("time/checkpoint/s", "Seconds that training waited for checkpoint copies (writing runs in background)."),
        Metric("time/evaluate/s", "Seconds of evaluation on held-out problems."),
        Metric("time/start/s", "Seconds from the command to the first line of metrics; its parts follow."),
        Metric("time/start_command/s", "Seconds of parsing the command and launching the trainer ranks."),
        Metric("time/start_data/s", "Seconds of reading the data and testing the rewards."),
        Metric("time/start_imports/s", "Seconds of importing the trainer, while engines start."),
        Metric("time/start_engines/s", "Seconds that the trainer waited for engines to start."),
        Metric("time/start_model/s", "Seconds of building the policy and loading its weights."),
        Metric("time/start_warm_up/s", "Seconds of compiling trainer kernels, while engines start."),
        Metric("time/<span>/s", "Seconds of any other span, including nested spans."),
    ),
}

# Consecutive spans of the loop, in order; they never overlap, so a plot may stack them up to time/step/s.
START_PHASES = (
    "start_command",
    "start_data",
    "start_imports",
    "start_engines",
    "start_model",
    "start_warm_up",
    "calibrate_kv",
    "publish",
    "colocated",
    "evaluate",
)  # of the line of step 0, in order
PHASES = ("rollouts", "pack", "old_logprobs", "mismatch", "update", "publish", "checkpoint", "evaluate", "colocated")

_KEY = re.compile(r"[a-z0-9_]+/[a-z0-9_]+/(?:mean|std|min|max|sum|s)")


class UnknownMetricError(ValueError):
    """A key that the glossary does not list."""


def meaning(key: str) -> str | None:
    """The meaning of a key; None if the key is not listed."""
    exact, patterns = _index()
    if key in exact:
        return exact[key]
    return next((text for pattern, text in patterns if pattern.fullmatch(key)), None)


def check_keys(keys: Iterable[str]) -> None:
    """Raise UnknownMetricError for a key that the glossary does not list, with near matches."""
    for key in keys:
        if meaning(key) is None:
            near = difflib.get_close_matches(key, _index()[0], n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UnknownMetricError(f"metric {key!r} is not in the glossary.{hint} Add it to observe/metrics.py")


def key_part(name: str) -> str:
    """Convert a name, such as an environment's, to the characters allowed in a key."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "unnamed"


def markdown() -> str:
    """The content of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Each step writes these to `metrics.jsonl` and TensorBoard. Keys are `what/name/reduce`; seconds end in `/s`.",
        "This page is generated: `python -m megatron_fp8rl.observe.metrics > docs/metrics.md`.",
    ]
    for section, metrics in GLOSSARY.items():
        lines += ["", f"## {section}", "", "| key | meaning |", "|---|---|"]
        lines += [f"| `{metric.key}` | {metric.meaning.replace('|', chr(92) + '|')} |" for metric in metrics]
    return "\n".join(lines) + "\n"


@cache
def _index() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """(meaning by key, patterns for keys with a placeholder)."""
    exact, patterns = {}, []
    for metric in (metric for metrics in GLOSSARY.values() for metric in metrics):
        plain = re.sub(r"<[a-z_]+>", "x", metric.key)
        if not _KEY.fullmatch(plain) or metric.key in exact:
            raise ValueError(f"glossary: {metric.key!r} is listed twice or does not have the form what/name/reduce")
        if plain == metric.key:
            exact[metric.key] = metric.meaning
        else:
            patterns.append((re.compile(re.sub(r"<[a-z_]+>", "[a-z0-9_]+", metric.key)), metric.meaning))
    return exact, patterns


if __name__ == "__main__":
    print(markdown(), end="")
