"""Degrees of parallelism at both ends, and the weights of each trainer rank. Pure; no torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RolloutConfig
from megatron_fp8rl.names.table import Weight, split_indices

VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this before sharding it


def layers_per_chunk(num_layers: int, num_chunks: int) -> list[int]:
    """The number of layers of each pipeline chunk, in order. The first chunks take the remainder, because the last one
    also has the output head.
    """
    least, rest = divmod(num_layers, num_chunks)
    return [least + (chunk < rest) for chunk in range(num_chunks)]


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """The trainer's degrees of parallelism and Megatron's order of ranks (tensor fastest, pipeline slowest)."""

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> TrainerLayout:
        return cls(
            world_size=parallel.world_size,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_stages=parallel.virtual_stages,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
        )

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pipeline

    def stage(self, layer: int, num_layers: int) -> int:
        """Pipeline rank of a layer. With virtual stages, consecutive chunks of layers go round the ranks."""
        ends = itertools.accumulate(layers_per_chunk(num_layers, self.pipeline * self.virtual_stages))
        chunk = next(chunk for chunk, end in enumerate(ends) if layer < end)
        return chunk % self.pipeline

    def holders(self, weight: Weight, model: ModelConfig) -> list[list[int]]:
        """For each part of a parameter, in order, all ranks that hold it: its replicas, in ascending order."""
        pattern, layer, expert = split_indices(weight.name)
        if layer >= 0:
            stage = self.stage(layer, model.num_layers)
        else:
            stage = 0 if pattern.startswith("embedding.") else self.pipeline - 1
        ranks = range(stage * self.ranks_per_stage, (stage + 1) * self.ranks_per_stage)
        if expert < 0:
            if weight.cut == "none":
                return [list(ranks)]
            return [list(ranks[t :: self.tensor]) for t in range(self.tensor)]
        owner = expert // (model.num_experts // self.expert)
        step = self.expert * self.expert_tensor
        return [list(ranks[owner * self.expert_tensor + t :: step]) for t in range(self.expert_tensor)]

    def shards(self, weight: Weight, model: ModelConfig) -> list[int]:
        """The ranks that hold the parts of a parameter, in order; among replicas, the lowest rank."""
        return [ranks[0] for ranks in self.holders(weight, model)]


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Degrees of parallelism of one engine replica. ``expert`` is 1, or ``tensor`` if ranks hold whole experts."""

    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> EngineLayout:
        return cls(tensor=rollout.tensor, expert=rollout.expert)
