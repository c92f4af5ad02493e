"""Megatron-Core distributed checkpoint of any layout -> Hugging Face checkpoint.

In:  a folder that hf_to_megatron made, a checkpoint of a run, a run (its newest complete checkpoint), or a folder of
     another program together with a config.json.
Out: safetensors in shards with their index, config.json, generation_config.json, tokenizer and digests.
Runs in worker processes; no GPU. The model is never built: rows go from file to file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HfWriter, create_shards, plan_shards, shard_bytes, write_rest
from checkpoint_tools.hf_folder import has_tokenizer, read_config, side_files
from checkpoint_tools.hf_to_megatron import DType
from checkpoint_tools.megatron_folder import STATE, MegatronFolder, read_state, resolve
from checkpoint_tools.output import fingerprint, output_folder
from checkpoint_tools.report import say_converted
from checkpoint_tools.strips import clip, is_finite, segments, strips
from checkpoint_tools.torch_dist import METADATA
from checkpoint_tools.work import Bucket, Volume, WorkOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

_LINKS = ".source"  # in the partial folder
_MODEL_DIR = "model"  # of a run: config.json and tokenizer that its engines started with


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Checkpoint folder, or folder of a run, whose newest complete checkpoint is taken."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to make."""
    hf_config: Path | None = None
    """Folder with config.json and tokenizer; needed when the source does not have them itself."""
    dtype: DType = "keep"
    """Type of the weights. keep is that of the checkpoint: BF16, unless it was trained or converted in FP32."""
    shard_gb: float = 5.0
    """Largest shard, in GB of 10^9 bytes."""
    skip_crc: bool = False
    """Do not compare pieces with their CRC-32, for checkpoints that were saved without."""


def run(options: Options) -> int:
    """The command."""
    path = resolve(options.source)
    from_hf = _architecture(options.hf_config) if options.hf_config is not None else None
    source = MegatronFolder.open(path, from_hf, check_crc=not options.skip_crc)
    with say_converted(path, options.target) as said:
        config_dir = find_config_dir(path, options.hf_config)
        said.volume = convert(source, options.target, options, config_dir, options.dtype, options.shard_gb)
        said.num_tensors = len(registry.hf_tensors(source.model))
        said.has_tokenizer = config_dir is not None and has_tokenizer(side_files(config_dir))
    return 0


def convert(
    source: MegatronFolder,
    target: Path,
    work: WorkOptions,
    config_dir: Path | None,
    dtype: DType = "keep",
    shard_gb: float = 5.0,
) -> Volume:
    """Convert, verify and rename; returns how much was written.

    ``config_dir`` has config.json and tokenizer. Raises CheckpointError as :func:`output_folder` does, and when a piece
    or a tensor is damaged.
    """
    weights = registry.weights(source.model)
    types = {name: _dtype_of(weight, source, dtype) for name, weight in weights.items()}
    where = {hf_name: (types[w.name], shape) for w in weights.values() for hf_name, shape in _parts(w).items()}
    tensors = {name: where[name] for name in registry.hf_tensors(source.model)}
    sizes = [
        (w.name, sum(torch.Size(s).numel() for s in _parts(w).values()) * types[w.name].itemsize)
        for w in weights.values()
    ]
    buckets, total = fill_buckets(sizes), sum(size for _, size in sizes)
    decides = {
        "command": "megatron_to_hf",
        "source": [str(source.path.resolve()), fingerprint([source.path / METADATA, *source.path.glob(STATE)])],
        "model": repr(source.model),
        "config": str(config_dir and config_dir.resolve()),
        "dtype": [dtype, shard_gb],
    }
    with output_folder(target, decides, overwrite=work.overwrite, num_bytes=total) as output:
        links = output.partial / _LINKS
        source = _hold(source, links)
        shards = plan_shards(output.partial, tensors, shard_bytes(shard_gb))
        create_shards(shards)
        entries = {name: entry for shard in shards for name, entry in shard.items()}
        job = ToHf(source, HfWriter(entries, work.memory_bytes), types)
        volume = run_buckets(job, buckets, output, workers=work.workers, label="megatron_to_hf")
        done = {name: value for bucket in buckets for name, value in output.done[bucket.index]["digests"].items()}
        digests.write(output.partial, {name: done[name] for name in tensors}, source=source.path.name)
        config = _config(source.model, config_dir, {entry.dtype for entry in entries.values()})
        write_rest(output.partial, shards, config, side_files(config_dir) if config_dir else [])
        shutil.rmtree(links, ignore_errors=True)
        output.commit()
    return volume


def _hold(source: MegatronFolder, links: Path) -> MegatronFolder:
    """Give the files of the checkpoint second names, so that a running job that removes it does not take them away.

    Another filesystem cannot have such names; the checkpoint is then read where it is. Raises CheckpointError when the
    job was faster.
    """
    links.mkdir(exist_ok=True)
    try:
        for name in {piece.file for _, stored in source.found.values() for piece in stored.pieces}:
            (links / name).unlink(missing_ok=True)
            os.link(source.path / name, links / name)
    except FileNotFoundError as error:
        raise CheckpointError(
            source.path, f"{error.filename} is gone; a newer checkpoint may be there: try again"
        ) from error
    except OSError:
        return source
    return replace(source, reader=replace(source.reader, folder=links, called=source.path))


def _parts(weight: Weight) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensors that a parameter becomes."""
    return dict(weight.parts) | dict.fromkeys(weight.copies, weight.shape)


def _dtype_of(weight: Weight, source: MegatronFolder, dtype: DType) -> torch.dtype:
    if dtype == "keep":
        return source.dtype(weight)
    return torch.float32 if weight.dtype == "float32" else getattr(torch, dtype)


@dataclass
class ToHf:
    """The job: a bucket of parameters becomes rows of the shards."""

    source: MegatronFolder
    writer: HfWriter
    types: dict[str, torch.dtype]  # by Megatron name
    not_finite: dict[str, None] = field(default_factory=dict)  # tensors of the bucket with NaN or infinity, in order

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """{digests and what is not finite by Hugging Face name}, on disk and read back."""
        self.not_finite.clear()
        written = digests.Running(self.source.path)
        for name in bucket.names:
            self._write(registry.weights(self.source.model)[name], written)
        self.writer.verify(written.done)
        self.source.reader.forget()
        return {"digests": written.done, "not_finite": list(self.not_finite)}

    def _write(self, weight: Weight, written: digests.Running) -> None:
        model, files = self.source.model, ", ".join(self.source.files_of(weight))
        stored = digests.Running(f"{self.source.path}: {files}", self.source.recorded)
        whole = segments(weight, model)
        for first, end in strips(weight.shape, self.writer.memory_bytes):
            rows = self.source.rows(weight, first, end)
            for segment in clip(whole, first, end):
                part = rows[segment.offset : segment.offset + segment.size]
                name, shape = weight.parts[segment.part]
                if self.source.recorded:
                    stored.add(name, segment.start, part, shape[0])
                part = part.to(self.types[weight.name])
                if not is_finite(part):
                    self.not_finite[name] = None
                for copy in (name, *weight.copies):
                    self.writer.write(copy, segment.start, part)
                    written.add(copy, segment.start, part, shape[0])


def find_config_dir(path: Path, given: Path | None = None) -> Path | None:
    """The folder with config.json and tokenizer: given, the checkpoint itself, or where its run had them."""
    if given is not None:
        return given
    config = read_state(path).get("config", {})
    hf_path = config.get("model", {}).get("hf_path")
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    candidates = [path, *([Path(hf_path)] if hf_path else []), run_dir / _MODEL_DIR]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def _architecture(folder: Path) -> ModelConfig:
    return registry.from_hf_config(read_config(folder), fp8_weights=True)


def _config(model: ModelConfig, config_dir: Path | None, dtypes: set[torch.dtype]) -> Mapping[str, Any]:
    """Content of config.json: the given one when it is of this model, so that nothing in it is lost."""
    config: dict[str, Any] = {}
    if config_dir is not None:
        config = read_config(config_dir)
        config.pop("quantization_config", None)
        theirs = registry.from_hf_config(config, keep_mtp=model.num_mtp_layers > 0)
        theirs, ours = _architecture_only(theirs), _architecture_only(model)
        wrong = [f.name for f in fields(model) if getattr(theirs, f.name) != getattr(ours, f.name)]
        if wrong:
            said = ", ".join(f"{n} is {getattr(theirs, n)!r} instead of {getattr(ours, n)!r}" for n in wrong)
            raise CheckpointError(config_dir, f"config.json is of another model: {said}. Name its own by --hf_config")
        if model.num_mtp_layers == 0 and config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0  # engines would look for their weights
    widest = torch.bfloat16 if torch.bfloat16 in dtypes else next(iter(dtypes))
    return {**(config or registry.to_hf_config(model)), "dtype": str(widest).removeprefix("torch.")}


def _architecture_only(model: ModelConfig) -> ModelConfig:
    return replace(model, hf_path=None, initializer_range=0.0, max_position_embeddings=0)
