"""Keys of Megatron parameters in a distributed checkpoint (torch_dist).

Megatron-Core stacks the layers of a model along one axis and the experts of a layer along another. So
``decoder.layers.3.mlp.experts.7.linear_fc1.weight`` is ``[3, 7]`` of the tensor [layers, experts, 2 * ffn, hidden] with
the key ``decoder.layers.mlp.experts.experts.linear_fc1.weight``. If the first layers of a model are dense, each layer
has separate keys. Norms have the names of Transformer Engine, which fuses them into the linear behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names.table import Weight

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """A parameter is ``tensor[index]`` of a key's tensor, whose stacked leading axes have ``sizes``."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def trainer_key(weight: Weight, model: ModelConfig) -> KeyIndex:
    """Key and index under which the trainer saves and loads a parameter."""
    return next(possible_keys(weight, model))


def possible_keys(weight: Weight, model: ModelConfig) -> Iterator[KeyIndex]:
    """Keys that Megatron-Core checkpoints use for a parameter; the trainer's key comes first. Models without
    Transformer Engine have other norms, and ``singleton_local_shards`` stacks nothing."""
    stacked = not (model.is_moe and model.has("dense")) and not model.has("gdn")
    fused = _fused_norm(weight.name, model)
    for name in dict.fromkeys((fused, weight.name)):
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        yield _key(name, model, layers=stacked, experts=True)
        if weight.name.startswith("decoder.layers."):
            yield _key(name, model, layers=not stacked, experts=True)
            if weight.is_expert:
                yield _key(name, model, layers=False, experts=False)


def _key(name: str, model: ModelConfig, *, layers: bool, experts: bool) -> KeyIndex:
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer and layers:
        name = _LAYER.sub("decoder.layers.", name)
        index, sizes = (int(layer[1]),), (model.num_layers,)
    if expert:
        number = "" if experts else f"{expert[1]}."
        name = _EXPERT.sub(f".mlp.experts.experts.{number}", name)
        if experts:
            index, sizes = (*index, int(expert[1])), (*sizes, model.num_experts)
    return KeyIndex(name, index, sizes)


def _fused_norm(name: str, model: ModelConfig) -> str:
    layer = _LAYER.search(name)
    if layer is None:
        return name
    kind = model.layers[int(layer[1])]
    if kind.mixer == "attention":
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not kind.is_moe:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return name


def extra_state_key(weight: Weight, model: ModelConfig) -> str | None:
    """Key of a linear's extra state object, as ``ShardedObject.unique_key`` spells it; None for other parameters."""
    is_linear = weight.cut != "none" and weight.name.startswith("decoder.layers.") and len(weight.shape) == 2
    if not is_linear or weight.is_expert:
        return None
    location = trainer_key(weight, model)
    index, sizes = (".".join(map(str, values)) for values in (location.index or (0,), location.sizes or (1,)))
    return f"{location.key.removesuffix('weight')}_extra_state/shard_{index}_{sizes}"
