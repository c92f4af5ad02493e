"""The Hugging Face tensors of a Megatron parameter: their names, and the inverse of ``registry.from_hf``."""

from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry, slicing


def hf_names_of(global_name: str, model: ModelConfig) -> list[str]:
    """Hugging Face tensors from which a Megatron parameter is built; of a tied output layer, the embedding."""
    w = registry.weight(global_name, model)
    return [*(name for name, _ in w.parts), *w.copies]


def to_hf(
    global_name: str, tensor: Tensor, model: ModelConfig, tp_size: int = 1, tp_rank: int = 0
) -> list[tuple[str, Tensor]]:
    """Inverse of ``registry.from_hf``: (Hugging Face name, tensor) pairs, views of ``tensor`` where the layout allows.

    With ``tp_size`` > 1, ``tensor`` is the ``registry.shard`` of an (expert-)tensor-parallel rank. The result is its
    contiguous part of each Hugging Face tensor, possibly empty. Raises ValueError for another shape.
    """
    w = registry.weight(global_name, model)
    slicing.require_divisible(w, model, tp_size)
    expected = slicing.shard_shape(w, model, tp_size)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{global_name}: shape {tuple(tensor.shape)}, but the model configuration says {expected}")
    parts = slicing.split(w, model, tensor, tp_size, tp_rank)
    pairs = [(name, part) for (name, _), part in zip(w.parts, parts)]
    return pairs + [(name, parts[0]) for name in w.copies]
