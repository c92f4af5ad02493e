"""Degrees of parallelism at both ends, and the weights of each trainer rank. Pure; no torch."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields

from megatron_fp8rl.config import EngineConfig, ModelConfig, ParallelConfig
from megatron_fp8rl.names.table import Weight, split_indices

VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this before sharding it


def layers_per_chunk(num_layers: int, num_chunks: int) -> list[int]:
    """The number of layers of each pipeline chunk. The first take the remainder; the last has the output head."""
    least, rest = divmod(num_layers, num_chunks)
    return [least + (chunk < rest) for chunk in range(num_chunks)]


@functools.lru_cache(maxsize=1 << 12)
def _chunk(layer: int, num_layers: int, num_chunks: int) -> int:
    ends = itertools.accumulate(layers_per_chunk(num_layers, num_chunks))
    return next(chunk for chunk, end in enumerate(ends) if layer < end)


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
        return cls(**{field.name: getattr(parallel, field.name) for field in fields(cls)})

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pipeline

    def stage(self, layer: int, num_layers: int) -> int:
        """Pipeline rank of a layer. With virtual stages, ranks take chunks of layers in turn."""
        return _chunk(layer, num_layers, self.pipeline * self.virtual_stages) % self.pipeline

    def holders(self, weight: Weight, model: ModelConfig) -> list[list[int]]:
        """For each part of a parameter, in order, all ranks that have it, ascending."""
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
        parts = [list(ranks[owner * self.expert_tensor + t :: step]) for t in range(self.expert_tensor)]
        return [sorted(itertools.chain(*parts))] if weight.cut == "none" else parts

    def shards(self, weight: Weight, model: ModelConfig) -> list[int]:
        """The lowest rank that has each part of a parameter, in order."""
        return [ranks[0] for ranks in self.holders(weight, model)]


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Degrees of parallelism of one engine replica, in vLLM's terms.

    ``tensor`` ranks share attention and dense layers, in each of ``data`` groups. Experts are whole if ``expert`` =
    ``data`` * ``tensor``; if ``expert`` = 1, all ranks share each. Rank = data rank * tensor + tensor rank.
    """

    data: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, engine: EngineConfig) -> EngineLayout:
        return cls(data=engine.data, tensor=engine.tensor, expert=engine.expert)

    @property
    def size(self) -> int:
        return self.data * self.tensor
