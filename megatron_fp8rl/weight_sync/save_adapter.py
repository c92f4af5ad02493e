"""Write the adapters of a policy in peft's format, which peft, transformers and vLLM load.

In: a policy with adapters on all trainer ranks. Out: adapter_model.safetensors and adapter_config.json in a folder that
gets its name when complete. Linears that Megatron-Core stacks (q, k and v; gate and up) get equal copies of their A.
Every expert has its matrices under its number, as in the files of the base model. Runs on every rank; rank 0 writes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.names.adapted import target_modules
from megatron_fp8rl.weight_sync.agreement import together
from megatron_fp8rl.weight_sync.save_hf import replace_folder, write_json, write_tensors

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.policy import Policy


def save_adapter(policy: Policy, path: str | Path) -> None:
    """Collective: write the adapters to ``path`` and replace an existing folder. Every rank raises the same error."""
    tensors, path = adapter_tensors(policy), Path(path)

    def write() -> None:
        if tensors is None:
            return
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_tensors(tensors, partial / "adapter_model.safetensors")
        write_json(partial / "adapter_config.json", peft_config(policy.cfg))
        replace_folder(partial, path)

    together(write, policy.parallel.control_group if policy.parallel.world_size > 1 else None)


def adapter_tensors(policy: Policy, *, scaled: bool = False) -> dict[str, Tensor] | None:
    """Collective: on rank 0, A and B of every linear by its name in peft's format, in host memory; None elsewhere.
    ``scaled``: alpha / rank * B in place of B."""
    from megatron_fp8rl.trainer.model.lora import adapted_linears  # imports Megatron-Core

    mine = _on_host([p for linear in adapted_linears(policy.models) for p in linear.adapter.pieces(scaled=scaled)])
    parallel, gathered = policy.parallel, [mine]
    if parallel.world_size > 1:
        gathered = [None] * parallel.world_size if parallel.rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=parallel.control_group)
    if gathered is None:
        return None
    parts: dict[str, tuple[int | None, list[Tensor]]] = {}
    for name, matrix, axis, part in (piece for pieces in gathered for piece in pieces):  # by rank
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{matrix}.weight"
        parts.setdefault(key, (axis, []))[1].append(part)
    return {key: (some[0] if axis is None else torch.cat(some, axis)) for key, (axis, some) in parts.items()}


def _on_host(pieces: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The pieces with their tensors in host memory, by one copy: hundreds of small ones would each wait for the GPU.
    Each has its own memory, as pickle and safetensors need it."""
    if not pieces:
        return []
    parts = [part for *_, part in pieces]
    copied = torch.cat([part.reshape(-1) for part in parts]).cpu().split([part.numel() for part in parts])
    return [(*where, one.view(part.shape).clone()) for (*where, part), one in zip(pieces, copied, strict=True)]


def peft_config(cfg: RunConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.model.hf_path,
        "r": cfg.lora.rank,
        "lora_alpha": int(alpha) if (alpha := cfg.lora.alpha).is_integer() else alpha,
        "target_modules": target_modules(cfg.model, cfg.lora),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
