"""What an exporter needs of a policy, without a model, an optimizer or gradients: parameters alone.

In: a run's configuration and this rank's place among the trainer's ranks. Out: this rank's pieces of all parameters, in
the layout that the trainer's model has, drawn on the device. A model of 30 billion parameters then takes 61 GB of one
GPU, seconds to make, and leaves room for an engine beside it. Runs on every trainer rank; nothing is communicated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.names.table import Weight, split_indices

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel


@dataclass
class LightPolicy:
    """Stands in for :class:`megatron_fp8rl.trainer.policy.Policy` wherever weights are only read."""

    cfg: RunConfig
    parallel: Parallel
    tensors: dict[str, Tensor]  # this rank's pieces by their global Megatron name

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As the policy's: parameters and router biases of this rank under their global names."""
        yield from self.tensors.items()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As the policy's, router biases left out."""
        return ((name, t) for name, t in self.tensors.items() if not name.endswith("expert_bias"))

    @torch.no_grad()
    def update(self) -> None:
        """Change every number, in place, as an optimizer step does: whoever publishes old bytes is found out.

        Signs flip: one pass over the memory, another byte for every element, and magnitudes stay sensible.
        """
        torch._foreach_neg_(list(self.tensors.values()))


@torch.no_grad()
def light_policy(cfg: RunConfig, parallel: Parallel) -> LightPolicy:
    """Parameters in BF16 (what a checkpoint keeps in FP32 in that) on ``parallel.device``.

    Values depend on ``cfg.seed`` and a parameter's global name alone, so that every layout holds the same model on the
    same kind of device: matrices normal with ``initializer_range``, norms about 1, biases about 0.
    """
    layout = TrainerLayout.from_config(cfg.parallel)
    tensors = {}
    for name, weight in registry.weights(cfg.model).items():
        if not _is_pinned(weight, cfg.model, layout, parallel):
            continue
        expert = registry.is_expert(name)
        size, rank = (parallel.etp_size, parallel.etp_rank) if expert else (parallel.tp_size, parallel.tp_rank)
        whole = _draw(weight, cfg, parallel.device)
        piece = registry.shard(name, whole, cfg.model, size, rank)
        tensors[name] = piece if piece is whole else piece.clone()  # a view would keep the whole in memory
    return LightPolicy(cfg=cfg, parallel=parallel, tensors=tensors)


def _is_pinned(weight: Weight, model: ModelConfig, layout: TrainerLayout, parallel: Parallel) -> bool:
    """Whether this rank's model has a piece of ``weight``."""
    pattern, layer, expert = split_indices(weight.name)
    if layer >= 0:
        stage = layout.stage(layer, model.num_layers)
    else:
        stage = 0 if pattern.startswith("embedding.") else layout.pipeline - 1
    owner = expert // (model.num_experts // layout.expert) if expert >= 0 else parallel.ep_rank
    return stage == parallel.pp_rank and owner == parallel.ep_rank


def _draw(weight: Weight, cfg: RunConfig, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cfg.seed}/{weight.name}".encode()))
    dtype = getattr(torch, weight.dtype)
    values = torch.empty(weight.shape, dtype=dtype, device=device)
    values.normal_(std=cfg.model.initializer_range, generator=generator)
    if len(weight.shape) == 1 and not weight.name.endswith("bias"):
        values += 1
    return values
