"""Names and layouts: what a Megatron parameter is called and how it is built from Hugging Face tensors.

Pure functions over plain tensors; no ranks. A *global* Megatron name counts layers and experts over the whole model and
spells norms as separate modules (``decoder.layers.3.mlp.experts.7.linear_fc1.weight``). One short file per family holds
the table; the functions here are the same for all families. torch is imported inside the functions that touch tensors,
so that checks of a configuration can ask for names and shapes on a machine without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.weights.names import qwen3
from megatron_fp8rl.weights.names.table import Weight, expand, split_indices

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = {"qwen3": qwen3, "qwen3_moe": qwen3}

_OUTPUT_LAYER = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


def to_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Content of the Hugging Face config.json of ``model``, without special tokens: they belong to the tokenizer."""
    return FAMILIES[model.family].to_hf_config(model)


def from_hf_config(config: dict[str, Any]) -> ModelConfig:
    """The architecture in a config.json. Raises ValueError for a family or feature that is not supported."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type {family!r} is not supported; supported are {sorted(FAMILIES)}")
    return FAMILIES[family].from_hf_config(config)


def weights(model: ModelConfig) -> dict[str, Weight]:
    """Every trainable weight of ``model`` by its global Megatron name."""
    return expand(FAMILIES[model.family].rows(model), model)


def weight(global_name: str, model: ModelConfig) -> Weight:
    """One weight. A tied output layer (the last pipeline stage holds a copy) is the embedding.

    Raises KeyError when the family has no such parameter.
    """
    if model.tie_embeddings and global_name == _OUTPUT_LAYER:
        global_name = _EMBEDDING
    found = weights(model).get(global_name)
    if found is None:
        raise KeyError(f"{global_name}: not a parameter of a {model.family} model with {model.num_layers} layers")
    return found


def hf_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint and its shape, experts one by one."""
    return {name: shape for w in weights(model).values() for name, shape in w.parts}


def mcore_names(model: ModelConfig) -> list[str]:
    """Global names of all Megatron parameters. A tied output layer is not among them."""
    return list(weights(model))


def hf_names_of(global_name: str, model: ModelConfig) -> list[str]:
    """Hugging Face tensors that a Megatron parameter is made of. A tied output layer is made of the embedding."""
    return [name for name, _ in weight(global_name, model).parts]


def is_expert(global_name: str) -> bool:
    """Whether a parameter belongs to a routed expert, and is divided by expert tensor parallelism."""
    return split_indices(global_name)[2] >= 0


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def global_name(local_name: str, layer_offset: int, expert_offset: int) -> str:
    """Name of a parameter in the whole model, from its name in one pipeline stage and expert-parallel rank.

    Accepts sequential experts (``mlp.experts.local_experts.{i}.linear_fc1.weight``), grouped experts
    (``mlp.experts.linear_fc1.weight{i}``), norms that Transformer Engine fuses into the linear behind them, and the
    ``module.`` prefixes of wrappers.
    """
    name = re.sub(r"^(?:module\.)+", "", local_name)
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.", name)
    name = re.sub(r"\.local_experts\.(\d+)\.", lambda m: f".{int(m[1]) + expert_offset}.", name)
    name = re.sub(
        r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$",
        lambda m: f".mlp.experts.{int(m[2]) + expert_offset}.{m[1]}.weight",
        name,
    )
    for fused, separate in _FUSED_NORMS.items():
        name = name.replace(fused, separate)
    return name


def from_hf(global_name: str, get: Callable[[str], Tensor], model: ModelConfig) -> Tensor:
    """The full Megatron tensor, built from Hugging Face tensors that ``get`` returns by name.

    Raises ValueError that names the tensor when a shape is not the one that ``model`` says.
    """
    import torch

    w = weight(global_name, model)
    parts = []
    for name, shape in w.parts:
        tensor = get(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but the model configuration says {shape}")
        parts.append(tensor)
    if w.join == "qkv":
        groups = model.num_key_value_heads
        parts = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(parts, dim=1).reshape(w.shape)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def to_hf(global_name: str, tensor: Tensor, model: ModelConfig, tp_size: int = 1) -> list[tuple[str, Tensor]]:
    """Inverse of :func:`from_hf`: (Hugging Face name, tensor) pairs; views of ``tensor`` where the layout allows.

    With ``tp_size`` > 1 ``tensor`` is the :func:`shard` of one (expert-)tensor-parallel rank, and the result is that
    rank's contiguous part of each Hugging Face tensor: the parts of all ranks in order make up the whole along the axis
    that :class:`Weight.cut` names. Raises ValueError when the shape is not the one that ``model`` says.
    """
    w = weight(global_name, model)
    _check_divisible(w, model, tp_size)
    row_parts = tp_size if w.cut == "rows" else 1
    columns = w.shape[1:] if w.cut != "columns" else (w.shape[1] // tp_size, *w.shape[2:])
    rows = [shape[0] // row_parts for _, shape in w.parts]
    if tuple(tensor.shape) != (sum(rows), *columns):
        raise ValueError(
            f"{global_name}: shape {tuple(tensor.shape)}, but the model configuration says {(sum(rows), *columns)}"
        )
    if w.join == "qkv":
        groups = model.num_key_value_heads // tp_size
        split = tensor.reshape(groups, -1, *columns).split([r // groups for r in rows], dim=1)
        return [(name, part.reshape(-1, *columns)) for (name, _), part in zip(w.parts, split)]
    return [(name, part) for (name, _), part in zip(w.parts, tensor.split(rows))]


def _check_divisible(w: Weight, model: ModelConfig, tp_size: int) -> None:
    if w.cut == "none":
        return
    if w.join == "qkv":
        units, what = model.num_key_value_heads, "query groups"
    else:
        units, what = (w.parts[0][1][0], "rows") if w.cut == "rows" else (w.shape[1], "columns")
    if units % tp_size:
        raise ValueError(f"{w.name}: {units} {what} cannot be divided over {tp_size} tensor-parallel ranks")


def shard(global_name: str, full: Tensor, model: ModelConfig, tp_size: int, tp_rank: int) -> Tensor:
    """The piece of a full Megatron tensor that one (expert-)tensor-parallel rank holds; contiguous.

    Raises ValueError when the tensor cannot be divided evenly.
    """
    import torch

    w = weight(global_name, model)
    if w.cut == "none" or tp_size == 1:
        return full
    _check_divisible(w, model, tp_size)
    if w.join == "gate_up":
        return torch.cat([half.chunk(tp_size)[tp_rank] for half in full.chunk(2)])
    return full.chunk(tp_size, dim=0 if w.cut == "rows" else 1)[tp_rank].contiguous()


def unshard(global_name: str, shards: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """Inverse of :func:`shard`: the full Megatron tensor from the pieces of all (expert-)tensor-parallel ranks."""
    import torch

    w = weight(global_name, model)
    if w.cut == "none" or len(shards) == 1:
        return shards[0]
    if w.join == "gate_up":
        halves = [piece.chunk(2) for piece in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards), dim=0 if w.cut == "rows" else 1)
