"""What an engine worker can be asked: which weights does it really hold?

In:  the worker's model, as vLLM's kernels read it: fused, sliced, some of it in FP8.
Out: a digest of every tensor under its Hugging Face name, of this worker's slice.
Runs in every engine worker: vLLM mixes :class:`WorkerExtension` into its worker class (``worker_extension_cls``).
Nothing here knows what was sent; the trainer compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_fp8rl.config import FP8_BLOCK
from megatron_fp8rl.rollout.vllm_plugin.kv_cache import set_kv_scales
from megatron_fp8rl.rollout.vllm_plugin.patches import allow_new_update
from megatron_fp8rl.rollout.vllm_plugin.probe import Probe
from megatron_fp8rl.weight_sync.digest import NamedDigests, Names, prepare_values

# Parameter or buffer names that belong to a checkpoint. Others (rotary caches, attention scales) are computed.
_MATRICES = ("weight", "weight_scale_inv")
_WEIGHTS = (*_MATRICES, "bias", "e_score_correction_bias")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_EXPERT = {"block_sparse_moe": ("w1", "w3", "w2")}  # gate, up and down, by the name of their parent's parent


def _tensor(module: nn.Module, name: str, path: str) -> Tensor | None:
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor):
        return None
    if tensor.numel() == 0:
        raise RuntimeError(
            f"{path}.{name}: the engine's kernel has repacked this weight and dropped it, so it cannot be verified; "
            "start the engine through megatron_fp8rl.rollout.vllm_plugin.server, which keeps weights readable"
        )
    return tensor.detach()


def _as_sent(weight: Tensor) -> Tensor:
    """A weight in the type that it travels in: some routers keep an FP32 copy of their BF16 weight."""
    if weight.dtype != torch.float32:
        return weight
    rounded = weight.bfloat16()
    return rounded if torch.equal(rounded.float(), weight) else weight


def _fused_parts(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """The matrices that a fused linear stacks, and their stacked scales and biases."""
    parent, _, leaf = path.rpartition(".")
    rows = list(module.output_partition_sizes)
    for kind in _WEIGHTS:
        tensor = _tensor(module, kind, path)
        if tensor is not None:
            sizes = [-(-n // FP8_BLOCK) for n in rows] if kind == "weight_scale_inv" else rows
            for name, part in zip(_FUSED[leaf], tensor.split(sizes), strict=True):
                yield f"{parent}.{name}.{kind}", part


def _expert_parts(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    """Gate, up and down of every expert that this worker holds, from ``w13`` [E, 2I, H] and ``w2`` [E, H, I]."""
    parent = path.removesuffix(".routed_experts")
    gate, up, down = _EXPERT.get(parent.split(".")[-2], ("gate_proj", "up_proj", "down_proj"))
    num_local = module.w13_weight.shape[0]
    experts = list(range(num_local))
    if getattr(module, "expert_map", None) is not None:
        held = [(local, e) for e, local in enumerate(module.expert_map.tolist()) if local >= 0]
        experts = [e for _, e in sorted(held)]
    for kind in _MATRICES:
        w13, w2 = _tensor(module, f"w13_{kind}", path), _tensor(module, f"w2_{kind}", path)
        if w13 is None or w2 is None:
            continue
        half = w13.shape[1] // 2
        for local, expert in enumerate(experts):
            yield f"{parent}.{expert}.{gate}.{kind}", w13[local, :half]
            yield f"{parent}.{expert}.{up}.{kind}", w13[local, half:]
            yield f"{parent}.{expert}.{down}.{kind}", w2[local]


def kernel_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, this worker's slice) of every weight that ``model`` multiplies by.

    Slices are views of the memory that the kernels read, in the kernels' own type. Raises RuntimeError when a kernel no
    longer holds a weight in a readable form.
    """
    vocabularies: set[int] = set()
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if hasattr(module, "shard_indices"):
            if id(module.weight) in vocabularies:
                continue  # an output head that is tied, and named by its embedding
            vocabularies.add(id(module.weight))
        if leaf in _FUSED:
            yield from _fused_parts(module, path)
        elif hasattr(module, "w13_weight"):
            yield from _expert_parts(module, path)
        else:
            for kind in _WEIGHTS:
                tensor = _tensor(module, kind, path)
                if tensor is None:
                    continue
                if hasattr(module, "shard_indices"):  # a vocabulary that vLLM padded
                    tensor = tensor[: module.shard_indices.num_org_elements]
                yield f"{path}.{kind}", tensor


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Address, shape, strides and dtype; None of what is no tensor."""
    if not isinstance(tensor, Tensor):
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _places(model: nn.Module) -> list[tuple[nn.Module, str, tuple[Any, ...]]]:
    """(module, attribute, place) of everything that :func:`kernel_weights` looks at."""
    attributes = [*_WEIGHTS, *(f"{name}_{kind}" for name in ("w13", "w2") for kind in _MATRICES)]
    found = ((module, name, _place(getattr(module, name, None))) for module in model.modules() for name in attributes)
    return [(module, name, place) for module, name, place in found if place is not None]


class HeldDigests:
    """Digests of :func:`kernel_weights` as they were sent, again and again: names and views are worked out once.

    Thousands of experts take the host longer than their weights take the GPU, while the engine is paused.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, tuple[Any, ...]]] = []
        self._of: tuple[nn.Module, int] | None = None  # model and number of reloads

    def __call__(self, model: nn.Module, num_reloads: int = 0) -> NamedDigests:
        """By Hugging Face name, as the memory is now. Raises what :func:`kernel_weights` raises.

        Weights that have moved are found; attributes that are new, when ``num_reloads`` of the model has changed.
        """
        moved = any(_place(getattr(module, name, None)) != place for module, name, place in self._places)
        if moved or self._of != (model, num_reloads):
            self._of = None
            self._prepare(model)
            self._of = model, num_reloads
        values = np.zeros(len(self._names.ordered), dtype=np.uint64)
        values[self._fixed] = self._digests()
        if self._converted:
            values[list(self._converted)] = prepare_values([_as_sent(t) for t in self._converted.values()])()
        return NamedDigests(self._names, values)

    def _prepare(self, model: nn.Module) -> None:
        weights = dict(kernel_weights(model))
        self._names = Names(weights)
        ordered = [(name, weights[name]) for name in self._names.ordered]
        # What _as_sent makes of these depends on their content.
        is_converted = [name.endswith(".weight") and t.dtype == torch.float32 for name, t in ordered]
        self._converted = {i: ordered[i][1] for i, converted in enumerate(is_converted) if converted}
        self._fixed = np.flatnonzero(~np.array(is_converted, dtype=bool))
        self._digests = prepare_values([ordered[i][1] for i in self._fixed])
        self._places = _places(model)


class WorkerExtension(Probe):
    """Methods that vLLM adds to its worker; each is a target of ``collective_rpc``."""

    def abandon_update(self) -> None:
        """Give up an update that has begun: some other replica or the trainer failed in it. Harmless without one."""
        self.weight_transfer_engine.abandon()
        allow_new_update(self)

    def weight_digests(self, names: bool = True) -> dict[str, Any]:
        """{"rank": of this worker in its replica, "version": of the weights, "combined": one digest of all weights,
        "digests": {Hugging Face name: digest}}; the last without ``names`` is left out.

        ``version`` is None unless the last update completed; "load_s" is what receiving and writing its weights took.
        """
        held_digests = self.__dict__.setdefault("held_digests", HeldDigests())
        with torch.inference_mode():
            digests = held_digests(self.model_runner.model, getattr(self.weight_transfer_engine, "num_reloads", 0))
        report = {
            "rank": self.rank,
            "version": getattr(self.weight_transfer_engine, "version", None),
            "combined": digests.combined,
            "load_s": getattr(self.weight_transfer_engine, "load_s", 0.0),
        }
        return report | ({"digests": dict(digests)} if names else {})

    def set_kv_scales(self, scales: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Set the FP8 KV cache's (query, key, value) scales of every layer, while the engine is paused.

        Returns {"rank": of this worker in its replica, "scales": {layer: what its kernels read from now on}}. Layers are
        strings, as JSON has them. Raises what :func:`megatron_fp8rl.rollout.vllm_plugin.kv_cache.set_kv_scales` raises.
        """
        held = set_kv_scales(self.model_runner.model, {int(layer): row for layer, row in scales.items()})
        return {"rank": self.rank, "scales": {str(layer): row for layer, row in held.items()}}
