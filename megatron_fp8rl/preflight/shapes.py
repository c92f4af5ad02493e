"""Rules for the architecture, its checkpoint, and the degrees that divide it. Pure but for reading config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names.registry import FAMILIES, from_hf_config, to_hf_config
from megatron_fp8rl.preflight.findings import Findings

# Fields that do not affect what the weights compute, and layers that a run omits.
_FREE = (
    "hf_path",
    "initializer_range",
    "embedding_range",
    "max_position_embeddings",
    "num_mtp_layers",
    "sliding_window",
)


def check_model(found: Findings) -> bool:
    """Check that the architecture is consistent; return whether it is."""
    model, before = found.cfg.model, len(found.violations)
    if not found.in_range("model"):
        return False
    found.divides("model.num_key_value_heads", model.num_attention_heads, "attention heads")
    has_experts = FAMILIES[model.family].has_experts
    if has_experts and not model.is_moe:
        found.refuse("model.num_experts", "leaves a mixture-of-experts family without experts", "Set it to 2 or more")
    elif model.is_moe and not has_experts:
        families = " or ".join(name for name, family in FAMILIES.items() if family.has_experts)
        found.refuse("model.num_experts", "gives a dense family experts", f"Set 0, or --model.family {families}")
    elif model.is_moe:
        found.within("model.moe_ffn_hidden_size", "(0, inf)")
        found.within("model.experts_per_token", f"[1, {model.num_experts}]")
        found.within("model.first_dense_layers", f"[0, {model.num_layers}]")
        if model.first_dense_layers:
            found.within("model.ffn_hidden_size", "(0, inf)")
        _check_router(found)
    else:
        found.within("model.ffn_hidden_size", "(0, inf)")
    if model.num_mtp_layers:
        found.refuse(
            "model.num_mtp_layers",
            "asks for multi-token prediction layers, which reinforcement learning does not use",
            "Set 0; checkpoint_tools keeps them in conversions",
        )
    _check_rotation(found)
    _check_random_weights(found)
    _check_family(found)
    return len(found.violations) == before


def _check_router(found: Findings) -> None:
    """Check that expert groups can be scored (by their two best experts) and offer a token enough experts."""
    model, router = found.cfg.model, found.cfg.model.router
    if not found.in_range("model.router") or router.num_groups == 1:
        return
    if not found.divides("model.router.num_groups", model.num_experts, "experts"):
        return
    per_group = model.num_experts // router.num_groups
    found.within("model.router.groups_per_token", f"[1, {router.num_groups}]")
    if per_group < 2:
        found.refuse(
            "model.router.num_groups",
            "leaves one expert in a group, and a group is scored by its two best",
            f"Lower it to {model.num_experts // 2} or less",
        )
    elif per_group * router.groups_per_token < model.experts_per_token:
        found.refuse(
            "model.router.groups_per_token",
            f"offers a token {per_group * router.groups_per_token} experts, and it uses {model.experts_per_token}",
            f"Set it to {-(-model.experts_per_token // per_group)} or more",
        )


def _check_random_weights(found: Findings) -> None:
    """Check that the embedding has random weights of its own where it is given a range."""
    model = found.cfg.model
    if model.embedding_range is not None and model.tie_embeddings:
        problem = "is for an embedding of its own, and this one is the output layer, too"
        found.refuse("model.embedding_range", problem, "Leave it out")


def _check_rotation(found: Findings) -> None:
    """Check that the number of rotated features is even: rotary embedding rotates pairs."""
    model = found.cfg.model
    if model.mla is not None and model.mla.qk_rope_head_dim % 2:
        found.refuse("model.mla.qk_rope_head_dim", "is odd, and rotary embedding turns pairs", "Choose an even number")
    rotated = int(model.head_dim * model.rotary_fraction)
    if model.mla is None and rotated % 2:
        field = "head_dim" if model.rotary_fraction == 1 else "rotary_fraction"
        problem = f"rotates {rotated} features of a head, and rotary embedding turns pairs"
        found.refuse(f"model.{field}", problem, "Choose an even number of features")


def _check_family(found: Findings) -> None:
    """Check that a config.json of the family can describe the model: engines and checkpoints read nothing else."""
    model = found.cfg.model
    try:
        to_hf_config(model)
    except ValueError as error:
        found.refuse("model.family", str(error), "Choose the family that has it, or leave the field at its default")
    if model.family == "qwen2" and model.head_dim * model.num_attention_heads != model.hidden_size:
        found.refuse(  # vLLM 0.25.1 computes it, whatever config.json says
            "model.head_dim",
            "is not hidden_size / num_attention_heads, which the engine takes for this family",
            f"Set {model.hidden_size // model.num_attention_heads}",
        )


def check_degrees(found: Findings, model_is_sound: bool) -> bool:
    """Check that all degrees fit the world size and divide the dimensions they split; return whether they do."""
    model, parallel, before = found.cfg.model, found.cfg.parallel, len(found.violations)
    if not found.in_range("parallel", "engine.tensor", "engine.num_replicas"):
        return False
    if _fits_world(found, "parallel.world_size", ("tensor", "pipeline", "context")) and model.is_moe:
        path = "parallel.expert" if parallel.expert > 1 else "parallel.expert_tensor"
        _fits_world(found, path, ("expert", "expert_tensor", "pipeline"))
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        found.refuse("parallel.virtual_stages", "needs a pipeline", "Set --parallel.pipeline to 2 or more, or 1 here")
    if not model_is_sound:
        return False
    if parallel.pipeline * parallel.virtual_stages > model.num_layers:
        path = "parallel.virtual_stages" if parallel.pipeline <= model.num_layers else "parallel.pipeline"
        found.refuse(
            path,
            f"pipeline x virtual_stages = {parallel.pipeline * parallel.virtual_stages} stages cannot each have one of "
            f"the {model.num_layers} layers",
            f"Lower the product to {model.num_layers} or less; it need not divide the layers",
        )
    _check_head_degree(found, "parallel.tensor")
    _check_feed_forward_degree(found)
    _check_head_degree(found, "engine.tensor")
    if model.is_moe:
        found.divides("parallel.expert", model.num_experts, "experts")
        found.divides("parallel.expert_tensor", model.moe_ffn_hidden_size, "columns of an expert")
    else:
        for path in ("parallel.expert", "parallel.expert_tensor"):
            if found.value(path) > 1:
                found.refuse(path, "splits experts, and the model is dense", "Set 1")
    return len(found.violations) == before


def _check_feed_forward_degree(found: Findings) -> None:
    """Check that the tensor-parallel size divides the columns of dense MLPs and of shared experts."""
    model, degree = found.cfg.model, found.cfg.parallel.tensor
    shared = model.num_shared_experts * model.moe_ffn_hidden_size
    for columns, what in ((model.ffn_hidden_size, "a dense feed-forward"), (shared, "the shared experts")):
        if columns % degree:
            found.divides("parallel.tensor", columns, f"columns of {what}")
            return


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
    """If there are more ranks than key/value heads, the ranks must share them evenly.

    Engines then replicate the heads, the trainer gathers them.
    """
    kv_heads, degree = found.cfg.model.num_key_value_heads, found.value(path)
    if not found.divides(path, found.cfg.model.num_attention_heads, "attention heads"):
        return
    if kv_heads % degree and degree % kv_heads:
        found.refuse(
            path,
            f"neither divides the {kv_heads} key/value heads nor is a multiple of them",
            f"Choose a divisor or a multiple of {kv_heads}",
        )


def check_source(found: Findings) -> None:
    """Check model.hf_path by its file names and its config.json; no weights are read."""
    model = found.cfg.model
    if model.hf_path is None:
        return
    folder = Path(model.hf_path)
    # checkpoint_tools writes config.json and the tokenizer next to a distributed checkpoint.
    has_weights = any(folder.glob("*.safetensors")) or (folder / ".metadata").is_file()
    if not (folder / "config.json").is_file() or not has_weights:
        found.refuse(
            "model.hf_path",
            "is not a Hugging Face checkpoint: config.json or *.safetensors are missing",
            "Name the folder that holds both, or one that checkpoint_tools converted",
        )
        return
    if damaged := [problem for file in sorted(folder.glob("*.safetensors")) if (problem := _damage(file))]:
        found.refuse("model.hf_path", "; ".join(damaged), "Download or convert it again")
    differing = _differing(folder / "config.json", model)
    if differing:
        found.refuse("model.hf_path", f"is of another model: {differing}", "Name a checkpoint of this model")


def _damage(file: Path) -> str:
    """What is wrong with a safetensors file as its header tells; empty if nothing is."""
    num_bytes = file.stat().st_size
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size)) if 8 + size <= num_bytes else None
            ends = (
                [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"] if header else []
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{file.name} has a header that cannot be read ({error})"
    wanted = 8 + size + max(ends, default=0)
    return "" if num_bytes == wanted else f"{file.name} has {num_bytes} bytes instead of {wanted}"


def _differing(file: Path, model: ModelConfig) -> str:
    """The fields in which a config.json describes another model, or why it cannot be read; empty if it agrees."""
    try:
        config = json.loads(file.read_text())
        theirs = from_hf_config(config, fp8_weights=True) if isinstance(config, dict) else None
    except (OSError, ValueError) as error:
        return f"{file.name}: {error}"
    if theirs is None:
        return f"{file.name} is not a JSON object"
    free = _FREE if model.first_dense_layers or not model.is_moe else (*_FREE, "ffn_hidden_size")  # of no layer
    wrong = [field.name for field in dataclasses.fields(model) if field.name not in free]
    wrong = [name for name in wrong if getattr(theirs, name) != getattr(model, name)]
    return ", ".join(f"{name} is {getattr(theirs, name)!r} there and {getattr(model, name)!r} here" for name in wrong)
