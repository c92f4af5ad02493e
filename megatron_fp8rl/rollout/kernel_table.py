"""Finished bytes, written straight into the tensors that an engine's kernels read.

In:  parts of Hugging Face tensors in memory, in the form that the kernels hold. Out: the same bytes in the kernels'
     tensors, whose addresses never change, so that CUDA graphs stay valid.
Runs in every engine worker. Where bytes go is worked out once; an update is then a few calls for each round: parts that
are neighbours at both ends, as the stacked experts of a layer are, make one copy, and all others of a round share
launches.

What an engine computes from its weights is refreshed after an update: the dequantized weights of the CPU kernels, and
the two factors of latent attention, in place (vLLM would bind new tensors, which captured graphs do not read). An
engine that slept at level 2 has lost both, and all weights; a publication brings back everything that has a name in
the checkpoint. Rotary caches and attention scales are buffers, which vLLM saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_fp8rl.rollout.worker import kernel_weights
from megatron_fp8rl.weights.plan import Range

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
        """Move new factors of latent attention into the tensors that captured graphs read."""
        for module, factors in zip(self._latent, self._factors):
            for name, tensor in factors.items():
                new = getattr(module, name)
                if new is not tensor:
                    tensor.copy_(new)
                    setattr(module, name, tensor)
