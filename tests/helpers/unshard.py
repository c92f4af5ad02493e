"""The inverse of ``registry.shard``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry, slicing


def unshard(global_name: str, shards: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The full Megatron tensor from the pieces of all (expert-)tensor-parallel ranks."""
    weight = registry.weight(global_name, model)
    if weight.cut == "none" or len(shards) == 1:
        return shards[0]
    return slicing.merge(weight, model, shards)
