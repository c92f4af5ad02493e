"""The weights that get adapters, and the names of adapters in peft's format. Pure; no torch."""

import functools

from megatron_fp8rl.config import LoraConfig, ModelConfig
from megatron_fp8rl.names import registry

TARGETS = ("attention", "dense", "experts")


def target_of(name: str) -> str | None:
    """The value of ``lora.targets`` that selects a weight, by its global Megatron name; None if no value does."""
    *path, module, kind = name.split(".")
    if path[:2] != ["decoder", "layers"] or not module.startswith("linear_") or kind != "weight":
        return None
    if ".self_attention." in name:
        return "attention"
    return "experts" if registry.is_expert(name) else "dense"


@functools.lru_cache(maxsize=8)
def targets_in(model: ModelConfig) -> tuple[str, ...]:
    """The values of ``lora.targets`` that select at least one weight of ``model``."""
    present = {target_of(name) for name in registry.weights(model)}
    return tuple(target for target in TARGETS if target in present)


def is_adapted(name: str, lora: LoraConfig) -> bool:
    """Whether the weight with this global Megatron name gets an adapter."""
    target = target_of(name) if lora.rank else None
    return target is not None and (not lora.targets or target in lora.targets)


def target_modules(model: ModelConfig, lora: LoraConfig) -> list[str]:
    """``target_modules`` of peft's configuration: the last part of each module's name, or the whole name if another
    module with the same last part has no adapter."""
    adapted = {
        part for weight in registry.weights(model).values() if is_adapted(weight.name, lora) for part, _ in weight.parts
    }
    others = {name.split(".")[-2] for name in registry.hf_tensors(model) if name not in adapted and "." in name}
    modules = (name.removesuffix(".weight") for name in adapted)
    return sorted({name if (last := name.split(".")[-1]) in others else last for name in modules})
