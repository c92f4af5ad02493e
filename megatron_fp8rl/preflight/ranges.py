"""The interval of every number in a configuration, as a table.

The bounds are constants. Bounds that depend on other fields stand in ``rules.py``, ``shapes.py`` and
``engine_rules.py``. A number that is not set (None) has no interval.
"""

from __future__ import annotations

import math

RANGES = {
    "[0, inf)": """
        num_steps seed
        model.num_experts model.ffn_hidden_size
        precision.bf16_first_layers precision.bf16_last_layers
        optim.warmup_steps optim.min_lr optim.weight_decay optim.moe_aux_loss_coef
        rollout.top_k rollout.max_staleness rollout.max_replica_restarts
        algo.kl_coef algo.entropy_coef algo.overlong_buffer_tokens algo.correction_low
        data.sft_steps data.score_servers
        checkpoint.every_steps observe.verify_every observe.eval_every observe.eval_prompts
    """,
    "[1, inf)": """
        model.num_layers model.hidden_size model.num_attention_heads model.num_key_value_heads model.head_dim
        model.vocab_size model.max_position_embeddings model.router.num_groups model.router.groups_per_token
        parallel.world_size parallel.tensor parallel.pipeline parallel.virtual_stages parallel.context parallel.expert
        parallel.expert_tensor
        precision.amax_history_len optim.logprob_chunk_tokens
        rollout.num_replicas rollout.tensor rollout.expert rollout.prompts_per_step rollout.completions_per_prompt
        rollout.max_prompt_tokens rollout.max_completion_tokens rollout.max_num_sequences rollout.bucket_bytes
        rollout.max_tokens_per_microbatch
        algo.updates_per_step data.num_score_workers data.sft_batch_size checkpoint.keep observe.eval_completions
    """,
    "(0, inf)": """
        model.norm_eps model.rope_theta
        optim.lr optim.eps optim.clip_grad_norm
        rollout.temperature rollout.start_deadline_s rollout.request_deadline_s rollout.update_deadline_s
        algo.clip_high algo.alarm_abs_logprob_diff algo.alarm_kl_k3 data.score_deadline_s data.sft_lr
    """,
    "[0, 1)": "optim.beta1 optim.beta2",
    "[0, 1]": "data.sft_wrong_answers",
    "(0, 1]": """
        model.rotary_fraction rollout.top_p rollout.gpu_memory_utilization algo.clip_low data.sft_stop_pass_rate
    """,
    "(0, 1)": "algo.veto_below",
}
INTERVALS = {path: interval for interval, paths in RANGES.items() for path in paths.split()}


def problem(value: float | None, interval: str) -> tuple[str, str] | None:
    """(problem, remedy) of a number outside ``interval``, written as in mathematics; None inside. NaN is outside."""
    low, high = map(float, interval[1:-1].split(","))
    if value is None:
        return None
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if above and below:
        return None
    if math.isfinite(high):
        return f"is outside {interval}", f"Choose a value in {interval}"
    if interval[0] == "[":
        return f"is below {low:g}", f"Set it to {low:g} or more"
    return f"is not above {low:g}", "Set a positive number"
