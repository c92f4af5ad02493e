"""The weights that an engine's kernels read: their names, digests, and addresses for direct writes.

In: the worker's model with the tensors of vLLM's kernels (fused, sliced, partly FP8); parts of Hugging Face tensors.
Out: every tensor of this worker's slice under its Hugging Face name; its digest, which the trainer compares; new bytes
in the kernels' tensors. Their addresses never change, so CUDA graphs stay valid. Runs in every engine worker.

Addresses are computed once. Parts that are adjacent at both ends, such as the stacked experts of a layer, are one copy.
The other parts of a round share kernel launches.

After an update, tensors derived from weights are recomputed in place: the dequantized weights of the CPU kernels, and
the two factors of latent attention. (vLLM would bind new tensors, which captured graphs do not read.) After a reload,
the kernels of FP8 experts read the scales of their layer again. An engine that slept at level 2 loses weights and
derived tensors; a publication restores all weights. vLLM saves buffers: rotary caches and attention scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_fp8rl.names.blocks import ENGINE_FUSIONS, EXPERT_PROJECTIONS, FUSED_INTO
from megatron_fp8rl.names.registry import layer_of
from megatron_fp8rl.precision.formats import SCALE_SUFFIX, SCALE_SUFFIXES
from megatron_fp8rl.rollout.vllm_plugin.patches import expert_scale_descriptions
from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, prepare_values

# Parameter or buffer names that belong to a checkpoint. Others (rotary caches, attention scales) are computed.
_SCALES = f"weight{SCALE_SUFFIX}"
_ALL_SCALES = tuple(f"weight{suffix}" for suffix in SCALE_SUFFIXES)
_MATRICES = ("weight", *_ALL_SCALES)
_WEIGHTS = (*_MATRICES, "bias", "e_score_correction_bias", "A_log", "dt_bias", "sinks")
_OF_EXPERTS = (*_MATRICES, "bias")
_ATTRIBUTES = (*_WEIGHTS, *(f"{name}_{kind}" for name in ("w13", "w2") for kind in _OF_EXPERTS))
# Modules of vLLM's gpt-oss, and of its multi-token prediction layers, with other names than in a checkpoint.
_MODULES = {
    re.compile(r"^(model\.layers\.\d+)\.mtp_block(?=\.|$)"): r"\1",
    re.compile(r"^(model\.layers\.\d+)\.attn(?=\.|$)"): r"\1.self_attn",
    re.compile(r"^model\.embedding$"): "model.embed_tokens",
}
_LATENT_FACTORS = ("W_UV", "W_UK_T", "up_weight")


def _tensor(module: nn.Module, name: str, path: str) -> Tensor | None:
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor):
        return None
    if tensor.numel() == 0:
        raise RuntimeError(
            f"{path}.{name}: the engine's kernel has repacked this weight and deleted it, so it cannot be verified; "
            "start the engine through megatron_fp8rl.rollout.vllm_plugin.server, which keeps weights readable"
        )
    return tensor.detach()


def _as_sent(weight: Tensor) -> Tensor:
    """Convert a weight to the dtype that was sent: some routers and A_log are FP32 copies of BF16 weights."""
    if weight.dtype != torch.float32:
        return weight
    rounded = weight.bfloat16()
    return rounded if torch.equal(rounded.float(), weight) else weight


def _fused_parts(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices, scales and biases that a fused linear stacks."""
    parent, _, leaf = path.rpartition(".")
    names, rows = ENGINE_FUSIONS[leaf], list(module.output_partition_sizes)
    if len(rows) == 1:  # Qwen3-Next's checkpoint has the fused matrix
        names = (leaf,)
    several = len(rows) - len(names) + 1  # vLLM divides the first matrix of Qwen3.5's delta nets
    rows = [sum(rows[:several]), *rows[several:]]
    for kind in _WEIGHTS:
        tensor = _tensor(module, kind, path)
        if tensor is not None:
            block = getattr(module, "weight_block_size", (1,))[0] if kind in _ALL_SCALES else 1
            sizes = [-(-n // block) for n in rows]
            for name, part in zip(names, tensor.split(sizes), strict=True):
                yield f"{parent}.{name}.{kind}", part


def _expert_parts(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield gate, up and down of this worker's experts, from ``w13`` [E, 2I, H] and ``w2`` [E, H, I]."""
    parent = path.removesuffix(".routed_experts")
    gate, up, down = EXPERT_PROJECTIONS[parent.split(".")[-2]]
    num_local = module.w13_weight.shape[0]
    experts = list(range(num_local))
    if getattr(module, "expert_map", None) is not None:
        local_experts = [(local, e) for e, local in enumerate(module.expert_map.tolist()) if local >= 0]
        experts = [e for _, e in sorted(local_experts)]
    for kind in _OF_EXPERTS:
        w13, w2 = _tensor(module, f"w13_{kind}", path), _tensor(module, f"w2_{kind}", path)
        if w13 is None or w2 is None:
            continue
        half = w13.shape[1] // 2
        for local, expert in enumerate(experts):
            yield f"{parent}.{expert}.{gate}.{kind}", w13[local, :half]
            yield f"{parent}.{expert}.{up}.{kind}", w13[local, half:]
            yield f"{parent}.{expert}.{down}.{kind}", w2[local]


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the names they have without vLLM's wrappers for adapters, which are left out. Those of the
    model that drafts follow, without the embedding and head that both share."""
    seen: set[nn.Module] = set()
    for part in filter(None, (model, draft_model_of(model))):
        for path, module in part.named_modules(seen):
            if "base_layer" not in module._modules:
                yield path.replace(".base_layer", ""), module


def draft_model_of(model: nn.Module) -> nn.Module | None:
    """The multi-token prediction layers that draft for ``model``: see ``patches_speculation.py``."""
    return getattr(model, "drafts", (None,))[0]


def named_behind_wrappers(model: nn.Module, name: str) -> str:
    """Return the name of a weight for the model's ``load_weights``, which looks its parameters up by name."""
    path, _, kind = name.rpartition(".")
    try:
        module = model.get_submodule(engine_module_of(name))
    except AttributeError:
        return name
    return f"{path}.base_layer.{kind}" if "base_layer" in module._modules else name


def kernel_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, this worker's slice) of every weight that ``model`` uses, as views of the kernels'
    memory. Raises RuntimeError if a kernel has no readable copy of a weight."""
    vocabularies: set[int] = set()
    for path, module in named_layers(model):
        for pattern, published in _MODULES.items():
            path = pattern.sub(published, path)
        leaf = path.rpartition(".")[2]
        if hasattr(module, "shard_indices"):
            if id(module.weight) in vocabularies:
                continue  # a tied output head, published as the embedding
            vocabularies.add(id(module.weight))
        if leaf in ENGINE_FUSIONS:
            yield from _fused_parts(module, path)
        elif hasattr(module, "w13_weight"):
            yield from _expert_parts(module, path)
        else:
            for kind in _WEIGHTS:
                tensor = _tensor(module, kind, path)
                if tensor is None:
                    continue
                if hasattr(module, "shard_indices"):  # a vocabulary padded by vLLM
                    tensor = tensor[: module.shard_indices.num_org_elements]
                yield f"{path}.{kind}", tensor


def engine_module_of(name: str) -> str:
    """Return the engine's module that contains a tensor of this Hugging Face name."""
    path = name.rpartition(".")[0]
    if ".experts." in path:
        return path.partition(".experts.")[0] + ".experts"
    parent, dot, leaf = path.rpartition(".")
    return f"{parent}{dot}{FUSED_INTO.get(leaf, leaf)}"


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Return address, shape, strides and dtype; None for other objects than tensors."""
    if not isinstance(tensor, Tensor):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_Placed = tuple[nn.Module, str, tuple[Any, ...]]  # (module, attribute, place)


def has_kernel_weights(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), Tensor) for name in _ATTRIBUTES)


def _places(model: nn.Module) -> list[_Placed]:
    modules = (module for _, module in named_layers(model))
    placed = ((module, name, _place(getattr(module, name, None))) for module in modules for name in _ATTRIBUTES)
    return [(module, name, place) for module, name, place in placed if place is not None]


class KernelDigests:
    """Digests :func:`kernel_weights` repeatedly, and computes names and views only once: with thousands of experts
    these take longer than the digests, while the engine is paused."""

    def __init__(self) -> None:
        self._table: KernelTable | None = None
        self._num_reloads = 0

    def __call__(self, model: nn.Module, num_reloads: int = 0) -> NamedDigests:
        """Return digests of the current weights by Hugging Face name. Raises like :func:`kernel_weights`."""
        self.table(model, num_reloads)
        values = np.zeros(len(self._names.ordered), dtype=np.uint64)
        values[self._fixed] = self._digests()
        if self._converted:
            values[list(self._converted)] = prepare_values([_as_sent(t) for t in self._converted.values()])()
        return NamedDigests(self._names, values)

    def table(self, model: nn.Module, num_reloads: int = 0) -> KernelTable:
        """Return the table of weights; build it again if weights have moved, or after a reload that changed their set.
        Raises like :func:`kernel_weights`."""
        table, is_reloaded = self._table, num_reloads != self._num_reloads
        if table is None or not table.is_current(model, is_reloaded=is_reloaded):
            self._table = None
            table = KernelTable(model)
            self._prepare(table.views)
            self._table = table
        self._num_reloads = num_reloads
        return table

    def _prepare(self, weights: Mapping[str, Tensor]) -> None:
        self._names = Names(weights)
        ordered = [(name, weights[name]) for name in self._names.ordered]
        # The result of _as_sent depends on the content of the weights.
        is_converted = [name.endswith((".weight", ".A_log")) and t.dtype == torch.float32 for name, t in ordered]
        self._converted = {i: ordered[i][1] for i, converted in enumerate(is_converted) if converted}
        self._fixed = np.flatnonzero(~np.array(is_converted, dtype=bool))
        self._digests = prepare_values([ordered[i][1] for i in self._fixed])


def first_layers_by_kind(model: nn.Module) -> frozenset[int]:
    """Return the first layer of each kind. vLLM's loaders treat layers of one kind alike.

    Layers of a kind have the same choice of experts and modules of the same classes, with tensors of the same names,
    shapes, strides and dtypes. Modules without weights, as the first layer's rotary embedding, are ignored.
    """
    kinds: dict[int, list[Any]] = {}
    for path, module in named_layers(model):
        number = layer_of(path)
        if number is not None and has_kernel_weights(module):
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            experts = getattr(module, "expert_map", None)
            layout = [(name, t.shape, t.stride(), t.dtype) for name, t in tensors]
            chosen = None if experts is None else tuple(experts.tolist())
            name = path.replace(f"layers.{number}", "", 1)
            kinds.setdefault(number, []).append((name, type(module), tuple(layout), chosen))
    first: dict[tuple[Any, ...], int] = {}
    for number in sorted(kinds):
        first.setdefault(tuple(kinds[number]), number)
    return frozenset(first.values())


class UnwritableKernel(RuntimeError):
    """An engine's kernels store a weight in another form than the one sent."""


class KernelTable:
    """Views of all weights of a model: ``views`` by Hugging Face name, including scales."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.views = dict(kernel_weights(model))
        self._places = _places(model)

    def is_current(self, model: nn.Module, *, is_reloaded: bool) -> bool:
        """Whether ``model`` is the same and no weight has moved; after a reload, also whether none was added."""
        if model is not self._model:
            return False
        if is_reloaded:
            return _places(model) == self._places
        return all(_place(getattr(module, name, None)) == place for module, name, place in self._places)

    def names(self) -> set[str]:
        return set(self.views)

    def place(
        self, name: str, dtype: torch.dtype, kept_shape: Sequence[int], axis: int, start: int, size: int
    ) -> Tensor:
        """Return the view of ``size`` rows or columns of this worker's slice of a weight, starting at ``start``. Raises
        UnwritableKernel with the name if the kernels' tensor has another shape or dtype, or does not exist."""
        view = self.views.get(name)
        same_type = view is not None and (view.dtype == dtype or {view.dtype, dtype} == {torch.float32, torch.bfloat16})
        if view is None or tuple(view.shape) != tuple(kept_shape) or not same_type:
            present = "nothing" if view is None else f"{view.dtype} {list(view.shape)}"
            raise UnwritableKernel(
                f"{name}: sent as {dtype} {list(kept_shape)}, but the engine's kernels have {present}; choose "
                "other kernels (precision.kernels)"
            )
        return view.narrow(axis, start, size)


class DerivedTensors:
    """Tensors that a model computes from its weights and stores outside its parameters."""

    def __init__(self, model: nn.Module, act_dtype: torch.dtype):
        self._act_dtype = act_dtype
        derived = ("dequantized_weight", "w13_dequantized", "kernel_scales")
        modules = [module for _, module in named_layers(model)]
        self._converted = [m for m in modules if any(hasattr(m, name) for name in derived)]
        found = [(m, {name: getattr(m, name, None) for name in _LATENT_FACTORS}) for m in modules]
        found = [(m, {name: x for name, x in factors.items() if isinstance(x, Tensor)}) for m, factors in found]
        self._latent = [m for m, factors in found if factors]
        self._factors = [factors for _, factors in found if factors]
        self._experts = [m for m in modules if hasattr(m, f"w13_{_SCALES}")]

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute all derived tensors after direct writes."""
        for module in self._converted:
            module.quant_method.process_weights_after_loading(module)
        self.keep_in_place()

    @torch.no_grad()
    def keep_in_place(self) -> None:
        """Copy tensors that vLLM has newly bound into those that captured graphs read. After vLLM's reload, kernels of
        FP8 experts read scales of a copy of the layer, which a direct update would not change. Factors of latent
        attention are computed here, because a reload leaves out modules without weights of their own."""
        for module in self._experts:
            for description, name in zip(expert_scale_descriptions(module), ("w13", "w2")):
                _share_scale(description, getattr(module, f"{name}_{_SCALES}"))
        for module, factors in zip(self._latent, self._factors):
            module.process_weights_after_loading(self._act_dtype)
            for name, tensor in factors.items():
                new = getattr(module, name)
                if new is not tensor:
                    tensor.copy_(new)
                    setattr(module, name, tensor)


def _share_scale(description: Any, layer_scale: Tensor) -> None:
    scale = description.scale
    if not isinstance(scale, Tensor) or scale.data_ptr() == layer_scale.data_ptr():
        return
    if scale.shape != layer_scale.shape or scale.dtype != layer_scale.dtype or scale.stride() != layer_scale.stride():
        raise UnwritableKernel(
            f"scales of experts: the kernel reads {scale.dtype} {list(scale.shape)}, the layer has {layer_scale.dtype} "
            f"{list(layer_scale.shape)}; choose another precision.kernels.engine_experts"
        )
    description.scale = layer_scale
