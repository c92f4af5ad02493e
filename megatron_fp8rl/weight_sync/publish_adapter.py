"""Adapters for engines that keep the base (``lora.merge`` False): a folder in peft's format, and its digests.

In: a policy with adapters on all trainer ranks. Out: on rank 0, a folder in the run's folder, which every engine worker
reads, and the digests that its buffers must have. B in the folder is s B, and its alpha is the rank. So vLLM scales
nothing, and the bytes of both ends are equal.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.weight_sync.digest import digests
from megatron_fp8rl.weight_sync.plan import Plan
from megatron_fp8rl.weight_sync.save_adapter import adapter_tensors, peft_config
from megatron_fp8rl.weight_sync.save_hf import write_json, write_tensors

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.policy import Policy

FOLDER = "published_adapter"


@dataclass(frozen=True)
class WrittenAdapter:
    folder: Path
    digests: list[dict[str, str]]  # by engine rank, then by linear and matrix
    num_tensors: int
    num_bytes: int


class AdapterFolders:
    """Writes the adapters of a policy, each version to a folder of its own; the last one is kept. ``padded_rank`` is
    the rank of vLLM's buffers."""

    def __init__(self, policy: Policy, padded_rank: int):
        self._policy, self._rank = policy, padded_rank
        self._root = Path(policy.cfg.run_dir).absolute() / FOLDER
        self._count = 0

    def gather(self) -> dict[str, Tensor] | None:
        """Collective: on rank 0, A and s B of every linear by name in peft's format, BF16; None elsewhere."""
        tensors = adapter_tensors(self._policy, scaled=True)
        return tensors and {name: tensor.bfloat16() for name, tensor in tensors.items()}

    def write(self, tensors: dict[str, Tensor], plan: Plan) -> WrittenAdapter:
        """Rank 0: write the tensors, and compute the digests of each engine rank's part. Raises ValueError if a value
        is not finite."""
        if wrong := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise ValueError(
                f"published adapters contain NaN or infinity: {', '.join(wrong[:5])}; the engines keep the last ones; "
                "lower optim.lr and resume from the last checkpoint"
            )
        if not self._count:
            shutil.rmtree(self._root, ignore_errors=True)  # of a run that was killed
        self._count += 1
        folder = self._root / str(self._count)  # a new name, which no network file system has cached
        folder.mkdir(parents=True)
        write_tensors(tensors, folder / "adapter_model.safetensors")
        cfg = self._policy.cfg
        write_json(folder / "adapter_config.json", peft_config(cfg) | {"lora_alpha": cfg.lora.rank})
        shutil.rmtree(self._root / str(self._count - 1), ignore_errors=True)
        return WrittenAdapter(
            folder=folder,
            digests=expected_digests(tensors, plan, self._rank),
            num_tensors=len(tensors),
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        )

    def close(self) -> None:
        if self._policy.parallel.rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)


def expected_digests(tensors: dict[str, Tensor], plan: Plan, padded_rank: int) -> list[dict[str, str]]:
    """The digests that each engine rank must report (``vllm_plugin/patches_adapters.py``). A rank keeps the rows of B,
    or the columns of A, that belong to its part of the weight."""
    transfers = {transfer.name.removesuffix(".weight"): transfer for transfer in plan.transfers}
    parts: list[dict[str, Tensor]] = [{} for _ in range(plan.engine.size)]
    for key, tensor in tensors.items():
        name, matrix, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
        transfer = transfers[name]
        is_cut = transfer.axis == (1 if matrix == "lora_A" else 0)
        missing = padded_rank - tensor.shape[0 if matrix == "lora_A" else 1]
        padded = F.pad(tensor, (0, 0, 0, missing) if matrix == "lora_A" else (0, missing))
        for mine, kept in zip(parts, transfer.slices, strict=True):
            if kept is not None:
                mine[f"{name}.{matrix}"] = (
                    padded.narrow(transfer.axis, kept[0], kept[1] - kept[0]) if is_cut else padded
                )
    return [dict(zip(mine, digests(mine.values()), strict=True)) for mine in parts]
