"""Fields of earlier releases and their remedies, so that an old option fails with advice. Kept for one release."""

import re

_CONSTANT = "It is a constant now: leave it out"
_DICTIONARY = re.compile(r"(algo\.(loss|advantage)_options|data\.environments\.\d+\.options)\.\w+")
REMOVED = {
    "precision.amax_history_len": f"{_CONSTANT} (precision/recipes.py, AMAX_HISTORY_LEN)",
    "precision.amax_algorithm": "Delayed scaling always takes the largest amax of its history: leave it out",
    "precision.expert_wgrad": "Weight gradients of experts are always FP8 under deep_gemm: leave it out",
    "precision.round_kv": "The trainer always rounds keys and values as an FP8 cache does: leave it out",
    "algo.alarm_abs_logprob_diff": f"{_CONSTANT} (algo/mismatch.py); --algo.alarm_action decides what an alarm does",
    "algo.alarm_kl_k3": f"{_CONSTANT} (algo/mismatch.py); --algo.alarm_action decides what an alarm does",
    "observe.tensorboard": "TensorBoard files are always written: leave it out",
    "observe.record_rollouts": "Set --observe.rollouts_gib 0 to record no rollouts",
    "rollout.token_stores": "Trainer rank 0 keeps the tokens of all samples: leave it out",
    "rollout.delta_weights": "gloo sends whole weights: leave it out; rollout.spare_weights hides the transfer",
    "data.score_servers": "Trainer rank 0 scores all completions: leave it out, and raise data.num_score_workers",
}


def remedy(path: str) -> str | None:
    """What to write instead of a removed field; None if ``path`` is not one."""
    if _DICTIONARY.fullmatch(path):
        return f"Write --set {path}=VALUE"
    return REMOVED.get(path)
