"""Write a policy as a Hugging Face checkpoint that transformers and vLLM load.

In: a policy on all trainer ranks, a folder with a tokenizer. Out: sharded BF16 safetensors (a router's correction bias
in FP32) with their index, config.json, generation_config.json and the tokenizer files. The folder gets its final name
when complete. Runs on every trainer rank; rank 0 writes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.data.checkpoint_dir import errors_name, sync_to_disk
from megatron_fp8rl.data.fused_tensors import SEPARATE, Fusion, fusion_of
from megatron_fp8rl.data.tokenizer import load_tokenizer, special_ids
from megatron_fp8rl.data.weight_files import TOKENIZER_FILES, copy_tokenizer
from megatron_fp8rl.kernels.fp8_parameter import plain
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.agreement import together
from megatron_fp8rl.weight_sync.pack import LocalShards, TensorGather, gather_all
from megatron_fp8rl.weight_sync.plan import Transfer, plan
from megatron_fp8rl.weight_sync.schedule import Gathering

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.policy import Policy

MAX_SHARD_BYTES = 4 << 30
_DEADLINE = timedelta(hours=1)  # for a rank to wait while rank 0 writes a shard to a slow disk


def save_hf(
    policy: Policy, path: str | Path, tokenizer_dir: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Collective: write the policy to ``path`` and replace an existing checkpoint. Every rank raises the same error. A
    shard has at most ``max_shard_bytes`` of weights (or one larger tensor); rank 0 keeps one shard in memory."""
    parallel = policy.parallel
    group = dist.new_group(backend="gloo", timeout=_DEADLINE) if parallel.world_size > 1 else None
    fusion = fusion_of(policy.cfg.model.family)
    shards = _divide(plan_whole(policy), max_shard_bytes, fusion)
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    together(lambda: _start(policy, partial), group)
    for index, shard in enumerate(shards):
        gathers = together(lambda shard=shard: prepare_gathers(policy, shard, group), group)
        gather_all(gathers)
        name = _shard_name(index, len(shards))
        together(lambda gathers=gathers, name=name: _write_shard(gathers, partial / name, fusion), group)
    together(lambda: _complete(policy, shards, partial, path, Path(tokenizer_dir)), group)
    if group is not None:
        dist.destroy_process_group(group)


def plan_whole(policy: Policy) -> tuple[Transfer, ...]:
    """Plan every tensor of the checkpoint, in order, in BF16 or wider."""
    model = policy.cfg.model
    table = LayerTable.build(model, PrecisionConfig(trainer="bf16", rollout="bf16"))
    return plan(model, table, TrainerLayout.from_config(policy.cfg.parallel), EngineLayout()).transfers


def _num_bytes(transfer: Transfer) -> int:
    (tensor,) = transfer.wire_tensors()
    return tensor.num_bytes


def _divide(transfers: tuple[Transfer, ...], max_shard_bytes: int, fusion: Fusion = SEPARATE) -> list[list[Transfer]]:
    shards: list[list[Transfer]] = []
    filled = 0
    for _, parts in itertools.groupby(transfers, key=lambda t: fusion.name(t.name)):
        stored = list(parts)  # all parts of one tensor of the file
        num_bytes = sum(map(_num_bytes, stored))
        if not shards or filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += stored
        filled += num_bytes
    return shards


def prepare_gathers(
    policy: Policy, transfers: Sequence[Transfer], group: dist.ProcessGroup | None
) -> list[TensorGather]:
    """Prepare this rank to gather ``transfers`` on rank 0; FP8 parameters are dequantized. Raises RuntimeError or
    ValueError if this rank's model does not match the plan."""
    rank, cfg = policy.parallel.rank, policy.cfg
    taking_part = [t for t in transfers if rank == 0 or any(source.rank == rank for source in t.sources)]
    names = {t.mcore_name for t in taking_part}
    parameters = {name: plain(tensor) for name, tensor in policy.named_tensors() if name in names}
    local = LocalShards(parameters, TrainerLayout.from_config(cfg.parallel), cfg.model, rank)
    return [TensorGather(Gathering(t, 0, t.sources), local, rank, policy.parallel.device, group) for t in taking_part]


def _start(policy: Policy, partial: Path) -> None:
    if policy.parallel.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while writing
        partial.mkdir(parents=True)


def _shard_name(index: int, num_shards: int) -> str:
    return "model.safetensors" if num_shards == 1 else f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def _write_shard(gathers: Sequence[TensorGather], file: Path, fusion: Fusion = SEPARATE) -> None:
    tensors = {gather.transfer.name: gather.whole.cpu() for gather in gathers if gather.whole is not None}
    if tensors:
        write_tensors(fusion.fuse(tensors), file)


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file. Raises OSError that names it, if it cannot be written."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # has neither a number nor a name
        raise OSError(f"{error}: cannot write {file}. Check its free space and quota") from error


def _complete(policy: Policy, shards: list[list[Transfer]], partial: Path, path: Path, tokenizer_dir: Path) -> None:
    """Rank 0: write all other files, then rename the folder."""
    if policy.parallel.rank != 0:
        return
    if len(shards) > 1:
        stored_name = fusion_of(policy.cfg.model.family).name
        where = {stored_name(t.name): _shard_name(i, len(shards)) for i, shard in enumerate(shards) for t in shard}
        total = sum(_num_bytes(t) for shard in shards for t in shard)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_json(partial / "model.safetensors.index.json", index)
    special = _copy_tokenizer(tokenizer_dir, partial)
    write_json(partial / "config.json", registry.to_hf_config(policy.cfg.model) | special)
    if not (partial / "generation_config.json").exists():
        write_json(partial / "generation_config.json", special)
    replace_folder(partial, path)


def _copy_tokenizer(tokenizer_dir: Path, partial: Path) -> dict[str, int | list[int]]:
    """Copy the tokenizer; return the ids of its special tokens under their names in config.json."""
    if copy_tokenizer(tokenizer_dir, partial).isdisjoint(TOKENIZER_FILES):
        raise FileNotFoundError(f"{tokenizer_dir}: no tokenizer files to save beside the weights")
    return special_ids(load_tokenizer(str(tokenizer_dir)))


def write_json(file: Path, content: dict[str, Any]) -> None:
    with errors_name(file):
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def replace_folder(partial: Path, path: Path) -> None:
    """Sync the files of a complete folder and rename it. Move an existing one aside first, and delete it last."""
    for file in partial.iterdir():
        sync_to_disk(file)
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    sync_to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)
