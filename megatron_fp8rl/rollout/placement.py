"""Assigns GPUs to rollout replicas, on trainer rank 0 before any engine starts. Does not initialize CUDA.

In: the configuration, the number of trainer ranks on this host, and its GPUs as listed in ``CUDA_VISIBLE_DEVICES``.
Out: one value of ``CUDA_VISIBLE_DEVICES`` per replica.

    colocated   replica i on the GPUs of trainer ranks i * n ... (i + 1) * n - 1, for n = engine.data * engine.tensor
    separate    the same, starting after the GPUs of the trainer's ranks
"""

import os
from collections.abc import Mapping, Sequence

from megatron_fp8rl.config import ConfigError, EngineConfig, Violation


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return this host's GPUs in CUDA's order: indices, or UUIDs if the variable lists UUIDs."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        # Like CUDA, stop at the first invalid entry.
        end = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return names[:end]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # queries NVML, which creates no context


def assign(engine: EngineConfig, gpus: Sequence[str], *, local_ranks: int, world_size: int) -> list[str]:
    """Return ``CUDA_VISIBLE_DEVICES`` for each replica. ``local_ranks`` trainer ranks use the first of ``gpus``. Raises
    ConfigError if this host has too few GPUs."""
    wanted = engine.num_replicas * engine.ranks
    is_colocated = engine.placement == "colocated"
    first = 0 if is_colocated else local_ranks
    last = local_ranks if is_colocated else len(gpus)
    if local_ranks > len(gpus):
        raise ConfigError(
            [
                Violation(
                    "--parallel.world_size",
                    world_size,
                    f"puts {local_ranks} trainer ranks on this host, which shows {len(gpus)} GPUs ({_shown(gpus)})",
                    f"Lower it to {len(gpus)}, or show more GPUs in CUDA_VISIBLE_DEVICES",
                )
            ]
        )
    if wanted > last - first:
        engines = f"{engine.num_replicas} replicas x {engine.ranks} = {wanted} GPUs"
        fitting = (last - first) // engine.ranks
        lower = f"Lower it to {fitting}" if fitting else f"Lower --engine.tensor to {last - first}"
        if is_colocated:
            problem = f"{engines}, but the trainer's ranks have {local_ranks} on this host"
            remedy = f"{lower}, or --engine.placement separate"
        else:
            problem = f"{engines} after the {local_ranks} of the trainer, but this host shows {len(gpus)}"
            remedy = f"{lower}, or --engine.placement colocated" if last > first else "Use --engine.placement colocated"
        raise ConfigError([Violation("--engine.num_replicas", engine.num_replicas, problem, remedy)])
    starts = (first + i * engine.ranks for i in range(engine.num_replicas))
    return [",".join(gpus[start : start + engine.ranks]) for start in starts]


def _shown(gpus: Sequence[str]) -> str:
    return ", ".join(gpus) or "none"
