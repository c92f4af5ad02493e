"""Compare the weights in ``model.hf_path`` with the model of a run before anything starts. Functions import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import ConfigError, ModelConfig, Violation
from megatron_fp8rl.names import registry

if TYPE_CHECKING:
    import torch

    from megatron_fp8rl.data.safetensors_file import Files
    from megatron_fp8rl.data.safetensors_header import Entry

_MAX_SHOWN = 3
_MAX_SCANNED_BYTES = 8 << 30  # of larger models, blocks of each tensor are read
_SAMPLED_BYTES, _BLOCK_BYTES, _MIN_BLOCKS = 1 << 30, 1 << 16, 2
_NUM_READERS = 8  # files may be on a network
_REMEDY = "Nothing was started. Correct config.json, restore the files, or name another folder"


def check_folder(
    model: ModelConfig, described: Path | None, *, field: str = "--model.hf_path", reads_fp8: bool = False
) -> str:
    """Check the names, types, shapes and values of all tensors, and that there is a tokenizer.

    Args:
        model: The model of the run. Nothing is checked if it names no folder.
        described: The folder with config.json and the tokenizer; None: the configuration of the run says both.
        field: The option that named the folder, for errors.
        reads_fp8: Accept block FP8 weights, which are dequantized: of a model that no engine reads.

    Returns:
        Lines about ignored keys of config.json, and about values that were not read; empty if there are none.

    Raises:
        ConfigError: with the first problems and their number.
    """
    if model.hf_path is None:
        return ""
    from megatron_fp8rl.data.checkpoint_error import CheckpointError
    from megatron_fp8rl.data.model_files import has_tokenizer, read_config

    problems: list[str] = []
    lines: list[str] = []
    folder = Path(model.hf_path)
    try:
        config = read_config(described) if described is not None else {}
        lines.append(registry.ignored_keys(config))
        problems += _engine_problems(config, described, model)
        weight_problems, checked = _weight_problems(folder, model, bool(config.get("quantization_config")), reads_fp8)
        problems += weight_problems
        lines.append(checked)
    except CheckpointError as error:
        name = Path(str(error.path)).name
        problems += [text if error.path == folder else f"{name}: {text}" for text in error.problems]
    if described is not None and described.is_dir() and not has_tokenizer(described.iterdir()):
        problems.append(f"{described} has no tokenizer: neither tokenizer.json, tokenizer.model nor vocab.json exists")
    if problems:
        rest = len(problems) - _MAX_SHOWN
        text = "; ".join(problems[:_MAX_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
        raise ConfigError([Violation(field, model.hf_path, text, _REMEDY)])
    return "\n".join(filter(None, lines))


def _engine_problems(config: Mapping[str, Any], folder: Path | None, model: ModelConfig) -> list[str]:
    """What vLLM, which reads the folder's config.json itself, or transformers would understand as another model."""
    import torch

    problems = []
    architectures, expected = config.get("architectures"), registry.FAMILIES[model.family].architecture
    if architectures and (not isinstance(architectures, list) or expected not in architectures):
        problems.append(
            f"config.json: architectures = {architectures!r}, which engines build; this {model.family} language model "
            f'needs ["{expected}"]'
        )
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if name is not None and not isinstance(getattr(torch, str(name).removeprefix("torch."), None), torch.dtype):
            problems.append(f"config.json: {key} = {name!r} is no type of torch; write bfloat16, float16 or float32")
    if folder is not None and (folder / "adapter_config.json").is_file():
        problems.append(
            "adapter_config.json: an adapter beside the weights, which transformers adds to them; merge it first "
            "(peft: merge_and_unload), or remove this file"
        )
    if folder is not None and (folder / "hf_quant_config.json").is_file():
        problems.append(
            "hf_quant_config.json: says that ModelOpt quantized the weights; name the model before quantization, or "
            "remove the file if the weights are BF16"
        )
    return problems


def _weight_problems(folder: Path, model: ModelConfig, says_fp8: bool, reads_fp8: bool) -> tuple[list[str], str]:
    """(every missing, damaged or unexpected tensor, a line about values that were not read). Raises CheckpointError if
    the files cannot be listed. ``says_fp8``: config.json has a ``quantization_config``."""
    from megatron_fp8rl.data.model_files import compare, read_entries

    if (folder / ".metadata").is_file():
        return [], ""  # Megatron-Core's format, whose loader compares names and shapes
    entries, problems, unreadable = read_entries(folder)
    skipped, wrong_tensors = compare(entries, model, unreadable)
    if problems := problems + wrong_tensors:
        return problems, ""
    wrong = [name for name, entry in entries.items() if entry.dtype.itemsize == 1]
    if wrong and not reads_fp8:
        command = f"python -m checkpoint_tools hf_to_megatron {folder} NEW_FOLDER"
        text = f"{wrong[0]}: {entries[wrong[0]].dtype}, which the trainer does not read; convert it: {command}"
        return [text], ""
    if says_fp8 and not wrong:
        text = "config.json: quantization_config says that the weights are FP8, and no tensor is; remove this key"
        return [text], ""
    problems, checked = _value_problems(entries, model)
    others = sum(reason == registry.OF_THE_VISION_TOWER for reason in skipped.values())
    left_out = f"weights: {others} tensors are {registry.OF_THE_VISION_TOWER}" if others else ""
    return problems, "\n".join(filter(None, (left_out, checked)))


def _value_problems(entries: dict[str, Entry], model: ModelConfig) -> tuple[list[str], str]:
    """NaN or infinity in weights, and a stored output head that is not the embedding to which it is tied."""
    import torch

    from megatron_fp8rl.data.model_files import is_finite
    from megatron_fp8rl.data.safetensors_file import Files

    files, problems = Files(), []
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if model.tie_embeddings and head in entries:
        if not torch.equal(*(files.rows(entries[name]).float() for name in (embedding, head))):
            problems.append(
                f"{head}: differs from {embedding}, to which config.json ties it. If the head was trained separately, "
                'set "tie_word_embeddings" to false in config.json; else remove it from the file'
            )
    plain = {name for name, entry in entries.items() if entry.dtype.itemsize > 1}
    expected = [name for name in registry.hf_tensors(model) if name in plain]
    total = sum(entries[name].num_bytes for name in expected)
    share = None if total <= _MAX_SCANNED_BYTES else _SAMPLED_BYTES / total

    def scan(name: str) -> tuple[bool, int]:
        blocks = _blocks(files, entries[name], share)
        return all(map(is_finite, blocks)), sum(block.nbytes for block in blocks)

    with ThreadPoolExecutor(_NUM_READERS if share else 1) as threads:
        scanned = dict(zip(expected, threads.map(scan, expected), strict=True))
    problems += [f"{name}: NaN or infinity in {entries[name].file.name}" for name in expected if not scanned[name][0]]
    if share is None:
        return problems, ""
    read = sum(num_bytes for _, num_bytes in scanned.values())
    of = sum(num_bytes > 0 for _, num_bytes in scanned.values())
    amount = f"{read / 2**30:.2g} of {total / 2**30:.3g} GiB, blocks of {of:,} of {len(expected):,} tensors"
    line = f"weights: no NaN or infinity in {amount}; the trainer checks all of them as it loads them"
    return problems, line


def _blocks(files: Files, entry: Entry, share: float | None) -> Sequence[torch.Tensor]:
    """The values of a tensor: all of them, or blocks spread over it that have about ``share`` of its bytes. Of a tensor
    that is computed from stored ones, all or none."""
    from megatron_fp8rl.data.safetensors_header import Entry

    count = 0 if share is None else max(_MIN_BLOCKS, int(entry.num_bytes * share / _BLOCK_BYTES))
    if share is None or count * _BLOCK_BYTES >= entry.num_bytes:
        return [files.rows(entry)]
    if type(entry) is not Entry:
        return []
    last = entry.num_bytes - _BLOCK_BYTES
    starts = [last * index // (count - 1) // entry.dtype.itemsize * entry.dtype.itemsize for index in range(count)]
    return [files.read(entry.file, entry.offset + start, _BLOCK_BYTES).view(entry.dtype) for start in starts]
