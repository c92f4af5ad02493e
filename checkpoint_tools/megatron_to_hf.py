"""Megatron-Core distributed checkpoint of any layout -> Hugging Face checkpoint.

In:  a folder from hf_to_megatron, a checkpoint of a run, a run (its newest complete checkpoint), or a folder of
     another program with a config.json.
Out: safetensors in shards with their index, config.json, generation_config.json, tokenizer and digests.
Runs on: worker processes, without GPU. Rows go from file to file; no model is built.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from checkpoint_tools.digests import TensorDigests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HfWriter
from checkpoint_tools.hf_folder import side_files
from checkpoint_tools.hf_to_megatron import DType, converted_dtype
from checkpoint_tools.megatron_folder import STATE, MegatronFolder, find_checkpoint, read_state
from checkpoint_tools.output import fingerprint, output_folder
from checkpoint_tools.report import report_conversion
from checkpoint_tools.row_chunks import clip, row_chunks, segments
from checkpoint_tools.torch_dist import METADATA
from checkpoint_tools.workers import Bucket, Volume, WorkerOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.fused_tensors import fusion_of
from megatron_fp8rl.data.model_files import has_tokenizer, is_finite, read_config
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

_NOT_ARCHITECTURE = ("hf_path", "initializer_range", "max_position_embeddings")
_LINKS = ".source"  # in the partial folder
_MODEL_DIR = "model"  # in a run: config.json and tokenizer of its engines


@dataclass(frozen=True, kw_only=True)
class Options(WorkerOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Checkpoint folder, or folder of a run (its newest complete checkpoint)."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to create."""
    hf_config: Path | None = None
    """Folder with config.json and tokenizer; required when the source has none."""
    dtype: DType = "keep"
    """Type of the weights. keep copies the types of the checkpoint: BF16, or FP32 if trained or converted so."""
    shard_gb: float = 5.0
    """Largest shard, in GB of 10^9 bytes."""
    skip_crc: bool = False
    """Do not check the CRC-32 of pieces, for checkpoints that were saved without it."""


def run(options: Options) -> int:
    """Convert and print a report; returns 0."""
    path = find_checkpoint(options.source)
    model = None
    if options.hf_config is not None:
        model = registry.from_hf_config(read_config(options.hf_config), fp8_weights=True)
    source = MegatronFolder.open(path, model, check_crc=not options.skip_crc)
    with report_conversion(path, options.target) as report:
        config_dir = options.hf_config or find_config_dir(path)
        report.volume = convert(source, options.target, options, config_dir, options.dtype, options.shard_gb)
        report.num_tensors = len(registry.hf_tensors(source.model))
        report.has_tokenizer = config_dir is not None and has_tokenizer(side_files(config_dir))
    return 0


def convert(
    source: MegatronFolder,
    target: Path,
    options: WorkerOptions,
    config_dir: Path | None,
    dtype: DType = "keep",
    shard_gb: float = 5.0,
) -> Volume:
    """Convert and verify; returns the written bytes.

    ``config_dir`` has config.json and tokenizer. Raises CheckpointError like :func:`output_folder`, and when a piece
    or a tensor is damaged.
    """
    weights = registry.weights(source.model).values()
    dtypes = {w.name: source.dtype(w) if dtype == "keep" else converted_dtype(w, dtype) for w in weights}
    by_name = {name: (dtypes[w.name], shape) for w in weights for name, shape in _parts(w).items()}
    tensors = {name: by_name[name] for name in registry.hf_tensors(source.model)}
    sizes = [
        (w.name, sum(torch.Size(shape).numel() for shape in _parts(w).values()) * dtypes[w.name].itemsize)
        for w in weights
    ]
    buckets, total = fill_buckets(sizes), sum(size for _, size in sizes)
    inputs = {
        "command": "megatron_to_hf",
        "source": [str(source.path.resolve()), fingerprint([source.path / METADATA, *source.path.glob(STATE)])],
        "model": repr(source.model),
        "config": str(config_dir and config_dir.resolve()),
        "dtype": [dtype, shard_gb],
    }
    with output_folder(target, inputs, overwrite=options.overwrite, num_bytes=total) as output:
        links = output.partial / _LINKS
        source = _link_files(source, links)
        fusion = fusion_of(source.model.family)
        writer = HfWriter.create(output.partial, tensors, shard_gb, options.memory_bytes, fusion=fusion)
        job = ToHf(source, writer, dtypes)
        volume = run_buckets(job, buckets, output, workers=options.workers, label="megatron_to_hf")
        config = _config(source.model, config_dir, {entry.dtype for entry in writer.entries.values()})
        writer.finish(output, source.path.name, config, side_files(config_dir) if config_dir else [])
        shutil.rmtree(links, ignore_errors=True)
        output.commit()
    return volume


def _link_files(source: MegatronFolder, links: Path) -> MegatronFolder:
    """Hard-link the checkpoint's files, so that a running job can remove the checkpoint; on another filesystem read it
    in place. Raises CheckpointError when it is already removed."""
    links.mkdir(exist_ok=True)
    try:
        for name in {piece.file for _, stored in source.locations.values() for piece in stored.pieces}:
            (links / name).unlink(missing_ok=True)
            os.link(source.path / name, links / name)
    except FileNotFoundError as error:
        problem = f"{error.filename} was removed, perhaps for a newer checkpoint; run the command again"
        raise CheckpointError(source.path, problem) from error
    except OSError:
        return source
    return replace(source, reader=replace(source.reader, folder=links, display_folder=source.path))


def _parts(weight: Weight) -> dict[str, tuple[int, ...]]:
    return dict(weight.parts) | dict.fromkeys(weight.copies, weight.shape)


@dataclass
class ToHf:
    """Job: write a bucket of parameters into the shards."""

    source: MegatronFolder
    writer: HfWriter
    dtypes: dict[str, torch.dtype]  # by Megatron name
    not_finite: dict[str, None] = field(default_factory=dict)  # an ordered set of names

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Write, read back and verify; returns digests, and names with NaN or infinity."""
        self.not_finite.clear()
        written = TensorDigests(self.source.path)
        for name in bucket.names:
            self._write(registry.weights(self.source.model)[name], written)
        self.writer.verify(written.done)
        self.source.reader.close()
        return {"digests": written.done, "not_finite": list(self.not_finite)}

    def _write(self, weight: Weight, written: TensorDigests) -> None:
        files = ", ".join(self.source.files_with(weight))
        stored = TensorDigests(f"{self.source.path}: {files}", self.source.recorded_digests)
        whole = segments(weight, self.source.model)
        for first, end in row_chunks(weight.shape, self.writer.memory_bytes):
            rows = self.source.rows(weight, first, end)
            for segment in clip(whole, first, end):
                part = rows[segment.offset : segment.offset + segment.size]
                name, shape = weight.parts[segment.part]
                if self.source.recorded_digests:
                    stored.add(name, segment.start, part, shape[0])
                part = part.to(self.dtypes[weight.name])
                if not is_finite(part):
                    self.not_finite[name] = None
                for copy in (name, *weight.copies):
                    self.writer.write(copy, segment.start, part)
                    written.add(copy, segment.start, part, shape[0])


def find_config_dir(path: Path) -> Path | None:
    """The folder with config.json and tokenizer: the checkpoint, its run's ``model.hf_path``, or its run's model."""
    config = read_state(path).get("config", {})
    hf_path = config.get("model", {}).get("hf_path")
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    candidates = [path, *([Path(hf_path)] if hf_path else []), run_dir / _MODEL_DIR]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def _config(model: ModelConfig, config_dir: Path | None, dtypes: set[torch.dtype]) -> dict[str, Any]:
    """Content of config.json. Raises CheckpointError when the file in ``config_dir`` describes another model."""
    config = registry.to_hf_config(model)
    if config_dir is not None:
        config = read_config(config_dir)
        config.pop("quantization_config", None)
        other = registry.from_hf_config(config, keep_mtp=model.num_mtp_layers > 0)
        differences = [
            f"{f.name} is {getattr(other, f.name)!r} instead of {getattr(model, f.name)!r}"
            for f in fields(model)
            if f.name not in _NOT_ARCHITECTURE and getattr(other, f.name) != getattr(model, f.name)
        ]
        if differences:
            problem = f"config.json describes another model: {', '.join(differences)}. Set --hf_config to its folder"
            raise CheckpointError(config_dir, problem)
        if model.num_mtp_layers == 0 and config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0  # engines would look for their weights
    widest = torch.bfloat16 if torch.bfloat16 in dtypes else next(iter(dtypes))
    return config | {"dtype": str(widest).removeprefix("torch.")}
