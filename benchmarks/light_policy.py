"""A policy with parameters only, and its publication to engines: no model, optimizer or gradients.

In: a run's configuration and the trainer rank. Out: this rank's random parameters in the layout of the trainer's model;
30 billion take 61 GB of one GPU and a few seconds. Runs on every trainer rank.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.names.table import Weight, split_indices

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
    from megatron_fp8rl.weight_sync.publish import WeightExporter


@dataclass
class LightPolicy:
    """Replaces :class:`megatron_fp8rl.trainer.policy.Policy` where weights are only read."""

    cfg: RunConfig
    parallel: Parallel
    tensors: dict[str, Tensor]  # this rank's pieces by their global Megatron name

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, t) for name, t in self.tensors.items() if not name.endswith("expert_bias"))

    @torch.no_grad()
    def update(self) -> None:
        """Change every number in place, so that a publication of old bytes shows. Flips signs: one pass over memory."""
        torch._foreach_neg_(list(self.tensors.values()))


@torch.no_grad()
def light_policy(cfg: RunConfig, parallel: Parallel) -> LightPolicy:
    """Parameters on ``parallel.device``, in BF16, or in FP32 where checkpoints have FP32. Values depend only on
    ``cfg.seed`` and the global name, so every layout has the same model on one kind of device: matrices normal with
    ``initializer_range``, norms about 1, biases about 0."""
    layout = TrainerLayout.from_config(cfg.parallel)
    tensors = {}
    for name, weight in registry.weights(cfg.model).items():
        if not _is_on_rank(weight, cfg.model, layout, parallel):
            continue
        expert = registry.is_expert(name)
        size, rank = (parallel.etp_size, parallel.etp_rank) if expert else (parallel.tp_size, parallel.tp_rank)
        whole = draw(weight, cfg, parallel.device)
        piece = registry.shard(name, whole, cfg.model, size, rank)
        tensors[name] = piece if piece is whole else piece.clone()  # a view would keep the whole tensor in memory
    return LightPolicy(cfg=cfg, parallel=parallel, tensors=tensors)


@contextmanager
def publishing(cfg: RunConfig, parallel: Parallel) -> Iterator[tuple[LightPolicy, WeightExporter, Fleet | None, float]]:
    """Collective: (random policy, its exporter, engines on rank 0, seconds to start them)."""
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    with ExitStack() as stack:
        policy = light_policy(cfg, parallel)  # before the engines start, which measure free memory
        torch.cuda.empty_cache()
        parallel.barrier("drawn")
        fleet, started = None, time.perf_counter()
        if parallel.rank == 0:
            fleet = stack.enter_context(Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir))
        start_s = time.perf_counter() - started
        parallel.barrier("engines")
        exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
        stack.callback(exporter.close)
        yield policy, exporter, fleet, start_s


def _is_on_rank(weight: Weight, model: ModelConfig, layout: TrainerLayout, parallel: Parallel) -> bool:
    pattern, layer, expert = split_indices(weight.name)
    if layer >= 0:
        stage = layout.stage(layer, model.num_layers)
    else:
        stage = 0 if pattern.startswith("embedding.") else layout.pipeline - 1
    owner = expert // (model.num_experts // layout.expert) if expert >= 0 else parallel.ep_rank
    return stage == parallel.pp_rank and owner == parallel.ep_rank


def draw(weight: Weight, cfg: RunConfig, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cfg.seed}/{weight.name}".encode()))
    dtype = getattr(torch, weight.dtype)
    values = torch.empty(weight.shape, dtype=dtype, device=device)
    values.normal_(std=cfg.model.initializer_range, generator=generator)
    if len(weight.shape) == 1 and not weight.name.endswith("bias"):
        values += 1
    return values
