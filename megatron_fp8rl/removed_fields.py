"""Fields of earlier releases and their remedies, so that an old option fails with advice. Kept for one release."""

from collections.abc import Iterator

_CONSTANT = "It is a constant now: leave it out"
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
    "rollout.delta_weights": "gloo sends whole weights: leave it out; weight_sync.spare_weights hides the transfer",
    "rollout.partials": "Completions in progress always continue over publications: leave it out",
    **dict.fromkeys(
        """
        deadlines.start_s deadlines.request_s deadlines.update_s deadlines.hang_s
        rollout.start_deadline_s rollout.request_deadline_s rollout.update_deadline_s rollout.hang_deadline_s
        """.split(),
        "--engine.deadline_scale multiplies all waits for an engine: 3 allows 1800 s for its start",
    ),
    **dict.fromkeys(
        "engine.torch_compile rollout.torch_compile engine.enforce_eager rollout.enforce_eager".split(),
        "Set --engine.graphs: plain is CUDA graphs without torch.compile, none is eager execution",
    ),
    "session.rewritten_history": "A rewritten history always starts a branch: leave it out",
    **dict.fromkeys(["session.host", "session.port"], "Write --session.endpoint HOST:PORT"),
    "data.score_servers": "Trainer rank 0 scores all completions: leave it out, and raise scoring.num_workers",
}

_MOVED = """
precision.kernels: precision.kernels=trainer precision.linears precision.experts precision.attention
    engine.linear_backend=engine_linears engine.moe_backend=engine_experts engine.attention_backend=engine_attention
    rollout.linear_backend=engine_linears rollout.moe_backend=engine_experts rollout.attention_backend=engine_attention
engine: rollout.num_replicas rollout.tensor rollout.data rollout.expert rollout.placement rollout.max_replica_restarts
    rollout.sleep_level rollout.batch_invariant
    rollout.record_routed_experts rollout.kv_cache_dtype rollout.kv_cache_bytes rollout.gpu_memory_utilization
    rollout.max_num_sequences
sampling: rollout.prompts_per_step rollout.completions_per_prompt rollout.max_prompt_tokens
    rollout.max_completion_tokens rollout.temperature rollout.top_p rollout.top_k rollout.stop_token_ids
    rollout.stop_strings rollout.max_staleness rollout.window_groups rollout.replay
weight_sync: rollout.transport rollout.bucket_bytes rollout.spare_weights observe.verify_every
optim: rollout.max_tokens_per_microbatch
scoring: data.num_score_workers=num_workers data.score_deadline_s=deadline_s data.score_memory_gib=memory_gib
    data.score_variables=variables
warm_start: data.sft_steps=steps data.sft_batch_size=batch_size data.sft_lr=lr data.sft_wrong_answers=wrong_answers
    data.sft_stop_pass_rate=stop_pass_rate
"""


def _renamed() -> Iterator[tuple[str, str]]:
    section = ""
    for word in _MOVED.split():
        if word.endswith(":"):
            section = word[:-1]
            continue
        old, _, name = word.partition("=")
        yield old, f"{section}.{name or old.rpartition('.')[2]}"


RENAMED = dict(_renamed())


def remedy(path: str) -> str | None:
    """What to write instead of a removed field; None if ``path`` is not one."""
    if path in RENAMED:
        return f"It is --{RENAMED[path]} now"
    return REMOVED.get(path)
