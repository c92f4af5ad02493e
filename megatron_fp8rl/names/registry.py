"""Names and layouts of parameters: Megatron's, Hugging Face's, and the conversion between them.

Pure functions over plain tensors. A *global* Megatron name counts layers and experts over the whole model and names
norms as separate modules (``decoder.layers.3.mlp.experts.7.linear_fc1.weight``). Only functions that use tensors import
torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import blocks, family, slicing, table
from megatron_fp8rl.names.deepseek_v3 import DEEPSEEK_V3
from megatron_fp8rl.names.family import Family
from megatron_fp8rl.names.gemma3 import GEMMA3
from megatron_fp8rl.names.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from megatron_fp8rl.names.gpt_oss import GPT_OSS
from megatron_fp8rl.names.llama import LLAMA
from megatron_fp8rl.names.minimax_m2 import MINIMAX_M2
from megatron_fp8rl.names.mistral import MISTRAL
from megatron_fp8rl.names.mixtral import MIXTRAL
from megatron_fp8rl.names.olmo import OLMO2, OLMO3
from megatron_fp8rl.names.phi3 import PHI3
from megatron_fp8rl.names.qwen2 import QWEN2
from megatron_fp8rl.names.qwen3 import QWEN3, QWEN3_MOE
from megatron_fp8rl.names.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from megatron_fp8rl.names.qwen3_next import QWEN3_NEXT
from megatron_fp8rl.names.table import Weight, expand, expand_mtp, split_indices

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE, MINIMAX_M2),
        *(OLMO2, OLMO3, GEMMA3, QWEN3_NEXT, GPT_OSS, PHI3, QWEN3_5, QWEN3_5_MOE),
    )
}
_SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types that differ only in name
# Model types that also see images -> family of their text_config.
_SEEING = {"gemma3": GEMMA3, "kimi_k25": DEEPSEEK_V3, "mistral3": MISTRAL}
_SEEING |= {"qwen3_vl": QWEN3, "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE}
# What begins the names of the text part's tensors there, and in a model of its own.
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.")
OF_THE_VISION_TOWER = "part of the vision tower, which a text model does not have"
# Keys beside text_config that are its own, too. Tokens beside it are those that the model was trained to end with.
_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of a rotary embedding of several axes. A token of text has the same position on all axes.
_AXES = {"mrope_section", "mrope_interleaved"}
_SPARSE = "sparse attention by an indexer; the pinned Megatron-Core has it as an experiment, and no kernel of the "
_SPARSE += "pinned vLLM computes it alike in every batch or on a CPU"
# Model types that are refused by name -> what they need.
_NEEDED = {
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "deepseek_v4": "compressed attention and hyper-connections, which the pinned Megatron-Core does not have",
    "kimi_k3": "Kimi's delta attention in Megatron-Core and the model in vLLM, which the pinned versions do not have",
    "gemma2": "softcapping of logits in trainer and engine",
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "embeddings of each layer and several residual streams"),
    **dict.fromkeys(("gemma4", "gemma4_text"), "heads of two sizes, and keys that are values or that layers share"),
    "glm4v_moe": "names of its tensors, and a comparison of its rotary embedding with GLM-4.5's for tokens of text",
    "granite": "multipliers of embedding, attention, residual stream and logits in trainer and engine",
    "granitemoehybrid": "Mamba layers in the trainer, and multipliers of embedding, attention, residuals and logits",
    **dict.fromkeys(("llama4", "llama4_text"), "attention in chunks, and layers without rotary embedding"),
    "ministral3": "a scale of queries that grows with the position (llama_4_scaling_beta) in trainer and engine",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "names of its tensors; those of Qwen3-VL's text part are read"),
    "qwen3_vl_moe": "a reader of its experts, which are stored transposed",
    "smollm3": "layers without rotary embedding in the trainer, and a class of its own in the pinned vLLM",
    "qwen4_exp": "its sparse attention and n-gram tables, which the pinned Megatron-Core and vLLM do not have",
}


def to_hf_config(model: ModelConfig) -> dict[str, Any]:
    """The Hugging Face config.json of ``model``, without special tokens. Raises ValueError if the model has a feature
    that its family lacks."""
    return family.write(FAMILIES[model.family], model)


def from_hf_config(config: dict[str, Any], *, keep_mtp: bool = False, fp8_weights: bool = False) -> ModelConfig:
    """The architecture in a config.json.

    ``keep_mtp``: keep multi-token prediction layers. ``fp8_weights``: the caller reads block FP8 weights with their
    scales. Raises ValueError for an unsupported family or feature, with what it needs.
    """
    config = text_config(config)
    described = _family_of(config)
    if (needing := str(config.get("model_type"))) in _NEEDED:
        raise ValueError(
            f"config.json: model_type {needing!r} is not supported; it needs {_NEEDED[needing]}. Name a model "
            "of docs/models.md"
        )
    if described is None:
        raise ValueError(
            f"config.json: model_type {config.get('model_type')!r} (architectures {config.get('architectures')}) is "
            f"not supported; supported are {', '.join(sorted(FAMILIES))}. Add a file to megatron_fp8rl/names: see "
            "docs/extending.md"
        )
    return family.read(described, config, keep_mtp=keep_mtp, fp8_weights=fp8_weights)


def _family_of(config: dict[str, Any]) -> Family | None:
    name = config.get("model_type")
    return FAMILIES.get(_SAME_AS.get(name, name)) if isinstance(name, str) else None


def sees_images(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that also sees images, whose text part is read."""
    return config.get("model_type") in _SEEING


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text part of a model that also sees images, as a model of its own; a copy of any other."""
    described, text = _SEEING.get(str(config.get("model_type"))), config.get("text_config")
    if described is None or not isinstance(text, dict):
        return dict(config)
    outer = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    tokens = {key: config[key] for key in _TOKENS if config.get(key) is not None}
    text = {key: value for key, value in text.items() if key != "auto_map"}
    if described is QWEN3:  # its own class has one axis
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := text.get(key), dict):
                text[key] = {name: value for name, value in rope.items() if name not in _AXES}
    own = text.get("model_type", described.model_type)
    if own != f"{config['model_type']}_text" and _SAME_AS.get(own, own) != described.model_type:
        return outer | text | tokens  # refused by its own model type
    return outer | text | tokens | {"model_type": described.model_type, "architectures": [described.architecture]}


def text_name(name: str, config: dict[str, Any]) -> str:
    """The name that a tensor of a folder has in the text part as a model of its own."""
    if sees_images(config):
        for there, alone in _PREFIXES.items():
            if name.startswith(there):
                return alone + name.removeprefix(there)
    return name


def ignored_keys(config: dict[str, Any]) -> str:
    """Names of config.json keys that neither change the model nor are read by its family, in one line; may be empty."""
    described = _family_of(config)
    names = family.without_effect(described, config) if described is not None else []
    return f"config.json: without effect on this model and ignored: {', '.join(names)}" if names else ""


@functools.lru_cache(maxsize=8)
def weights(model: ModelConfig) -> dict[str, Weight]:
    """Every weight of ``model`` by its global Megatron name; read-only."""
    rows = FAMILIES[model.family].rows(model)
    return expand(rows, model) | expand_mtp(rows, FAMILIES[model.family].mtp, model)


def weight(global_name: str, model: ModelConfig) -> Weight:
    """One weight. A tied output layer (the last pipeline stage holds a copy) is the embedding. Raises KeyError if the
    family has no such parameter."""
    if model.tie_embeddings and global_name == blocks.OUTPUT_LAYER:
        global_name = blocks.EMBEDDING
    try:
        return weights(model)[global_name]
    except KeyError:
        text = f"{global_name}: not a parameter of a {model.family} model with {model.num_layers} layers"
        raise KeyError(text) from None


def norms_all_heads(model: ModelConfig) -> bool:
    """Whether one norm spans all query heads, and one all key heads."""
    return _has_row(model, ".self_attention.q_norm.weight")


def norms_inputs(model: ModelConfig) -> bool:
    """Whether attention and feed-forward read a norm of the residual stream."""
    return _has_row(model, ".input_layernorm.weight")


def norms_outputs(model: ModelConfig) -> bool:
    """Whether a norm of what attention and feed-forward compute is added to the residual stream."""
    return _has_row(model, ".post_layernorm.weight")


def projects_apart(model: ModelConfig) -> bool:
    """Whether gated delta nets have four projections instead of two."""
    return _has_row(model, ".self_attention.in_proj_qkv.weight")


def has_sinks(model: ModelConfig) -> bool:
    """Whether the softmax of each query head has a learned term without a value."""
    return _has_row(model, ".core_attention.softmax_offset")


def has_biases(model: ModelConfig) -> bool:
    """Whether all linears of a layer have biases, experts and routers too."""
    return _has_row(model, ".self_attention.linear_proj.bias")


@functools.lru_cache(maxsize=64)
def _has_row(model: ModelConfig, suffix: str) -> bool:
    return any(row.mcore.endswith(suffix) for row in FAMILIES[model.family].rows(model))


def hf_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape, experts one by one."""
    tensors = {}
    for w in weights(model).values():
        tensors |= dict(w.parts) | dict.fromkeys(w.copies, w.shape)
    return tensors


def hf_axes(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """What each axis of every Hugging Face tensor is, as keys of ``names.table.sizes``, such as ("q", "hidden").
    Multi-token prediction layers are left out."""
    return table.axes(FAMILIES[model.family].rows(model), model)


def is_expert(global_name: str) -> bool:
    """Whether a parameter belongs to a routed expert, and is sharded by expert tensor parallelism."""
    return split_indices(global_name)[2] >= 0


def without_expert(global_name: str) -> str:
    """The name without the number of an expert, which all experts of a layer share."""
    return re.sub(r"\.mlp\.experts\.\d+\.", ".mlp.experts.", global_name)


def layer_of(hf_name: str) -> int | None:
    """The number of the layer of a Hugging Face tensor or module; None outside layers."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?=\.|$)", hf_name)
    return None if match is None else int(match[1])


def reason_to_skip(hf_name: str, model: ModelConfig) -> str | None:
    """Why a checkpoint tensor outside :func:`hf_tensors` may be skipped; None if it may not."""
    layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
    if hf_name.startswith("mtp."):
        return "part of the multi-token prediction layers, which are not read"
    if layer and int(layer[1]) >= model.num_layers and FAMILIES[model.family].mtp and not model.num_mtp_layers:
        return "part of a multi-token prediction layer, which num_mtp_layers = 0 leaves out"
    if hf_name.removeprefix("model.").startswith(_VISION):
        return OF_THE_VISION_TOWER
    if hf_name.endswith("rotary_emb.inv_freq"):
        return "computed from rope_theta"
    if hf_name == "lm_head.weight" and model.tie_embeddings:
        return "tied to the embedding"
    return None


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """Name of a parameter in the whole model, from its name on one pipeline stage and expert-parallel rank.

    Accepts sequential experts (``mlp.experts.local_experts.{i}.linear_fc1.weight``), grouped experts
    (``mlp.experts.linear_fc1.weight{i}``), norms that Transformer Engine fuses into the following linear, and the
    ``module.`` prefixes of wrappers.
    """
    name = re.sub(r"^(?:module\.)+", "", local_name)
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.", name)
    name = re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".{int(m[1]) + expert_offset}.", name)
    name = re.sub(
        r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$",
        lambda m: f".mlp.experts.{int(m[3]) + expert_offset}.{m[1]}.{m[2]}",
        name,
    )
    for fused, separate in _FUSED_NORMS.items():
        name = name.replace(fused, separate)
    return name


def from_hf(global_name: str, get: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """The full Megatron tensor, built from Hugging Face tensors that ``get`` returns by name. Raises ValueError, with
    the tensor's name, for another shape, FP8 without scales, or copies that differ."""
    import torch

    w = weight(global_name, model)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the model configuration says {shape}")
        if tensor.dtype.itemsize == 1:
            raise ValueError(f"{name}: {tensor.dtype} needs its scales; dequantize it first")
        return tensor

    full = slicing.join(w, model, [read(name, shape) for name, shape in w.parts])
    for name in w.copies:
        if not torch.equal(read(name, w.shape), full):
            raise ValueError(
                f"{name}: differs from {w.parts[0][0]}, but Megatron's multi-token prediction layers share it; set "
                "num_mtp_layers = 0"
            )
    return full


def shard(global_name: str, full: Tensor, model: ModelConfig, tp_size: int, tp_rank: int) -> Tensor:
    """The contiguous shard of a full Megatron tensor on an (expert-)tensor-parallel rank.

    A vocabulary that does not divide evenly is padded with rows of zeros (:func:`padded_vocab_size`). Raises ValueError
    for another tensor that does not divide evenly.
    """
    w = weight(global_name, model)
    if w.cut == "none" or tp_size == 1:
        return full
    return slicing.cut(w, model, full, tp_size, tp_rank)


def padded_vocab_size(model: ModelConfig, tp_size: int) -> int:
    """Rows of the embedding and the output head over all tensor-parallel ranks, including padding."""
    return -(-model.vocab_size // tp_size) * tp_size
