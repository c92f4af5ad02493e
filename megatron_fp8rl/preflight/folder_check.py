"""Compare the weights in ``model.hf_path`` with the model of a run before anything starts. Functions import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8rl.config import ConfigError, ModelConfig, Violation
from megatron_fp8rl.names import registry

if TYPE_CHECKING:
    from megatron_fp8rl.data.safetensors_header import Entry

_MAX_SHOWN = 3
_MAX_SCANNED_BYTES = 8 << 30  # the trainer checks the values of larger models as it loads them
_REMEDY = "Nothing was started. Correct config.json, restore the files, or name another folder"


def check_folder(model: ModelConfig, described: Path | None, *, field: str = "--model.hf_path") -> str:
    """Check the names, types, shapes and values of all tensors, and that there is a tokenizer.

    Args:
        model: The model of the run. Nothing is checked if it names no folder.
        described: The folder with config.json and the tokenizer; None: the configuration of the run says both.
        field: The option that named the folder, for errors.

    Returns:
        A line that names ignored keys of config.json; empty if there are none.

    Raises:
        ConfigError: with the first problems and their number.
    """
    if model.hf_path is None:
        return ""
    from megatron_fp8rl.data.checkpoint_error import CheckpointError
    from megatron_fp8rl.data.model_files import has_tokenizer, read_config

    problems, ignored = [], ""
    try:
        ignored = registry.ignored_keys(read_config(described)) if described is not None else ""
        problems = _weight_problems(Path(model.hf_path), model)
    except CheckpointError as error:
        problems = error.problems
    if described is not None and described.is_dir() and not has_tokenizer(described.iterdir()):
        problems.append(f"{described} has no tokenizer: neither tokenizer.json, tokenizer.model nor vocab.json exists")
    if problems:
        rest = len(problems) - _MAX_SHOWN
        text = "; ".join(problems[:_MAX_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
        raise ConfigError([Violation(field, model.hf_path, text, _REMEDY)])
    return ignored


def _weight_problems(folder: Path, model: ModelConfig) -> list[str]:
    """Every missing, damaged or unexpected tensor. Raises CheckpointError if the files cannot be listed."""
    from megatron_fp8rl.data.model_files import compare, read_entries

    if (folder / ".metadata").is_file():
        return []  # Megatron-Core's format, whose loader compares names and shapes
    entries, problems, unreadable = read_entries(folder)
    problems += compare(entries, model, unreadable)[1]
    if problems:
        return problems
    wrong = [name for name, entry in entries.items() if entry.dtype.itemsize == 1]
    if wrong:
        command = f"python -m checkpoint_tools hf_to_megatron {folder} NEW_FOLDER"
        return [f"{wrong[0]}: {entries[wrong[0]].dtype}, which the trainer does not read; convert it: {command}"]
    return _value_problems(entries, model)


def _value_problems(entries: dict[str, Entry], model: ModelConfig) -> list[str]:
    """NaN or infinity in weights, and a stored output head that is not the embedding to which it is tied."""
    import torch
    from safetensors import safe_open

    from megatron_fp8rl.data.model_files import is_finite

    def read(name: str) -> torch.Tensor:
        with safe_open(entries[name].file, framework="pt") as file:
            return file.get_tensor(name)

    problems = []
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if model.tie_embeddings and head in entries and not torch.equal(read(embedding).float(), read(head).float()):
        problems.append(
            f"{head}: differs from {embedding}, to which config.json ties it. If the head was trained separately, set "
            '"tie_word_embeddings" to false in config.json; else remove it from the file'
        )
    expected = registry.hf_tensors(model)
    if sum(entry.num_bytes for entry in entries.values()) <= _MAX_SCANNED_BYTES:
        problems += [
            f"{name}: NaN or infinity in {entries[name].file.name}" for name in expected if not is_finite(read(name))
        ]
    return problems
