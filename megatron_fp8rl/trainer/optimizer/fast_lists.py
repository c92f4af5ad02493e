"""Megatron-Core's distributed optimizer without per-parameter Python loops in a step.

In: a DistributedOptimizer. Out: the same object, whose gradients, norm and copies to the model's parameters use cached
lists. Runs on: every trainer rank; communication is Megatron-Core's.

A rank of an MoE model has about a thousand parameters. Megatron-Core looks up each one's range in its buffers every
time and launches a copy for each, and the GPU idles for most of that. Results are bitwise identical. Lists hold views
of the buffers, which stay valid when storages are offloaded and restored (``offload.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from megatron_fp8rl.kernels.compat import copy_together
from megatron_fp8rl.trainer.compat.megatron import ListableOptimizer
from megatron_fp8rl.upstream import patches

Pairs = tuple[list[Tensor], list[Tensor]]


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="overrides get_grads_for_grad_norm, which checks for every parameter whether it counts",
    remove_when="DistributedOptimizer caches the ranges of its parameters",
)
class ListedOptimizer(ListableOptimizer):
    """A DistributedOptimizer with cached lists; see :meth:`adopt`."""

    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(model parameter, master weights) for each parameter with master weights on this rank."""
        for model_groups, master_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for models, masters in zip(model_groups, master_groups, strict=True):
                yield from zip(models, masters, strict=True)

    @cached_property
    def _gradients(self) -> Pairs:
        """Master weights and the matching slices of the gradient buffer."""
        masters, gradients = [], []
        for parameter, master in self._pairs():
            place = self.place_of(parameter)["param"]
            masters.append(master)
            gradients.append(parameter.main_grad.view(-1)[place.start : place.end])
        return masters, gradients

    @cached_property
    def _weights(self) -> dict[torch.dtype, Pairs]:
        """Slices of the parameter buffers that this rank updates and their master weights, by dtype."""
        found: dict[torch.dtype, Pairs] = {}
        for parameter, master in self._pairs():
            place = self.place_of(parameter)["gbuf_world_in_bucket"]
            buffer, _, bucket = self.model_param_gbuf_map[parameter]
            weights = self.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]
            parts, masters = found.setdefault(weights.dtype, ([], []))
            parts.append(weights)
            masters.append(master)
        return found

    @cached_property
    def _counted(self) -> Sequence[Tensor]:
        """Master weights whose gradients count toward the norm on this rank, without duplicates across ranks."""
        everything = super().get_grads_for_grad_norm
        kept = {gradient.data_ptr() for gradient in everything() if gradient.numel()}
        return [master for master in self.get_parameters() if master.grad.data_ptr() in kept and master.numel()]

    def set_master_gradients(self) -> None:
        for master, gradient in zip(*self._gradients, strict=True):
            master.grad = gradient

    def write_parameters(self) -> None:
        with torch.no_grad():
            for weights, masters in self._weights.values():
                copy_together(weights, masters)

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        if grad_norm_group is not None:
            return super().get_grads_for_grad_norm(grad_norm_group)
        return [master.grad for master in self._counted]
