"""The vocabulary in which a model family writes down its weights. Pure; no torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.config import ModelConfig

Cut = Literal["none", "rows", "columns"]
Join = Literal["copy", "qkv", "gate_up"]


@dataclass(frozen=True)
class Row:
    """One kind of Megatron parameter and the Hugging Face tensors that it is made of.

    ``{layer}`` and ``{expert}`` in the names stand for global indices. A shape is a tuple of keys of :func:`sizes`.
    """

    mcore: str
    hf: tuple[tuple[str, tuple[str, ...]], ...]  # (name, shape) of each part, in the order of ``join``
    cut: Cut = "none"  # the axis that tensor parallelism divides; "none" is replicated
    join: Join = "copy"
    # "copy":    the tensor itself.
    # "qkv":     for each query group its query heads, its key head, its value head; a rank holds whole groups.
    # "gate_up": all gate rows, then all up rows; a rank holds its gate rows, then its up rows.


def sizes(model: ModelConfig) -> dict[str, int]:
    """What the shape keys of a :class:`Row` mean for ``model``."""
    return {
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "q": model.num_attention_heads * model.head_dim,
        "kv": model.num_key_value_heads * model.head_dim,
        "head": model.head_dim,
        "ffn": model.ffn_hidden_size,
        "experts": model.num_experts,
        "expert_ffn": model.moe_ffn_hidden_size,
    }


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter of one model, unsharded: a :class:`Row` with its indices filled in."""

    name: str  # global Megatron name
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (Hugging Face name, shape)
    cut: Cut
    join: Join

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts." in self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unsharded Megatron tensor: the parts stacked along their first axis."""
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def fill(row: Row, model: ModelConfig, *, layer: int, expert: int) -> Weight:
    """``row`` with its indices and sizes filled in."""
    size = sizes(model)
    parts = tuple((n.format(layer=layer, expert=expert), tuple(size[k] for k in shape)) for n, shape in row.hf)
    return Weight(row.mcore.format(layer=layer, expert=expert), parts, row.cut, row.join)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


def split_indices(name: str) -> tuple[str, int, int]:
    """``decoder.layers.3.mlp.experts.7.x`` -> (``decoder.layers.{layer}.mlp.experts.{expert}.x``, 3, 7); absent: -1."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    pattern = _EXPERT.sub(".mlp.experts.{expert}.", _LAYER.sub("decoder.layers.{layer}.", name))
    return pattern, int(layer[1]) if layer else -1, int(expert[1]) if expert else -1


@functools.lru_cache(maxsize=8)
def expand(rows: tuple[Row, ...], model: ModelConfig) -> dict[str, Weight]:
    """All weights of a model by their Megatron name, in the order of the rows, layer by layer."""
    head = [row for row in rows if "{layer}" not in row.mcore]
    body = [row for row in rows if "{layer}" in row.mcore]
    weights = [fill(row, model, layer=-1, expert=-1) for row in head]
    for layer in range(model.num_layers):
        for row in body:
            experts = range(model.num_experts) if "{expert}" in row.mcore else (-1,)
            weights += [fill(row, model, layer=layer, expert=expert) for expert in experts]
    return {weight.name: weight for weight in weights}
