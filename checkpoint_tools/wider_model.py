"""The sizes of a widened model, and its weights, so that the function stays the same.

In:  an architecture and rows of its tensors.
Out: an architecture whose matrices tile, and rows of its tensors.

Every added row and column is zero, so its contribution and its gradient are zero.

- Hidden size: norms average over more features, so norm weights are multiplied by sqrt(H / H2) and epsilon by H / H2.
- Head size: rotary pair i becomes pair i * D2 / D, which has its frequency. Queries are multiplied by sqrt(D2 / D),
  because attention divides by sqrt(D2).
- Key/value heads: an added head has zero values, and the output projection has zeros for its query heads.
- Norms of query and key heads: their inputs are multiplied so that the new epsilon has the effect of the old one.

Shapes: H = hidden size, D = head size; H2, D2 = those of the widened model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import blocks, registry
from megatron_fp8rl.names.table import sizes

_HEAD_FACTORS = (1, 2, 4)  # of the head size, in the search
_MORE_KV_HEADS = BLOCK // 2  # at most, in the search
_MORE_HIDDEN = 4  # times the hidden size, in the search
_NOT_TILED = {"vocab", "experts"}  # axes of matrices that are never FP8
_QUERY, _KEY, _ = blocks.ENGINE_FUSIONS["qkv_proj"]


def _rounded_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def untiled(model: ModelConfig) -> dict[str, int]:
    """The sizes of FP8 matrices that are no multiple of a block, by their keys in the name table."""
    keys = {
        key for axes in registry.hf_axes(replace(model, num_mtp_layers=0)).values() if len(axes) == 2 for key in axes
    }
    return {key: size for key, size in sizes(model).items() if key in keys - _NOT_TILED and size % BLOCK}


def widened(model: ModelConfig, head_dim: int | None = None) -> ModelConfig:
    """The model with the fewest weights that has this function and whose matrices tile.

    Args:
        model: the architecture to widen.
        head_dim: size of its heads; None: the size that needs the fewest weights.

    Raises:
        ValueError: a part of the model cannot be widened, or ``head_dim`` is impossible.
    """
    if model.mla is not None:
        raise ValueError(f"family {model.family}: the sizes of latent attention cannot be widened; train it in BF16")
    if model.gdn is not None:
        raise ValueError(f"family {model.family}: the sizes of gated delta nets cannot be widened; train it in BF16")
    if registry.norms_all_heads(model):
        raise ValueError(f"family {model.family}: heads that share a norm cannot be widened; train it in BF16")
    head_dims = [model.head_dim * factor for factor in _HEAD_FACTORS]
    is_by_pair = model.rope_scaling is not None and model.rope_scaling.kind in ("yarn", "longrope")
    if model.rotary_fraction != 1.0 or is_by_pair:
        # The rest of each head would have to stay behind the rotated part; YaRN rounds the bounds of its ramp, and
        # longrope has a number for each pair.
        head_dims = head_dims[:1]
    if head_dim is not None:
        if (
            head_dim < model.head_dim
            or head_dim % model.head_dim
            or (head_dim not in head_dims[:1] and len(head_dims) == 1)
        ):
            possible = ", ".join(map(str, head_dims))
            raise ValueError(f"--head_dim {head_dim}: rotary frequencies would change; choose one of {possible}")
        head_dims = [head_dim]
    candidates = []
    for dim in head_dims:
        for num_kv_heads in range(model.num_key_value_heads, model.num_key_value_heads + _MORE_KV_HEADS + 1):
            if num_kv_heads * dim % BLOCK == 0 and (wider := _with_heads(model, dim, num_kv_heads)) is not None:
                candidates.append(wider)
    if not candidates:
        raise ValueError(f"family {model.family}: no sizes that tile were found; train it in BF16")
    return min(candidates, key=_layer_weights)


def _with_heads(model: ModelConfig, head_dim: int, num_kv_heads: int) -> ModelConfig | None:
    """The model with these heads and the smallest hidden size that its family allows; None without such a size."""
    first = _rounded_up(model.hidden_size)
    for hidden_size in range(first, _MORE_HIDDEN * first + 1, BLOCK):
        wider = replace(
            model,
            hidden_size=hidden_size,
            head_dim=head_dim,
            num_key_value_heads=num_kv_heads,
            num_attention_heads=model.num_attention_heads // model.num_key_value_heads * num_kv_heads,
            ffn_hidden_size=_rounded_up(model.ffn_hidden_size),
            moe_ffn_hidden_size=_rounded_up(model.moe_ffn_hidden_size),
            norm_eps=model.norm_eps * model.hidden_size / hidden_size,
        )
        if family := _family(wider):
            return replace(wider, family=family)
    return None


def _family(model: ModelConfig) -> str | None:
    """The family in which transformers and vLLM read these sizes; None if there is none."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    if registry.FAMILIES[model.family].derives_head_dim:
        return model.family if model.head_dim * heads == hidden else None
    if model.family == "llama" and hidden % heads:  # transformers refuses it
        return "mistral" if model.rope_scaling is None else None
    return model.family


def _layer_weights(model: ModelConfig) -> tuple[int, int]:
    layer = replace(model, num_layers=1 + model.first_dense_layers)
    return sum(map(math.prod, registry.hf_tensors(layer).values())), model.head_dim


@dataclass
class Widening:
    """The tensors of ``wider`` from those of ``model``."""

    model: ModelConfig
    wider: ModelConfig
    _axes: dict[str, tuple[str, ...]] = field(init=False, repr=False)
    _indices: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self):
        self._axes = registry.hf_axes(self.model)

    def rows(self, name: str, first: int, end: int, read: Callable[[int, int], Tensor], dtype: torch.dtype) -> Tensor:
        """Rows [first, end) of a tensor of the wider model.

        Args:
            name: Hugging Face name of the tensor.
            first: first row.
            end: row after the last one.
            read: returns rows of the tensor in the source; its ranges follow each other.
            dtype: type of the result. Factors are multiplied in float64 and rounded once.
        """
        axes, new = self._axes[name], sizes(self.wider)
        at = self._index(axes[0])
        low, high = torch.searchsorted(at, torch.tensor([first, end])).tolist()
        result = torch.zeros((end - first, *(new[key] for key in axes[1:])), dtype=dtype)
        source, factor = read(low, high), self._factor(name, axes)
        if factor != 1.0:
            source = source.double() * factor
        rows = at[low:high] - first
        if len(axes) == 1:
            result[rows] = source.to(dtype)
        else:
            result[rows[:, None], self._index(axes[1])] = source.to(dtype)
        return result

    def _index(self, key: str) -> Tensor:
        """The new position of each index along an axis, ascending."""
        if key not in self._indices:
            old, dim, wider_dim = sizes(self.model)[key], self.model.head_dim, self.wider.head_dim
            index = torch.arange(old)
            if key in ("q", "kv", "head"):
                pair = torch.arange(dim // 2) * (wider_dim // dim)
                in_head = torch.cat([pair, wider_dim // 2 + pair]) if wider_dim != dim else torch.arange(dim)
                index = (torch.arange(old // dim)[:, None] * wider_dim + in_head).flatten()
            self._indices[key] = index
        return self._indices[key]

    def _factor(self, name: str, axes: tuple[str, ...]) -> float:
        hidden, head = self.model.hidden_size / self.wider.hidden_size, self.wider.head_dim / self.model.head_dim
        if axes == ("hidden",):
            if name.endswith(".bias"):  # added to the residual stream
                return 1.0
            return math.sqrt(hidden)
        module = name.split(".")[-2]
        if self.model.qk_norm:
            # x * sqrt(hidden * head), normed over D2 features with epsilon * hidden, is sqrt(head) times x normed over
            # D features with epsilon. Attention needs sqrt(head) in the product of query and key.
            factors = {_QUERY: hidden * head, _KEY: hidden * head, "k_norm": 1 / head}
            return math.sqrt(factors.get(module, 1.0))
        return math.sqrt(head) if module == _QUERY else 1.0
