"""The tensors in the safetensors of a model's folder, compared with config.json. No weight is read.

In:  a folder with config.json and safetensors, sharded or not, in BF16, FP16, FP32, 128x128 block FP8 or Kimi's INT4.
     Of a model that also sees images, the text part.
Out: name, type, shape and position of each tensor, and every missing, damaged or unexpected tensor by name.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.fused_experts import ExpertEntry, unstacked_entries
from megatron_fp8rl.data.fused_tensors import Fusion, fusion_of
from megatron_fp8rl.data.packed_int4 import is_packed_int4, unpacked_entries
from megatron_fp8rl.data.safetensors_header import Entry, read_header
from megatron_fp8rl.data.weight_files import INDEX, SINGLE, explain, no_safetensors, prefix_problem
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, SCALE_SUFFIX

SCALE = SCALE_SUFFIX
FP8 = BLOCKWISE_FP32  # also reads power-of-two scales
FP8_DTYPE = getattr(torch, FP8.element)
_HEAD = "lm_head.weight"
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


def read_config(path: Path) -> dict[str, Any]:
    """Content of config.json, of the text part as a model of its own; without the mark of packed INT4 weights, which
    are read as BF16. Raises CheckpointError when it is missing or damaged."""
    config = registry.text_config(_content(path))
    if is_packed_int4(config):
        del config["quantization_config"]
    return config


def _content(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    if not file.is_file():
        raise CheckpointError(path, "config.json is missing; is this a Hugging Face checkpoint?")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(file, f"damaged: it is not JSON ({error}). Fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(file, "damaged: it is not a JSON object. Fetch the file again")
    return content


def has_tokenizer(files: Iterable[Path]) -> bool:
    names = {"tokenizer.json", "vocab.json", "tekken.json"}
    return any(file.name in names or file.suffix in (".model", ".tiktoken") for file in files)


def read_entries(path: Path) -> tuple[dict[str, Entry], list[str], set[str]]:
    """(all tensors in a folder's safetensors, problems of the files, tensors of unreadable files). Names are those of
    the text part."""
    index = path / INDEX
    if index.is_file():
        try:
            listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            shards = sorted(set(listed.values()))
            if not all(isinstance(file, str) for file in shards):
                raise TypeError("weight_map has values that are not file names")
            if not shards:
                raise ValueError("weight_map is empty")
            if outside := [file for file in shards if Path(file).name != file]:
                raise ValueError(f"weight_map names {outside[0]!r}, which is not a file of this folder")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(index, f"damaged: {error}. Fetch the file again") from error
        if SINGLE not in shards and (path / SINGLE).exists():
            raise CheckpointError(path, f"{SINGLE} exists, but {INDEX} does not list it. Remove one of them")
    elif (path / SINGLE).is_file():
        listed, shards = {}, [SINGLE]
    else:
        listed, shards = {}, sorted(file.name for file in path.glob("model-*.safetensors"))
        if not shards:
            raise CheckpointError(path, no_safetensors(path))
    entries: dict[str, Entry] = {}
    unreadable: set[str] = set()
    problems = _missing_numbers(shards, listed) if not (path / SINGLE).is_file() else []
    for shard in shards:
        try:
            stored = read_header(path / shard)
        except CheckpointError as error:
            problems += [f"{shard}: {problem}" for problem in error.problems]
            unreadable |= {name for name, file in listed.items() if file == shard}
            continue
        problems += [f"{name}: in {shard} and in {entries[name].file.name}" for name in stored if name in entries]
        entries |= stored
        if listed:
            expected, names = {name for name, file in listed.items() if file == shard}, set(stored)
            problems += [f"{name}: {INDEX} says {shard}, which lacks it" for name in sorted(expected - names)]
            problems += [f"{name}: in {shard}, but not in {INDEX}" for name in sorted(names - expected)]
    config = _content(path) if (path / "config.json").is_file() else {}
    if "text_config" in config:
        entries = unstacked_entries({registry.text_name(name, config): entry for name, entry in entries.items()})
        unreadable = {registry.text_name(name, config) for name in unreadable}
    if is_packed_int4(registry.text_config(config)):
        entries = unpacked_entries(entries)
    return fusion_in(path).split_entries(entries), problems, unreadable


def fusion_in(path: Path) -> Fusion:
    """How the folder's files combine tensors."""
    config = read_config(path) if (path / "config.json").is_file() else {}
    return fusion_of(config.get("model_type"))


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. A finite sum shows it without extra memory; a large sum can overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _missing_numbers(shards: Sequence[str], listed: dict[str, str]) -> list[str]:
    """Missing files of a numbered series without an index."""
    series = [match for shard in shards if (match := _NUMBERED.fullmatch(shard))]
    if listed or not series:
        return []
    total, digits = max(int(match[2]) for match in series), len(series[0][1])
    wanted = {f"model-{i:0{digits}}-of-{total:0{digits}}.safetensors" for i in range(1, total + 1)}
    return [f"{name}: the file is missing. Fetch it" for name in sorted(wanted - set(shards))]


def compare(entries: dict[str, Entry], model: ModelConfig, unreadable: set[str]) -> tuple[dict[str, str], list[str]]:
    """Compare stored tensors with those of ``model``: (tensors to skip and why, problems)."""
    expected = registry.hf_tensors(model)
    stored = fusion_of(model.family).name
    missing = [name for name in expected if name not in entries and stored(name) not in unreadable]
    # Whatever config.json says, a multi-token prediction layer has this projection, and no other layer has it.
    mtp_layers = {registry.layer_of(name) for name in entries.keys() | unreadable if name.endswith(".eh_proj.weight")}
    skipped: dict[str, str] = {}
    lacking = dict.fromkeys(entry.lacks_scales for entry in entries.values() if isinstance(entry, ExpertEntry))
    problems = [
        f"{name}: missing; {name.removesuffix('_scales')}_blocks is MXFP4 and needs its scales"
        for name in lacking
        if name and name not in unreadable
    ]
    unexpected: list[str] = []
    for name in entries:
        base = name.removesuffix(SCALE)
        if base in expected:
            continue
        reason = registry.reason_to_skip(base, model)
        layer = registry.layer_of(base)
        if layer is not None and layer >= model.num_layers and layer not in mtp_layers:
            problems.append(f"{name}: config.json says {model.num_layers} layers, so it is in none of them")
            continue
        if reason is not None:
            skipped[name] = reason
            continue
        if ".lora_" in name or ".base_layer." in name or "lora_magnitude" in name:
            problems.append(f"{name}: an adapter that is not merged; merge it first (peft: merge_and_unload)")
            continue
        unexpected.append(name)
    if prefix := prefix_problem(unexpected, set(missing)):
        problems.append(f"{prefix}; save the model without its wrapper, or rename the tensors")
        missing = []
    else:
        problems += [
            f"{name}: not a tensor of this {model.family} model{explain(name, missing, model.num_experts)}"
            for name in unexpected
        ]
    for name in missing:
        tied = '; if it is the embedding, set "tie_word_embeddings" to true in config.json' if name == _HEAD else ""
        problems.append(f"{name}: missing; no file holds it{tied}")
    for name, shape in expected.items():
        if name in entries:
            problems += _tensor_problems(name, entries, shape)
    return skipped, problems


def _tensor_problems(name: str, entries: dict[str, Entry], shape: tuple[int, ...]) -> list[str]:
    entry, scale = entries[name], entries.get(name + SCALE)
    if entry.shape != shape:
        return [f"{name}: shape {entry.shape} in {entry.file.name}, but config.json says {shape}"]
    if entry.dtype == FP8_DTYPE:
        if len(shape) != 2:
            return [f"{name}: FP8 of shape {shape}; block FP8 is supported for matrices only"]
        if scale is None:
            return [f"{name}{SCALE}: missing; {name} is FP8 and needs its scales"]
        if scale.shape != (blocks := FP8.scale_shape(shape)):
            return [f"{name}{SCALE}: shape {scale.shape}, but blocks of {FP8.block_size(0)} need {blocks}"]
        if scale.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
            return [f"{name}{SCALE}: type {scale.dtype}; supported scales are BF16, FP16, FP32 and E8M0"]
        return []
    if entry.dtype not in _PLAIN:
        return [f"{name}: type {entry.dtype}; supported are BF16, FP16, FP32 and block FP8 (E4M3)"]
    return [f"{name}{SCALE}: scales of a tensor that is {entry.dtype}"] if scale is not None else []
