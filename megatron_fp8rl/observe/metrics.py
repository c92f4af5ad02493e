"""Metric glossary: every key that a run may write, with its meaning.

Keys have the form ``what/name/reduce``; ``<name>`` in a key stands for any lower-case word. The observer rejects other
keys. ``python -m megatron_fp8rl.observe.metrics > docs/metrics.md`` generates the documentation page.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache

GLOSSARY: dict[str, dict[str, str]] = {
    "Reward": {
        "data/dropped/sum": "Prompts skipped since the run last started; data/dropped.jsonl lists them.",
        "reward/score/mean": "Mean reward of the step's completions.",
        "reward/score/std": "Standard deviation of the reward over the step's completions.",
        "reward/score/min": "Lowest reward in the step.",
        "reward/score/max": "Highest reward in the step.",
        "reward/score_<environment>/mean": "Mean reward of one environment's completions.",
        "reward/part_<name>/mean": "Mean of one reward part, before weighting.",
        "reward/pass_rate/mean": "Fraction of right completions; absent if no score says which are right.",
        "reward/pass_any/mean": "Fraction of prompts with at least one full-reward completion.",
        "reward/zero_variance/mean": "Fraction of groups with identical rewards, and so no learning signal.",
        "reward/failed/mean": "Fraction of completions whose scoring failed; their reward is 0.",
        "reward/dropped/mean": "Fraction of completions dropped before training.",
        "reward/advantage/mean": "Mean advantage over the step's loss tokens.",
        "reward/advantage/min": "Lowest advantage in the step.",
        "reward/advantage/max": "Highest advantage in the step.",
    },
    "Evaluation": {
        "eval/loss/mean": "Validation loss of `sft` and `dpo`: the training loss of the held-out rows.",
        "eval/reward_<name>/mean": "`loss/reward_<name>/mean` of `dpo` on the held-out pairs.",
        "eval/score/mean": "Mean reward on held-out problems.",
        "eval/pass_rate/mean": "Fraction of right held-out completions; absent like `reward/pass_rate/mean`.",
        "eval/pass_rate_low/mean": "Lower bound of the 95 % interval of `eval/pass_rate/mean` (Wilson score).",
        "eval/pass_rate_high/mean": "Upper bound of the 95 % interval of `eval/pass_rate/mean`.",
        "eval/pass_at_<k>_low/mean": "Lower bound of the 95 % interval of `eval/pass_at_<k>/mean` (bootstrap).",
        "eval/pass_at_<k>_high/mean": "Upper bound of the 95 % interval of `eval/pass_at_<k>/mean`.",
        "eval/pass_at_<k>/mean": "Unbiased pass@k on held-out problems; k > 1 needs observe.eval_completions > 1.",
        "eval/length/mean": "Mean completion length on held-out problems, in tokens.",
        "eval/num_prompts/sum": "Number of held-out problems evaluated.",
        "eval/num_completions/sum": "Number of completions sampled for held-out problems.",
    },
    "Warm start": {
        "sft/expected_pass_rate/mean": "Mean probability of sampling the reference answer of a held-out problem.",
    },
    "Rollouts": {
        "rollout/length/mean": "Mean number of sampled tokens per completion (sessions: summed over turns).",
        "rollout/length/max": "Most sampled tokens in one completion or session.",
        "rollout/length/min": "Fewest sampled tokens in one completion or session.",
        "rollout/prompt_length/mean": "Mean prompt length of a completion or session, in tokens.",
        "rollout/truncated/mean": "Fraction of completions truncated at max_completion_tokens.",
        "rollout/aborted/mean": "Fraction of completions that the engine aborted.",
        "rollout/surprisal/mean": "Mean of -rollout_logprobs, an estimate of the sampler's entropy, in nats.",
        "rollout/kept_entries/mean": "Vocabulary entries that top-k, top-p and min-p kept, per sampled token.",
        "rollout/num_tokens/sum": "Number of tokens sampled in the step.",
        "rollout/num_completions/sum": "Number of completions in the step.",
        "rollout/tokens_per_s/mean": "Sampled tokens per second of the span `generate`.",
        "rollout/version/min": "Oldest policy version that sampled a token of the step.",
        "rollout/version/max": "Newest policy version that sampled a token of the step.",
        "rollout/mixed_versions/mean": "Fraction of completions sampled by more than one policy version.",
        "rollout/replicas/min": "Minimum number of available replicas since the last weight update.",
        "rollout/replicas_lost/sum": "Replicas that died since the last weight update.",
        "rollout/replicas_joined/sum": "Replicas that restarted and got weights since the last weight update.",
        "rollout/num_retried/sum": "Prompts resubmitted to another replica because the first one died.",
        "rollout/prefill_saved/sum": "Prompt tokens of the step's requests that came from the prefix cache.",
        "rollout/prefill_saved/mean": "Fraction of the step's prompt tokens that came from the prefix cache.",
        "speculation/acceptance/mean": "Fraction of drafts that were accepted (engine.speculation).",
        "speculation/tokens_per_step/mean": "Sampled tokens of a sequence per engine step; 1 without drafts.",
        "speculation/draft_loss/mean": "Cross-entropy of the multi-token prediction layer at sampled tokens, nats.",
        "rollout/window_stale_tokens/mean": "Fraction of sampled tokens not trained because of max_staleness.",
        "rollout/window_complete/sum": "Complete groups that wait for training.",
        "rollout/window_length_bias/mean": "Mean length of trained completions / of complete ones, since the start.",
        "rollout/staleness/mean": "Mean age of completions at training time, in policy versions.",
        "rollout/staleness/max": "Maximum age of a completion at training time, in policy versions.",
    },
    "Sessions": {
        "session/turns/mean": "Mean number of policy turns per session.",
        "session/turns/max": "Most policy turns in one session.",
        "session/given_tokens/mean": "Mean context tokens per session (from tools, users and templates).",
        "session/forked/mean": "Fraction of sessions with branches because the template rewrote history.",
        "session/num_branches/sum": "Trajectories in the step; each branch of a session counts.",
        "session/<part>/s": "Mean seconds that a session spends in the model, in tools, or in a queue.",
    },
    "Mismatch between trainer and engine": {
        "mismatch/abs_logprob_diff/mean": "Mean of |old_logprobs - rollout_logprobs| over the loss tokens.",
        "mismatch/abs_logprob_diff_turn_<turn>/mean": "The same for one session turn (turns count from 1).",
        "mismatch/abs_logprob_diff_turn_<turn>/max": "Maximum for one session turn.",
        "mismatch/abs_logprob_diff/max": "Largest |old_logprobs - rollout_logprobs| of a token.",
        "mismatch/kl_k1/mean": "Mean of rollout - old, the k1 estimate of KL(rollout || old).",
        "mismatch/kl_k3/mean": "Mean of w - 1 - log w, w = exp(old - rollout): k3 estimate of KL(rollout || old).",
        "mismatch/multiplicative_error/mean": "Mean of exp|old - rollout|; 1 is perfect, investigate above 1.05.",
        "mismatch/effective_sample_size/mean": "(sum w)^2 / (n sum w^2): effective fraction of n tokens; 1 is perfect.",
        "mismatch/chi_square/mean": "Mean of w^2 - 1, the chi-square divergence; 0 is perfect.",
        "mismatch/ratio/mean": "Mean importance weight w; its expectation is 1 if engine logprobs are correct.",
        "mismatch/ratio/max": "Largest importance weight of a token.",
        "mismatch/ratio/min": "Smallest importance weight of a token.",
        "mismatch/fraction_corrected/mean": "Fraction of tokens whose importance weight was capped or masked.",
        "mismatch/fraction_vetoed/mean": "Fraction of tokens in vetoed (dropped) sequences.",
        "mismatch/not_compared/mean": "Fraction of tokens that older weights sampled: exact runs do not compare them.",
    },
    "Router": {
        "router/agreement/mean": "Fraction of tokens with equal experts at both ends, mean over layers.",
        "router/agreement/min": "Router agreement in the layer with the lowest value.",
        "router/agreement_layer_<index>/mean": "Router agreement in one layer, by layer index.",
    },
    "Loss": {
        "loss/kl_update/mean": "KL(old || trainer), k3 estimate: policy change in this step's updates.",
        "loss/kl_ref/mean": "KL(trainer || reference), k3 estimate, before its coefficient.",
        "loss/entropy/mean": "Mean entropy of the trainer's distribution over the vocabulary, in nats.",
        "loss/update_ratio/mean": "Mean of exp(trainer - old), the ratio that PPO clips.",
        "loss/update_ratio/max": "Largest exp(trainer - old) of a token.",
        "loss/clip_fraction_low/mean": "Fraction of tokens with zero gradient from the lower clip bound.",
        "loss/clip_fraction_high/mean": "Fraction of tokens with zero gradient from the upper clip bound.",
        "loss/clip_fraction_dual/mean": "Fraction of tokens bounded by the dual clip.",
        "loss/reward_accuracy/mean": "Fraction of pairs whose chosen answer has the higher implicit reward (`dpo`).",
        "loss/reward_chosen/mean": "Mean implicit reward of chosen answers: beta * (trainer - reference) (`dpo`).",
        "loss/reward_margin/mean": "Mean implicit reward of chosen minus rejected answers (`dpo`).",
        "loss/reward_rejected/mean": "Mean implicit reward of rejected answers (`dpo`).",
        "loss/nll/mean": "Negative log-likelihood per token of supervised training, in nats.",
        "loss/own_<name>/mean": "Mean over loss tokens of a user-defined loss metric.",
        "loss/own_<name>/max": "Maximum of a user-defined loss metric.",
        "correction/weight/mean": "Mean importance weight after correction, as used in the loss.",
        "correction/weight/max": "Largest importance weight after correction.",
        "correction/low/mean": "Lower bound of the importance weight (masks) with `algo.correction_quantile`.",
        "correction/high/mean": "Cap or upper bound of the importance weight with `algo.correction_quantile`.",
        "correction/fraction_corrected/mean": "Fraction of loss tokens whose weight was capped or masked.",
        "correction/fraction_vetoed/mean": "Fraction of loss tokens in vetoed sequences.",
    },
    "Training": {
        "train/loss/mean": "Loss, averaged over all loss tokens of all ranks.",
        "train/grad_norm/max": "Largest global gradient norm in the step, before clipping.",
        "train/lr/mean": "Learning rate.",
        "train/entropy/mean": "Mean entropy of the trainer's distribution over the vocabulary, in nats.",
        "train/num_tokens/sum": "Loss tokens in the step, over all ranks.",
        "train/num_sequences/sum": "Sequences with at least one loss token, over all ranks.",
        "train/num_microbatches/sum": "Microbatches per data-parallel rank.",
        "train/num_updates/sum": "Optimizer updates in the step.",
        "train/tokens_per_s/mean": "Loss tokens per second of the span `update`.",
    },
    "Weight updates": {
        "publish/total/s": "Seconds from the first export until the engines are ready to sample.",
        "publish/pause/s": "Seconds that engines were paused.",
        "publish/num_tensors/sum": "Number of tensors sent.",
        "publish/num_fp8_tensors/sum": "Number of tensors sent as FP8 with scales.",
        "publish/bytes/sum": "Bytes sent to one replica.",
        "publish/version/max": "Policy version in the engines after the update.",
        "publish/kv_amax_key/max": "Largest |key| after RoPE covered by the FP8 KV cache scales.",
        "publish/kv_amax_value/max": "Largest |value| covered by the FP8 KV cache scales.",
    },
    "GPU memory": {
        f"memory/{phase}_{kind}/max": f"{what} while {activity}, in bytes, maximum over the ranks."
        for phase, activity in (
            ("rollout", "the engines sample"),
            ("train", "the trainer trains"),
            ("publish", "weights are published"),
        )
        for kind, what in (
            ("allocated", "Peak memory allocated by the trainer"),
            ("reserved", "Peak memory reserved by the trainer's allocator"),
            ("device", "Memory of all processes at the end of the phase"),
        )
    },
    "Time": {
        "time/step/s": "Seconds of the whole step.",
        "time/rollouts/s": "Seconds that the training loop waited for scored rollouts.",
        "time/generate/s": "Seconds of sampling; concurrent with training if max_staleness > 0.",
        "time/score/s": "Seconds of scoring.",
        "time/pack/s": "Seconds of computing advantages and packing.",
        "time/old_logprobs/s": "Seconds of the forward pass that computes the trainer's log-probabilities.",
        "time/mismatch/s": "Seconds of measuring trainer-engine mismatch.",
        "time/update/s": "Seconds of forward, backward and optimizer.",
        "time/publish/s": "Seconds of publishing the weights.",
        "time/colocated/s": "Seconds of moving engine and trainer state in and out of GPU memory, with Adam meanwhile.",
        "time/calibrate_kv/s": "Seconds of calibrating the FP8 KV cache scales on the first prompts.",
        "time/checkpoint/s": "Seconds that training waited for checkpoint copies (writing runs in background).",
        "time/evaluate/s": "Seconds of evaluation on held-out problems.",
        "time/first_update/s": "Seconds from the command to the end of the first update, in its step.",
        "time/compile/s": "Seconds of compiling kernels, summed over all processes (`compiled.jsonl` lists them).",
        "time/start/s": "Seconds from the command to the first line of metrics; its parts follow.",
        "time/start_command/s": "Seconds of parsing the command and launching the trainer ranks.",
        "time/start_data/s": "Seconds of reading the data and testing the rewards.",
        "time/start_imports/s": "Seconds of importing torch and the trainer, while engines start.",
        "time/start_engines/s": "Seconds that the trainer waited for engines to start.",
        "time/start_reference/s": "Seconds of computing or reading the reference log-probabilities (`dpo`).",
        "time/start_model/s": "Seconds of building the policy and loading its weights.",
        "time/start_warm_up/s": "Seconds of compiling trainer kernels, while engines start.",
        "time/<span>/s": "Seconds of any other span, including nested spans.",
    },
}

# Spans of the start in the line of step 0, in order.
START_PHASES = (
    *("start_command", "start_data", "start_imports", "start_engines", "start_model", "start_warm_up"),
    *("calibrate_kv", "publish", "colocated", "evaluate"),
)
# Consecutive spans of a step, which never overlap: a plot may stack them up to time/step/s.
PHASES = ("rollouts", "pack", "old_logprobs", "mismatch", "update", "publish", "checkpoint", "evaluate", "colocated")

_KEY = re.compile(r"[a-z0-9_]+/[a-z0-9_]+/(?:mean|std|min|max|sum|s)")


class UnknownMetricError(ValueError):
    """A key that the glossary does not list."""


def meaning(key: str) -> str | None:
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
    lines = [
        "# Metrics",
        "",
        "Each step writes these to `metrics.jsonl` and TensorBoard. Keys are `what/name/reduce`; seconds end in `/s`.",
        "This page is generated: `python -m megatron_fp8rl.observe.metrics > docs/metrics.md`.",
    ]
    for section, metrics in GLOSSARY.items():
        lines += ["", f"## {section}", "", "| key | meaning |", "|---|---|"]
        lines += [f"| `{key}` | {text.replace('|', chr(92) + '|')} |" for key, text in metrics.items()]
    return "\n".join(lines) + "\n"


@cache
def _index() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """(meaning by key, patterns for keys with a placeholder)."""
    exact, patterns = {}, []
    for key, text in (entry for metrics in GLOSSARY.values() for entry in metrics.items()):
        plain = re.sub(r"<[a-z_]+>", "x", key)
        if not _KEY.fullmatch(plain) or key in exact:
            raise ValueError(f"glossary: {key!r} is listed twice or does not have the form what/name/reduce")
        if plain == key:
            exact[key] = text
        else:
            patterns.append((re.compile(re.sub(r"<[a-z_]+>", "[a-z0-9_]+", key)), text))
    return exact, patterns


if __name__ == "__main__":
    print(markdown(), end="")
