"""Rules for the architecture, its checkpoint, and the degrees that divide it. Pure but for reading config.json."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from megatron_fp8rl import upstream
from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.data import weight_files
from megatron_fp8rl.data.gguf_folder import SUFFIX
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names.registry import (
    FAMILIES,
    from_hf_config,
    has_biases,
    norms_all_heads,
    projects_apart,
    to_hf_config,
)
from megatron_fp8rl.precision.hardware import Generation
from megatron_fp8rl.preflight.findings import Checks

# Fields that do not affect what the weights compute, and layers that a run omits.
_FREE = {*"hf_path initializer_range embedding_range max_position_embeddings num_mtp_layers sliding_window".split()}
# Keys of config.json of which vLLM takes the least for the longest sequence.
_LENGTHS = "n_positions max_seq_len seq_length max_target_positions max_sequence_length max_seq_length seq_len".split()


def check_model(checks: Checks) -> bool:
    """Check that the architecture is consistent; return whether it is."""
    model, before = checks.cfg.model, len(checks.violations)
    if not checks.in_range("model"):
        return False
    checks.divides("model.num_key_value_heads", model.num_attention_heads, "attention heads")
    has_experts = FAMILIES[model.family].has_experts
    if has_experts and not model.is_moe:
        checks.refuse("model.num_experts", "leaves a mixture-of-experts family without experts", "Set it to 2 or more")
    elif model.is_moe and not has_experts:
        families = " or ".join(name for name, family in FAMILIES.items() if family.has_experts)
        checks.refuse("model.num_experts", "gives a dense family experts", f"Set 0, or --model.family {families}")
    elif model.is_moe:
        checks.within("model.moe_ffn_hidden_size", "(0, inf)")
        checks.within("model.experts_per_token", f"[1, {model.num_experts}]")
        checks.within("model.first_dense_layers", f"[0, {model.num_layers}]")
        _check_router(checks)
    if model.is_moe == has_experts and model.has("dense"):
        checks.within("model.ffn_hidden_size", "(0, inf)")
    if model.num_mtp_layers and checks.cfg.engine.speculation != "mtp":
        problem = "asks for multi-token prediction layers, which only drafts of engines use (engine.speculation)"
        checks.refuse("model.num_mtp_layers", problem, "Set 0, or --engine.speculation mtp", [0])
    if "sliding_attention" in model.layer_types and not model.sliding_window:
        problem = "has layers with a window of attention, and model.sliding_window is not set"
        checks.refuse("model.layer_types", problem, "Set --model.sliding_window to the tokens of the window")
    if "linear_attention" in model.layer_types and model.gdn is None:
        problem = "has gated delta nets (linear_attention), and model.gdn is not set"
        checks.refuse("model.layer_types", problem, "Set --model.gdn.num_key_heads and its other sizes")
        return False
    if model.gdn is not None and checks.in_range("model.gdn"):
        checks.divides("model.gdn.num_key_heads", model.gdn.num_value_heads, "value heads of a gated delta net")
    _check_rotary(checks)
    if has_biases(model) and (model.rope_scaling is None or model.rope_scaling.kind != "yarn"):
        checks.refuse("model.rope_scaling", f"vLLM's model of {model.family} has YaRN only", "Copy that of config.json")
    if model.embedding_range is not None and model.tie_embeddings:
        problem = "needs an embedding with separate weights, and this embedding is also the output layer"
        checks.refuse("model.embedding_range", problem, "Leave it out")
    try:
        to_hf_config(model)  # engines and checkpoints read nothing else
    except ValueError as error:
        checks.refuse("model.family", str(error), "Choose the family that has it, or leave the field at its default")
    if FAMILIES[model.family].derives_head_dim and model.head_dim * model.num_attention_heads != model.hidden_size:
        problem = "is not hidden_size / num_attention_heads, which the engine takes for this family"
        checks.refuse("model.head_dim", problem, f"Set {model.hidden_size // model.num_attention_heads}")
    return len(checks.violations) == before


def _check_router(checks: Checks) -> None:
    """Check that expert groups can be scored by their two best experts, and offer a token enough experts."""
    model, router = checks.cfg.model, checks.cfg.model.router
    if not checks.in_range("model.router") or router.num_groups == 1:
        return
    if not checks.divides("model.router.num_groups", model.num_experts, "experts"):
        return
    per_group = model.num_experts // router.num_groups
    checks.within("model.router.groups_per_token", f"[1, {router.num_groups}]")
    if per_group < 2:
        problem = "leaves one expert in a group, and a group is scored by its two best"
        checks.refuse("model.router.num_groups", problem, f"Lower it to {model.num_experts // 2} or less")
    elif (offered := per_group * router.groups_per_token) < model.experts_per_token:
        problem = f"offers a token {offered} experts, and it uses {model.experts_per_token}"
        remedy = f"Set it to {-(-model.experts_per_token // per_group)} or more"
        checks.refuse("model.router.groups_per_token", problem, remedy)


def _check_rotary(checks: Checks) -> None:
    model, pairs = checks.cfg.model, "and rotary embedding turns pairs"
    if model.mla is not None:
        if model.mla.qk_rope_head_dim % 2:
            checks.refuse("model.mla.qk_rope_head_dim", f"is odd, {pairs}", "Choose an even number")
    elif (rotated := int(model.head_dim * model.rotary_fraction)) % 2:
        field = "head_dim" if model.rotary_fraction == 1 else "rotary_fraction"
        problem = f"rotates {rotated} features of a head, {pairs}"
        checks.refuse(f"model.{field}", problem, "Choose an even number of features")
    elif (scaling := model.rope_scaling) is not None and scaling.kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(scaling, name))) != rotated // 2:
                problem = f"has {count} numbers, and a head has {rotated // 2} rotated pairs"
                checks.refuse(f"model.rope_scaling.{name}", problem, "Copy the list of config.json")


def check_degrees(checks: Checks, model_is_valid: bool) -> bool:
    """Check that all degrees fit the world size and divide the dimensions they split; return whether they do."""
    model, parallel, before = checks.cfg.model, checks.cfg.parallel, len(checks.violations)
    if not checks.in_range("parallel", "engine.tensor", "engine.num_replicas"):
        return False
    if _fits_world(checks, "parallel.world_size", ("tensor", "pipeline", "context")) and model.is_moe:
        path = "parallel.expert" if parallel.expert > 1 else "parallel.expert_tensor"
        _fits_world(checks, path, ("expert", "expert_tensor", "pipeline"))
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        remedy = "Set --parallel.pipeline to 2 or more, or 1 here"
        checks.refuse("parallel.virtual_stages", "needs a pipeline", remedy, [1])
    if not model_is_valid:
        return False
    layers, stages = model.num_layers, parallel.pipeline * parallel.virtual_stages
    if stages > layers:
        path = "parallel.virtual_stages" if parallel.pipeline <= layers else "parallel.pipeline"
        problem = f"pipeline x virtual_stages = {stages} stages cannot each have one of the {layers} layers"
        checks.refuse(path, problem, f"Lower the product to {layers} or less; it need not divide the layers")
    _check_head_degree(checks, "parallel.tensor")
    shared = model.num_shared_experts * model.moe_ffn_hidden_size
    columns = ((model.ffn_hidden_size, "a dense feed-forward"), (shared, "the shared experts"))
    for size, part in columns:
        if not checks.divides("parallel.tensor", size, f"columns of {part}"):
            break
    _check_head_degree(checks, "engine.tensor")
    if model.is_moe:
        checks.divides("parallel.expert", model.num_experts, "experts")
        if checks.divides("parallel.expert_tensor", model.moe_ffn_hidden_size, "columns of an expert"):
            _check_expert_biases(checks)
    else:
        for path in ("parallel.expert", "parallel.expert_tensor"):
            if checks.value(path) > 1:
                checks.refuse(path, "splits experts, and the model is dense", choices=[1])
    return len(checks.violations) == before


def _check_expert_biases(checks: Checks) -> None:
    """Ranks that divide an expert would each add its bias."""
    parallel, engine = checks.cfg.parallel, checks.cfg.engine
    if not has_biases(checks.cfg.model):
        return
    problem = "divides experts, and each rank would add an expert's bias"
    if parallel.expert_tensor > 1:
        checks.refuse("parallel.expert_tensor", problem, "Set 1, and use --parallel.expert", [1])
    if engine.expert != engine.ranks:
        problem = f"{problem} (the engine has {engine.ranks} ranks)"
        checks.refuse("engine.expert", problem, f"Set {engine.ranks}", [engine.ranks])


def _fits_world(checks: Checks, path: str, names: tuple[str, ...]) -> bool:
    product, world = math.prod(checks.value(f"parallel.{name}") for name in names), checks.cfg.parallel.world_size
    if world % product:
        problem = f"{' x '.join(names)} = {product} does not divide the world of {world} ranks"
        remedy = f"Use a multiple of {product} ranks (--parallel.world_size {product}) or lower a degree"
        checks.refuse(path, problem, remedy)
    return world % product == 0


def _check_head_degree(checks: Checks, path: str) -> None:
    """If there are more ranks than key/value heads, the ranks must share them evenly: engines replicate heads, the
    trainer gathers them."""
    kv_heads, degree = checks.cfg.model.num_key_value_heads, checks.value(path)
    divides = checks.divides(path, checks.cfg.model.num_attention_heads, "attention heads")
    if divides and (gdn := checks.cfg.model.gdn) is not None:
        if checks.divides(path, kv_heads, "key heads of gated attention"):
            checks.divides(path, gdn.num_key_heads, "key heads of gated delta nets")
    elif divides and norms_all_heads(checks.cfg.model):
        checks.divides(path, kv_heads, "key heads, which share a norm")
    elif divides and kv_heads % degree and degree % kv_heads:
        problem = f"neither divides the {kv_heads} key/value heads nor is a multiple of them"
        checks.refuse(path, problem, f"Choose a divisor or a multiple of {kv_heads}")


def check_combined_matrices(checks: Checks) -> None:
    """Refuse what models lack whose checkpoints combine matrices in one tensor."""
    if not FAMILIES[checks.cfg.model.family].fused_rows:
        return
    if not upstream.applies("Phi3ForCausalLM", "LongRope"):
        problem = "needs the patches Phi3ForCausalLM and LongRope, not tested with the installed version of vLLM"
        checks.refuse("model.family", problem, "Install the version that is pinned")
    if checks.cfg.lora.rank:
        problem = "gives single matrices adapters, and checkpoints of this family combine the matrices"
        checks.refuse("lora.rank", problem, "Leave it out")


def check_delta_nets(checks: Checks, accelerator: Generation) -> None:
    """Refuse what gated delta nets do not have."""
    cfg = checks.cfg
    if not cfg.model.has("gdn"):
        return
    is_patched = accelerator != "cpu" or upstream.applies("compute_as_the_trainer")
    if not is_patched or not upstream.applies("WithStates"):
        problem = "needs patches of gated delta nets that were not tested with the installed version of vLLM"
        checks.refuse("model.family", problem, "Install the version that is pinned")
    gdn = cfg.model.gdn
    if gdn is not None and projects_apart(cfg.model) and cfg.precision.rollout != "bf16":
        if (keys := gdn.num_key_heads * gdn.key_head_dim) % BLOCK:
            problem = f"times key_head_dim = {keys} is no multiple of the FP8 tile {BLOCK}: an engine stacks the rows "
            problem += "of all queries, all keys and all values of a gated delta net"
            remedy = f"Choose a model with a multiple of {BLOCK}, or --precision.trainer bf16 --precision.rollout bf16"
            checks.refuse("model.gdn.num_key_heads", problem, remedy, code="untiled_size")
    for path, value, problem in (
        ("parallel.context", 1, "cuts sequences, and the states of gated delta nets pass through them in order"),
        ("engine.tensor", 1, "divides gated delta nets, which is not supported in engines"),
        ("engine.data", 1, "is not supported with gated delta nets"),
        ("engine.kv_cache_dtype", "auto", "is not supported with gated delta nets"),
        ("engine.record_routed_experts", False, "is not supported with gated delta nets"),
        ("engine.speculation", "none", "needs states of gated delta nets that rejected drafts do not change"),
        ("lora.rank", None, "gives gated delta nets no adapters"),
    ):
        if cfg.value(path) != value:
            checks.refuse(path, problem, "Leave it out" if value is None else "", [value])


def check_checkpoint(checks: Checks) -> None:
    """Check model.hf_path by its file names and its config.json; no weights are read."""
    model, path = checks.cfg.model, "model.hf_path"
    if model.hf_path is None:
        return
    folder = Path(model.hf_path)
    if folder.suffix == SUFFIX:
        remedy = f"Convert it: python -m checkpoint_tools gguf_to_hf {folder} FOLDER"
        checks.refuse(path, "is a GGUF file, and this field names a folder", remedy)
        return
    # checkpoint_tools writes config.json and the tokenizer next to a distributed checkpoint.
    has_weights = any(folder.glob("*.safetensors")) or (folder / ".metadata").is_file()
    if not has_weights and (folder / "config.json").is_file():
        remedy = "Nothing was started. A run from random weights needs --model.random True"
        checks.refuse(path, weight_files.no_safetensors(folder), remedy)
        return
    if not has_weights or not (folder / "config.json").is_file():
        problem = "is not a Hugging Face checkpoint: config.json or *.safetensors are missing"
        if weight_files.is_adapter(folder):
            problem = weight_files.adapter_problem(folder)
        checks.refuse(path, problem, "Name the folder that holds both, or one that checkpoint_tools converted")
        return
    if errors := [error for file in sorted(folder.glob("*.safetensors")) if (error := _header_error(file))]:
        checks.refuse(path, "; ".join(errors), "Download or convert it again")
    if wrong := differences(folder / "config.json", model):
        checks.refuse(path, f"is of another model: {wrong}", "Name a checkpoint of this model")
    elif problem := _length_problem(json.loads((folder / "config.json").read_text()), checks.cfg):
        checks.refuse(path, problem, "Remove the key, or lower --sampling.max_completion_tokens")


def _length_problem(config: dict[str, Any], cfg: RunConfig) -> str:
    """A key of config.json by which vLLM refuses the run's longest sequence; empty if there is none."""
    scaling, longest = cfg.model.rope_scaling, cfg.max_sequence_tokens
    if scaling is not None and scaling.kind == "yarn":
        return ""  # vLLM takes its length instead
    keys = ("model_max_length",) if config.get("model_max_length") else _LENGTHS
    values = {key: config[key] for key in keys if isinstance(config.get(key), int)}
    # vLLM multiplies by a linear factor, but not for Gemma 3.
    is_scaled = scaling is not None and scaling.kind == "linear" and cfg.model.local_rope_theta is None
    factor = scaling.factor if is_scaled else 1
    least = min(values.values(), default=longest)
    if least * factor >= longest or longest > cfg.model.max_sequence_tokens:
        return ""
    key = next(key for key, value in values.items() if value == least)
    problem = f"config.json: {key} = {least}, and vLLM computes no longer sequences; "
    return f"{problem}those of the run reach {longest} tokens"


def _header_error(file: Path) -> str:
    """An error of a safetensors file according to its header; empty if there is none."""
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as content:
            start = content.read(8)
            if start == b"version ":
                return f"{file.name} is a pointer of Git LFS instead of the file (fetch it by git lfs pull)"
            size = int.from_bytes(start, "little")
            if 8 + size > num_bytes:
                return f"{file.name} is truncated or no safetensors file: its {num_bytes} bytes hold no header"
            header = json.loads(content.read(size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{file.name} has a header that cannot be read ({error})"
    expected = 8 + size + max(ends, default=0)
    return "" if num_bytes == expected else f"{file.name} has {num_bytes} bytes instead of {expected}"


def differences(file: Path, model: ModelConfig) -> str:
    """The fields in which a config.json describes another model, or why it cannot be read; empty if it agrees."""
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return f"{file.name}: {error}"
    try:
        stored = from_hf_config(config, fp8_weights=True) if isinstance(config, dict) else None
    except ValueError as error:
        return str(error)
    if stored is None:
        return f"{file.name} is not a JSON object"
    free = _FREE if model.has("dense") else _FREE | {"ffn_hidden_size"}  # of no layer
    values = {
        field.name: (getattr(stored, field.name), getattr(model, field.name))
        for field in dataclasses.fields(model)
        if field.name not in free
    }
    return ", ".join(f"{name} is {a!r} there and {b!r} here" for name, (a, b) in values.items() if a != b)
