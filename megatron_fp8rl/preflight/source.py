"""The checkpoint that a run starts from: is it there, and is it one of this model?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.preflight.findings import Findings

# Fields that say nothing about what the weights compute, and layers that a run leaves out.
_FREE = ("hf_path", "initializer_range", "max_position_embeddings", "num_mtp_layers", "sliding_window")


def check_source(found: Findings) -> None:
    """model.hf_path, by the names of its files and its config.json; no weights are read."""
    model = found.cfg.model
    if model.hf_path is None:
        return
    folder = Path(model.hf_path)
    # checkpoint_tools puts config.json and the tokenizer beside a distributed checkpoint.
    has_weights = any(folder.glob("*.safetensors")) or (folder / ".metadata").is_file()
    if not (folder / "config.json").is_file() or not has_weights:
        found.refuse(
            "model.hf_path",
            "is not a Hugging Face checkpoint: config.json or *.safetensors are missing",
            "Name the folder that holds both, or one that checkpoint_tools converted",
        )
        return
    differing = _differing(folder / "config.json", model)
    if differing:
        found.refuse("model.hf_path", f"is of another model: {differing}", "Name a checkpoint of this model")


def _differing(file: Path, model: ModelConfig) -> str:
    """Fields in which a config.json is of another model, or why it cannot be read; empty when neither."""
    from megatron_fp8rl.names import registry

    try:
        config = json.loads(file.read_text())
        theirs = registry.from_hf_config(config, fp8_weights=True) if isinstance(config, dict) else None
    except (OSError, ValueError) as error:
        return f"{file.name}: {error}"
    if theirs is None:
        return f"{file.name} is not a JSON object"
    free = _FREE if model.first_dense_layers or not model.is_moe else (*_FREE, "ffn_hidden_size")  # of no layer
    wrong = [field.name for field in dataclasses.fields(model) if field.name not in free]
    wrong = [name for name in wrong if getattr(theirs, name) != getattr(model, name)]
    return ", ".join(f"{name} is {getattr(theirs, name)!r} there and {getattr(model, name)!r} here" for name in wrong)
