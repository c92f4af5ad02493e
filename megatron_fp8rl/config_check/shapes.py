"""Whether the architecture is consistent and the degrees of parallelism divide what they split. Pure."""

from __future__ import annotations

import math

from megatron_fp8rl.config_check.findings import Findings
from megatron_fp8rl.weights.names import to_hf_config

_MOE_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")


def check_model(found: Findings) -> bool:
    """Whether the architecture is consistent in itself."""
    model, before = found.cfg.model, len(found.violations)
    sizes = ["num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
    found.at_least(1, *(f"model.{name}" for name in (*sizes, "max_position_embeddings")))
    found.at_least(0, "model.num_experts", "model.ffn_hidden_size")
    found.positive("model.norm_eps", "model.rope_theta")
    if len(found.violations) > before:
        return False
    found.divides("model.num_key_value_heads", model.num_attention_heads, "attention heads")
    if model.head_dim % 2:
        found.refuse("model.head_dim", "is odd, and rotary embedding turns pairs", "Choose an even number")
    if model.family in _MOE_FAMILIES and not model.is_moe:
        found.refuse("model.num_experts", "leaves a mixture-of-experts family without experts", "Set it to 2 or more")
    elif model.family not in _MOE_FAMILIES and model.is_moe:
        families = " or ".join(_MOE_FAMILIES)
        found.refuse("model.num_experts", "gives a dense family experts", f"Set 0, or --model.family {families}")
    elif model.is_moe:
        found.positive("model.moe_ffn_hidden_size")
        found.within("model.experts_per_token", 1, model.num_experts)
        found.within("model.first_dense_layers", 0, model.num_layers)
        if model.first_dense_layers:
            found.positive("model.ffn_hidden_size")
    else:
        found.positive("model.ffn_hidden_size")
    _check_family(found)
    return len(found.violations) == before


def _check_family(found: Findings) -> None:
    """Whether a config.json of the family can say what the model is: engines and checkpoints read nothing else."""
    try:
        to_hf_config(found.cfg.model)
    except ValueError as error:
        found.refuse("model.family", str(error), "Choose the family that has it, or leave the field at its default")


def check_degrees(found: Findings, model_is_sound: bool) -> bool:
    """Whether all degrees are whole, fit the world and divide what they split."""
    model, parallel, before = found.cfg.model, found.cfg.parallel, len(found.violations)
    names = ("world_size", "tensor", "pipeline", "virtual_stages", "context", "expert", "expert_tensor")
    if not found.at_least(1, *(f"parallel.{name}" for name in names), "rollout.tensor", "rollout.num_replicas"):
        return False
    if _fits_world(found, "parallel.world_size", ("tensor", "pipeline", "context")) and model.is_moe:
        path = "parallel.expert" if parallel.expert > 1 else "parallel.expert_tensor"
        _fits_world(found, path, ("expert", "expert_tensor", "pipeline"))
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        found.refuse("parallel.virtual_stages", "needs a pipeline", "Set --parallel.pipeline to 2 or more, or 1 here")
    if not model_is_sound:
        return False
    if found.divides("parallel.pipeline", model.num_layers, "layers") and parallel.pipeline > 1:
        found.divides("parallel.virtual_stages", model.num_layers // parallel.pipeline, "layers of a pipeline stage")
    _check_head_degree(found, "parallel.tensor")
    _check_head_degree(found, "rollout.tensor")
    if model.is_moe:
        found.divides("parallel.expert", model.num_experts, "experts")
        found.divides("parallel.expert_tensor", model.moe_ffn_hidden_size, "columns of an expert")
    else:
        for path in ("parallel.expert", "parallel.expert_tensor"):
            if found.value(path) > 1:
                found.refuse(path, "splits experts, and the model is dense", "Set 1")
    return len(found.violations) == before


def _fits_world(found: Findings, path: str, names: tuple[str, ...]) -> bool:
    product = math.prod(found.value(f"parallel.{name}") for name in names)
    world_size = found.cfg.parallel.world_size
    if world_size % product == 0:
        return True
    found.refuse(
        path,
        f"{' x '.join(names)} = {product} does not divide the world of {world_size} ranks",
        f"Use a multiple of {product} ranks (--parallel.world_size {product}) or lower a degree",
    )
    return False


def _check_head_degree(found: Findings, path: str) -> None:
    """Ranks that outnumber the key/value heads share them, evenly: engines by copies, the trainer by gathering."""
    kv_heads, degree = found.cfg.model.num_key_value_heads, found.value(path)
    if not found.divides(path, found.cfg.model.num_attention_heads, "attention heads"):
        return
    if kv_heads % degree and degree % kv_heads:
        found.refuse(
            path,
            f"neither divides the {kv_heads} key/value heads nor is a multiple of them",
            f"Choose a divisor or a multiple of {kv_heads}",
        )
