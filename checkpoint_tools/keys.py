"""Where a Megatron parameter lies in a distributed checkpoint (torch_dist): under which key, at which index.

In:  a parameter of the name table. Out: its key there, and its place in the tensor of that key.

Megatron-Core stacks what is alike: the layers of a model along one axis, the experts of a layer along another. So
``decoder.layers.3.mlp.experts.7.linear_fc1.weight`` is ``[3, 7]`` of the tensor [layers, experts, 2 * ffn, hidden]
under the key ``decoder.layers.mlp.experts.experts.linear_fc1.weight``. Layers of a model whose first layers are dense
are unlike and keep a key each. Norms have the names of Transformer Engine, which keeps them inside the linear behind
them. These are the keys that the trainer's own checkpoints have.
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
class Place:
    """A parameter in the tensor of a key: ``tensor[index]``, where the leading axes of the tensor have ``sizes``."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def place(weight: Weight, model: ModelConfig) -> Place:
    """The place where the trainer saves a parameter and looks for it."""
    return next(places(weight, model))


def places(weight: Weight, model: ModelConfig) -> Iterator[Place]:
    """Places where checkpoints of Megatron-Core keep a parameter; first the one of the trainer.

    The others come from models built without Transformer Engine, and from ``singleton_local_shards``, which stacks
    nothing.
    """
    stacked = model.first_dense_layers == 0 or not model.is_moe
    norms_fused = (True, False) if _fused(weight.name, model) != weight.name else (True,)
    for fused in norms_fused:
        name = _fused(weight.name, model) if fused else weight.name
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        yield _place(name, model, layers=stacked, experts=True)
        if weight.name.startswith("decoder.layers."):
            yield _place(name, model, layers=not stacked, experts=True)
            if weight.is_expert:
                yield _place(name, model, layers=False, experts=False)


def _place(name: str, model: ModelConfig, *, layers: bool, experts: bool) -> Place:
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer and layers:
        name = _LAYER.sub("decoder.layers.", name)
        index, sizes = (int(layer[1]),), (model.num_layers,)
    if expert:
        kept = f"{expert[1]}." if not experts else ""
        name = _EXPERT.sub(f".mlp.experts.experts.{kept}", name)
        if experts:
            index, sizes = (*index, int(expert[1])), (*sizes, model.num_experts)
    return Place(name, index, sizes)


def _fused(name: str, model: ModelConfig) -> str:
    layer = _LAYER.search(name)
    if layer is None:
        return name
    if model.mla is None:
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not model.is_moe_layer(int(layer[1])):
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return name


def extra_state(weight: Weight, model: ModelConfig) -> Place | None:
    """Where Megatron-Core keeps a linear's object of extra state, empty without FP8; None for what has none."""
    is_linear = weight.cut != "none" and weight.name.startswith("decoder.layers.") and weight.name.endswith(".weight")
    if not is_linear or weight.is_expert:
        return None
    found = place(weight, model)
    return Place(found.key.removesuffix("weight") + "_extra_state", found.index, found.sizes)


def object_key(found: Place) -> str:
    """Key of the object at a place, as ``ShardedObject.unique_key`` spells it."""
    index, sizes = found.index or (0,), found.sizes or (1,)
    return f"{found.key}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
