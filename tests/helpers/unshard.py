"""The inverse of ``registry.shard``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry, slicing


def unshard(global_name: str, shards: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The full Megatron tensor from the pieces of all (expert-)tensor-parallel ranks."""
    weight = registry.weight(global_name, model)
    if weight.cut == "none" or len(shards) == 1:
        return shards[0]
    if weight.join == "gate_up":
        halves = [slicing.split(weight, model, piece, len(shards), rank) for rank, piece in enumerate(shards)]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    whole = torch.cat(list(shards), dim=weight.axis)
    return whole.narrow(0, 0, weight.shape[0]) if weight.padded else whole
