"""Load only the model weights of a distributed checkpoint (torch_dist).

In: a folder written by checkpoint_tools, or a training checkpoint. Out: this rank's model chunks with weights loaded.
Runs on: every trainer rank; each reads only its shards, whatever layout wrote them.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE, missing_part
from megatron_fp8rl.data.checkpoint_pickle import read_metadata

_NO_PART_OF_THE_MODEL = ("hf_path", "initializer_range", "embedding_range", "max_position_embeddings", "num_mtp_layers")


def is_distributed(folder: str | Path) -> bool:
    return (Path(folder) / ".metadata").is_file()


@torch.no_grad()
def load_distributed(models: Sequence[GPTModel], folder: str | Path, model: ModelConfig) -> None:
    """Collective: load this rank's model chunks from a distributed checkpoint of any layout.

    Raises ValueError if the folder is incomplete or has a different model, KeyError for a missing weight, and
    UnsafeError if reading could run code.
    """
    folder = Path(folder)
    _require_model(folder, model)
    read_metadata(folder)  # no objects are loaded
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    wanted = {
        f"model{index}": {
            name: part for name, part in chunk.sharded_state_dict(metadata=metadata).items() if _is_weight(part)
        }
        for index, chunk in enumerate(models)
    }
    loaded = dist_checkpointing.load(wanted, str(folder))
    for index, chunk in enumerate(models):
        state: dict[str, Any] = loaded[f"model{index}"]
        lost = [name for name, _ in chunk.named_parameters() if name not in state and name != "output_layer.weight"]
        if lost:
            raise KeyError(f"{folder}: {', '.join(lost)} were not loaded")
        chunk.load_state_dict(state, strict=False)


def _is_weight(part: Any) -> bool:
    """Excludes extra-state objects and the amax history of delayed scaling, which only a training run needs."""
    return isinstance(part, ShardedTensor | ShardedTensorFactory) and not part.key.endswith("fp8.history")


def _require_model(folder: Path, model: ModelConfig) -> None:
    state_file = folder / STATE_FILE
    if not state_file.is_file():
        return  # written by another program: Megatron-Core compares names and shapes
    if (missing := missing_part(folder)) is not None:
        raise ValueError(f"{folder} is incomplete: {missing}. Convert or download it again")
    config = json.loads(state_file.read_text())["config"]
    if config.get("lora", {}).get("rank"):
        raise ValueError(f"{folder} contains adapters only. Name the folder hf of the run, or its base model")
    theirs = config["model"]
    ours = json.loads(json.dumps(dataclasses.asdict(model)))
    differing = [
        f"model.{key} is {theirs[key]!r} there, but {value!r} here"
        for key, value in ours.items()
        if key not in _NO_PART_OF_THE_MODEL and key in theirs and theirs[key] != value
    ]
    if differing:
        raise ValueError(f"{folder} contains a different model: " + "; ".join(differing))
