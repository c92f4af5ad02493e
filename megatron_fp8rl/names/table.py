"""The terms in which a model family describes its weights. Pure; no torch."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_fp8rl.config import LayerKind, ModelConfig

Cut = Literal["none", "rows", "columns"]
Join = Literal["copy", "qkv", "gate_up"]
DType = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Row:
    """One kind of Megatron parameter and its Hugging Face tensors. ``{layer}`` and ``{expert}`` in names stand for
    global indices. A shape is a tuple of keys of :func:`sizes`."""

    mcore: str
    hf: tuple[tuple[str, tuple[str, ...]], ...]  # (name, shape) of each part, in the order of ``join``
    cut: Cut = "none"  # the axis sharded by tensor parallelism; "none" is replicated
    join: Join = "copy"
    # "copy": the tensor itself. "qkv": for each query group its query heads, key head and value head; a rank has whole
    # groups, or an equal share of a group's rows. "gate_up": the gate rows, then the up rows, also on each rank.
    layers: Literal["all", "attention", "mla", "gdn", "dense", "moe"] = "all"  # by a part of their kind; with {layer}
    unit: str = ""  # key of :func:`sizes`: the number of indivisible units along the sharded axis
    padded: bool = False  # ranks hold equal numbers of rows; an uneven axis is zero-padded at the end
    dtype: DType = "bfloat16"  # in a BF16 checkpoint
    copies: tuple[str, ...] = ()  # further Hugging Face names of the same tensor
    whole_in_engine: bool = False  # engine ranks do not divide what the trainer's ranks do


@functools.lru_cache(maxsize=8)
def sizes(model: ModelConfig) -> dict[str, int]:
    """The sizes of the shape keys and units of a :class:`Row` for ``model``; read-only."""
    heads = model.num_attention_heads
    shapes = {
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "2_hidden": 2 * model.hidden_size,
        "heads": heads,
        "key heads": model.num_key_value_heads,
        "q": heads * model.head_dim,
        "q_and_gate": 2 * heads * model.head_dim,
        "kv": model.num_key_value_heads * model.head_dim,
        "head": model.head_dim,
        "ffn": model.ffn_hidden_size,
        "experts": model.num_experts,
        "expert_ffn": model.moe_ffn_hidden_size,
        "shared_ffn": model.num_shared_experts * model.moe_ffn_hidden_size,
        "1": 1,
    }
    if model.mla is not None:
        mla = model.mla
        shapes |= {
            "q_latent": mla.q_lora_rank or 0,
            "kv_latent": mla.kv_lora_rank,
            "kv_latent_and_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "k_nope_and_v": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "v": heads * mla.v_head_dim,
        }
    if model.gdn is not None:
        gdn = model.gdn
        keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
        shapes |= {
            "gdn_qkvz": 2 * (keys + values),
            "gdn_ba": 2 * gdn.num_value_heads,
            "gdn_qkv": 2 * keys + values,
            "gdn_v": values,
            "gdn_head": gdn.value_head_dim,
            "gdn_heads": gdn.num_value_heads,
            "gdn key heads": gdn.num_key_heads,
            "gdn_width": gdn.conv_width,
        }
    return shapes


@dataclass(frozen=True)
class Weight:
    name: str  # global Megatron name
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (Hugging Face name, shape)
    cut: Cut
    join: Join
    unit: tuple[str, int] = ("", 0)  # the indivisible unit, and the number of units
    padded: bool = False
    dtype: DType = "bfloat16"
    copies: tuple[str, ...] = ()  # further Hugging Face names of the same tensor
    whole_in_engine: bool = False

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts." in self.name

    @property
    def axis(self) -> int:
        """The axis sharded by tensor parallelism; 0 for a replicated weight."""
        return 1 if self.cut == "columns" else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unsharded Megatron tensor: the parts stacked along their first axis."""
        shapes = [shape for _, shape in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def fill(row: Row, model: ModelConfig, *, mcore: str = "", layer: int, expert: int) -> Weight:
    """``row`` with its indices and sizes filled in; ``mcore`` replaces its Megatron name."""
    size = sizes(model)
    parts = tuple((n.format(layer=layer, expert=expert), tuple(size[k] for k in shape)) for n, shape in row.hf)
    name = (mcore or row.mcore).format(layer=layer, expert=expert)
    unit = (row.unit, size[row.unit]) if row.unit else ("", 0)
    copies = tuple(copy.format(layer=layer) for copy in row.copies)
    return Weight(name, parts, row.cut, row.join, unit, row.padded, row.dtype, copies, row.whole_in_engine)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@functools.lru_cache(maxsize=1 << 17)
def split_indices(name: str) -> tuple[str, int, int]:
    """``decoder.layers.3.mlp.experts.7.x`` -> (``decoder.layers.{layer}.mlp.experts.{expert}.x``, 3, 7); absent: -1."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    pattern = _EXPERT.sub(".mlp.experts.{expert}.", _LAYER.sub("decoder.layers.{layer}.", name))
    return pattern, int(layer[1]) if layer else -1, int(expert[1]) if expert else -1


def rows_of(rows: Iterable[Row], kind: LayerKind) -> list[Row]:
    """The rows of a layer of this kind."""
    parts = ("all", kind.mixer, kind.feed_forward)
    return [row for row in rows if "{layer}" in row.mcore and row.layers in parts]


def expand(rows: tuple[Row, ...], model: ModelConfig) -> dict[str, Weight]:
    """All weights of a model by their Megatron name: those outside layers, then layer by layer in row order."""
    weights = [fill(row, model, layer=-1, expert=-1) for row in rows if "{layer}" not in row.mcore]
    for layer in range(model.num_layers):
        for row in rows_of(rows, model.layers[layer]):
            weights += _fill_experts(row, model, row.mcore, layer)
    return {weight.name: weight for weight in weights}


def axes(rows: tuple[Row, ...], model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The keys of :func:`sizes` of each axis of every tensor in a checkpoint, by its Hugging Face name, without
    multi-token prediction layers."""
    named = {name: keys for row in rows if "{layer}" not in row.mcore for name, keys in row.hf}
    for layer in range(model.num_layers):
        for row in rows_of(rows, model.layers[layer]):
            for expert, (name, keys) in itertools.product(_experts(row.mcore, model), row.hf):
                named[name.format(layer=layer, expert=expert)] = keys
    return named


def _experts(mcore: str, model: ModelConfig) -> Sequence[int]:
    return range(model.num_experts) if "{expert}" in mcore else (-1,)


def _fill_experts(row: Row, model: ModelConfig, mcore: str, layer: int) -> Iterator[Weight]:
    for expert in _experts(mcore, model):
        yield fill(row, model, mcore=mcore, layer=layer, expert=expert)


def draft_layer_name(index: int) -> str:
    """Megatron's name of the decoder layer in a multi-token prediction layer."""
    return f"mtp.layers.{index}.mtp_model_layer"


def mtp_rows(rows: Iterable[Row], extra: Iterable[Row], index: int) -> list[Row]:
    """The rows of a multi-token prediction layer: the ``extra`` ones, and ``rows`` of its decoder layer."""
    around = [replace(row, mcore=f"mtp.layers.{index}.{row.mcore}") for row in extra]
    renamed = ((row, row.mcore.replace("decoder.layers.{layer}", draft_layer_name(index))) for row in rows)
    return around + [replace(row, mcore=name) for row, name in renamed]


def expand_mtp(rows: tuple[Row, ...], extra: tuple[Row, ...], model: ModelConfig) -> dict[str, Weight]:
    """Weights of the multi-token prediction layers. In the checkpoint such a layer is layer ``num_layers + index``."""
    weights: list[Weight] = []
    for index in range(model.num_mtp_layers):
        layer = model.num_layers + index
        for row in mtp_rows(rows_of(rows, model.layers[layer]), extra, index):
            weights += _fill_experts(row, model, row.mcore, layer)
    return {weight.name: weight for weight in weights}
