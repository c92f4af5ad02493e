"""A Hugging Face folder beside a GGUF file, converted once. Imports nothing heavy until a file is converted."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.weight_files import copy_tokenizer

SUFFIX = ".gguf"
_MARK = "gguf.json"  # names the file from which a folder was converted


def model_folder(path: Path) -> Path:
    """``path`` itself, or for ``NAME.gguf`` the folder ``NAME.hf`` beside it, converted if it is missing or outdated.

    Raises:
        CheckpointError: the file cannot be converted, or the folder cannot be written.
    """
    if path.suffix != SUFFIX:
        return path
    folder = path.with_suffix(".hf")
    if not path.is_file():
        raise CheckpointError(path, "there is no such file")
    if _is_current(folder, path):
        return folder
    if folder.exists() and not (folder / _MARK).is_file():
        raise CheckpointError(
            folder, f"was not converted from {path.name}; rename it, or convert by hand: {_by_hand(path)}"
        )
    if not os.access(path.parent, os.W_OK):
        raise CheckpointError(path.parent, f"cannot be written; convert by hand: {_by_hand(path)}")
    print(f"{path.name}: converting to {folder}, once", file=sys.stderr)
    for note in convert(path, folder):
        print(f"{path.name}: {note}", file=sys.stderr)
    return folder


def _by_hand(path: Path) -> str:
    return f"python -m checkpoint_tools gguf_to_hf {path} FOLDER"


def convert(path: Path, folder: Path, tokenizer: Path | None = None) -> list[str]:
    """Write ``folder`` and return notes for the user. A folder of an earlier conversion is replaced.

    Args:
        path: the GGUF file.
        folder: gets its name when it is complete.
        tokenizer: a folder whose tokenizer, chat template and generation config replace those of the file.

    Raises:
        CheckpointError: the file cannot be converted.
    """
    from safetensors.torch import save_file

    from megatron_fp8rl.data.gguf_file import GgufFile
    from megatron_fp8rl.data.model_files import SINGLE

    file = GgufFile.open(path)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        if tokenizer is None:
            own, ends, notes = file.tokenizer()
            own.save_pretrained(partial)
            _write_json(partial / "generation_config.json", file.generation_config(ends))
            config = file.config(ends)
        else:
            config, notes = file.config(_copy_tokenizer(tokenizer, partial)), [f"tokenizer: from {tokenizer}"]
        _write_json(partial / "config.json", config)
        save_file(file.tensors(), partial / SINGLE, metadata={"format": "pt"})
        _write_json(partial / _MARK, _identity(path))
        if (folder / _MARK).is_file():
            shutil.rmtree(folder)
        try:
            partial.rename(folder)
        except OSError as error:
            if not _is_current(folder, path):  # another process may have written it meanwhile
                raise CheckpointError(folder, f"cannot be written: {error.strerror}. Choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return notes


def _copy_tokenizer(source: Path, target: Path) -> list[int]:
    """Copy the files of a tokenizer; returns the ids of its end tokens."""
    from megatron_fp8rl.data.tokenizer import end_ids, load_tokenizer

    try:
        ends = end_ids(load_tokenizer(str(source)))
    except (OSError, ValueError) as error:
        raise CheckpointError(source, f"has no usable tokenizer: {error}") from error
    copy_tokenizer(source, target)
    return list(ends)


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"file": path.name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}


def _is_current(folder: Path, path: Path) -> bool:
    try:
        return json.loads((folder / _MARK).read_text()) == _identity(path)
    except (OSError, ValueError):
        return False


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
