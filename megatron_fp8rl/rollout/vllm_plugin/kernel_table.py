"""Finished bytes, written straight into the tensors that an engine's kernels read.

In:  parts of Hugging Face tensors in memory, in the form that the kernels hold. Out: the same bytes in the kernels'
     tensors, whose addresses never change, so that CUDA graphs stay valid.
Runs in every engine worker. Where bytes go is worked out once; an update is then a few calls for each round: parts that
are neighbours at both ends, as the stacked experts of a layer are, make one copy, and all others of a round share
launches.

What an engine computes from its weights is refreshed after an update: the dequantized weights of the CPU kernels, and
the two factors of latent attention, in place (vLLM would bind new tensors, which captured graphs do not read). After a
reload the kernels of FP8 experts are led back to the scales that their layer holds. An engine that slept at level 2 has lost both, and all weights; a publication brings back everything that has a name in
the checkpoint. Rotary caches and attention scales are buffers, which vLLM saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp8rl.rollout.vllm_plugin.patches import expert_scale_descriptions
from megatron_fp8rl.rollout.vllm_plugin.worker import kernel_weights
from megatron_fp8rl.weight_sync.plan import Range

_LATENT_FACTORS = ("W_UV", "W_UK_T")


class UnwritableKernel(RuntimeError):
    """An engine's kernels hold a weight in another form than it is sent in."""


class KernelTable:
    """Where the parts of every weight lie in a model."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._views = dict(kernel_weights(model))

    def names(self) -> set[str]:
        """Hugging Face names of all weights, scales included."""
        return set(self._views)

    def place(
        self, name: str, dtype: torch.dtype, kept_shape: Sequence[int], axis: int, start: int, size: int
    ) -> Tensor:
        """The view that takes ``size`` rows or columns of this worker's slice of a weight, from ``start`` on.

        Raises UnwritableKernel that names the weight when the kernels hold something else under its name.
        """
        view = self._views.get(name)
        same_type = view is not None and (view.dtype == dtype or {view.dtype, dtype} == {torch.float32, torch.bfloat16})
        if view is None or tuple(view.shape) != tuple(kept_shape) or not same_type:
            held = "nothing" if view is None else f"{view.dtype} {list(view.shape)}"
            raise UnwritableKernel(
                f"{name}: sent as {dtype} {list(kept_shape)}, but the engine's kernels hold {held}; choose "
                "rollout.weight_update reload, or other kernels (rollout.linear_backend, rollout.moe_backend)"
            )
        return view.narrow(axis, start, size)


def narrowed(tensor: Tensor, axis: int, kept: Range) -> Tensor:
    """[start, stop) of an axis."""
    return tensor.narrow(axis, kept[0], kept[1] - kept[0])


class DerivedTensors:
    """What a model has computed from its weights and keeps outside its parameters."""

    def __init__(self, model: nn.Module, act_dtype: torch.dtype):
        self._act_dtype = act_dtype
        dequantized = ("dequantized_weight", "w13_dequantized")
        self._dequantized = [m for m in model.modules() if any(hasattr(m, name) for name in dequantized)]
        self._latent = [m for m in model.modules() if isinstance(getattr(m, _LATENT_FACTORS[0], None), Tensor)]
        self._factors = [{name: getattr(m, name) for name in _LATENT_FACTORS} for m in self._latent]
        self._experts = [m for m in model.modules() if hasattr(m, "w13_weight_scale_inv")]

    @torch.no_grad()
    def refresh(self) -> None:
        """After weights were written directly: compute everything again."""
        for module in self._dequantized:
            module.quant_method.process_weights_after_loading(module)
        for module in self._latent:
            module.process_weights_after_loading(self._act_dtype)
        self.keep_in_place()

    @torch.no_grad()
    def keep_in_place(self) -> None:
        """Move what vLLM has bound anew back into the tensors that captured graphs read.

        Its reload leaves the kernels of FP8 experts with scales of a copy of the layer: right after it they have the
        same values, but a direct update would not reach them.
        """
        for module in self._experts:
            for description, name in zip(expert_scale_descriptions(module), ("w13", "w2")):
                _share_scale(description, getattr(module, f"{name}_weight_scale_inv"))
        for module, factors in zip(self._latent, self._factors):
            for name, tensor in factors.items():
                new = getattr(module, name)
                if new is not tensor:
                    tensor.copy_(new)
                    setattr(module, name, tensor)


def _share_scale(description: Any, held: Tensor) -> None:
    """Have a kernel's description read the scales that the layer holds."""
    scale = description.scale
    if not isinstance(scale, Tensor) or scale.data_ptr() == held.data_ptr():
        return
    if scale.shape != held.shape or scale.dtype != held.dtype or scale.stride() != held.stride():
        raise UnwritableKernel(
            f"scales of experts: the kernel reads {scale.dtype} {list(scale.shape)}, the layer holds {held.dtype} "
            f"{list(held.shape)}; choose rollout.weight_update reload, or another rollout.moe_backend"
        )
    description.scale = held
