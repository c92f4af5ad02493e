"""Hugging Face checkpoint -> Megatron-Core distributed checkpoint (torch_dist), which every parallel layout can load.

In:  a folder with config.json and safetensors, of BF16, FP16, FP32 or 128x128 block FP8 weights.
Out: a folder with the keys of the trainer's checkpoints, config.json, tokenizer and digests.
Runs on: worker processes, without GPU or Megatron-Core. Rows go from file to file; no model is built.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.digests import TensorDigests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import write_json
from checkpoint_tools.hf_folder import HfFolder, side_files
from checkpoint_tools.hub_digests import check_hub_digests
from checkpoint_tools.megatron_folder import STATE
from checkpoint_tools.megatron_keys import extra_state_key, trainer_key
from checkpoint_tools.output import Output, fingerprint, output_folder
from checkpoint_tools.report import report_conversion
from checkpoint_tools.row_chunks import Segment, clip, row_chunks, segments
from checkpoint_tools.torch_dist import Piece, PieceReader, StoredTensor, append, write_metadata
from checkpoint_tools.workers import Bucket, Volume, WorkerOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.model_files import has_tokenizer, is_finite
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

DType = Literal["keep", "bfloat16", "float32"]
_COMMON_STATE = "common_state/shard_0_1"  # Megatron-Core's key of objects that are not tensors
_FORMAT = 1  # of state.json, as in trainer/checkpoint.py


@dataclass(frozen=True, kw_only=True)
class Options(WorkerOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to create."""
    dtype: DType = "keep"
    """Type of the weights. keep copies types and dequantizes FP8 to BF16."""
    keep_mtp: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: skipped)")] = False
    """Also convert multi-token prediction layers. The trainer ignores them."""


def run(options: Options) -> int:
    """Convert and print a report; returns 0."""
    source = HfFolder.open(options.source, keep_mtp=options.keep_mtp)
    with report_conversion(options.source, options.target) as report:
        report.add_source(source, check_hub_digests(source.files, options))
        report.volume = convert(source, options.target, options, dtype=options.dtype)
        if mixed := [key for key, dtypes in _part_dtypes(source).items() if len(dtypes) > 1]:
            example = mixed[0] + (", ..." if len(mixed) > 1 else "")
            report.notes.append(f"types: parts of {len(mixed)} tensors differ; each takes its widest type ({example})")
        report.num_tensors = len(registry.hf_tensors(source.model))
        report.has_tokenizer = has_tokenizer(side_files(source.path))
    return 0


def convert(source: HfFolder, target: Path, options: WorkerOptions, *, dtype: DType = "keep") -> Volume:
    """Convert and verify; returns the written bytes.

    Raises CheckpointError like :func:`output_folder`, and when a tensor is damaged.
    """
    source.require_tied_head(options.memory_bytes)
    dtypes = _key_dtypes(source, dtype)
    job = ToMegatron(source, Path(), dtypes, options.memory_bytes)
    sizes = {
        name: torch.Size(weight.shape).numel() * job.dtype_of(weight).itemsize
        for name, weight in registry.weights(source.model).items()
    }
    buckets = fill_buckets(sizes.items())
    inputs = {
        "command": "hf_to_megatron",
        "source": [str(source.path.resolve()), fingerprint(source.files)],
        "model": repr(source.model),
        "dtype": dtype,
        "buckets": [bucket.num_bytes for bucket in buckets],
    }
    with output_folder(target, inputs, overwrite=options.overwrite, num_bytes=sum(sizes.values())) as output:
        job.partial = output.partial
        volume = run_buckets(job, buckets, output, workers=options.workers, label="hf_to_megatron")
        _finish(output, source, job, len(buckets))
        output.commit()
    return volume


def _part_dtypes(source: HfFolder) -> dict[str, set[torch.dtype]]:
    """Types of the Hugging Face tensors that are stacked in each key's tensor."""
    dtypes: dict[str, set[torch.dtype]] = {}
    for weight in registry.weights(source.model).values():
        key = trainer_key(weight, source.model).key
        dtypes.setdefault(key, set()).update(source.dtype(name) for name, _ in weight.parts)
    return dtypes


def _key_dtypes(source: HfFolder, dtype: DType) -> dict[str, torch.dtype]:
    """Type of each key's tensor; ``keep`` takes the narrowest type that is exact for all parts."""
    if dtype == "keep":
        return {key: functools.reduce(torch.promote_types, dtypes) for key, dtypes in _part_dtypes(source).items()}
    return {
        trainer_key(weight, source.model).key: converted_dtype(weight, dtype)
        for weight in registry.weights(source.model).values()
    }


def converted_dtype(weight: Weight, dtype: Literal["bfloat16", "float32"]) -> torch.dtype:
    """The type that a user selected; FP32 for weights that must stay FP32."""
    return torch.float32 if weight.dtype == "float32" else getattr(torch, dtype)


@dataclass
class ToMegatron:
    """Job: write a bucket of parameters to a file."""

    source: HfFolder
    partial: Path
    dtypes: dict[str, torch.dtype]  # by key
    memory_bytes: int
    not_finite: dict[str, None] = field(default_factory=dict)  # an ordered set of names

    @property
    def model(self) -> ModelConfig:
        return self.source.model

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.dtypes[trainer_key(weight, self.model).key]

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Write, read back and verify; returns digests, pieces and objects, and names with NaN or infinity."""
        file = f"__{bucket.index}_0.distcp"
        self.not_finite.clear()
        running = TensorDigests(self.source.path)
        pieces: dict[str, list[Piece]] = {}
        objects: dict[str, Piece] = {}
        with open(self.partial / file, "wb") as stream:
            for name in bucket.names:
                weight = registry.weights(self.model)[name]
                index = trainer_key(weight, self.model).index
                pieces[name] = []
                for first, rows in self._chunks(weight, running):
                    offsets = (*index, first, *(0 for _ in weight.shape[1:]))
                    stacked = rows.view(*(1 for _ in index), *rows.shape)
                    pieces[name].append(append(stream, stacked, file, offsets))
                if key := extra_state_key(weight, self.model):
                    objects[key] = append(stream, [None], file, ())
            stream.flush()
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._verify(file, pieces, running.done)
        return {
            "digests": running.done,
            "not_finite": list(self.not_finite),
            "pieces": {name: [piece.to_json() for piece in stored] for name, stored in pieces.items()},
            "objects": {key: piece.to_json() for key, piece in objects.items()},
        }

    def _chunks(self, weight: Weight, running: TensorDigests) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of the Megatron tensor from top to bottom."""
        whole, dtype = segments(weight, self.model), self.dtype_of(weight)
        for first, end in row_chunks(weight.shape, self.memory_bytes):
            rows = torch.empty(end - first, *weight.shape[1:], dtype=dtype)
            for segment in clip(whole, first, end):
                rows[segment.offset : segment.offset + segment.size] = self._part(weight, segment, dtype, running)
            yield first, rows

    def _part(self, weight: Weight, segment: Segment, dtype: torch.dtype, running: TensorDigests) -> Tensor:
        name, shape = weight.parts[segment.part]
        rows = self.source.rows(name, segment.start, segment.stop).to(dtype)
        running.add(name, segment.start, rows, shape[0])
        if not is_finite(rows):
            self.not_finite[name] = None
        for copy in weight.copies:
            copy_rows = self.source.rows(copy, segment.start, segment.stop).to(dtype)
            running.add(copy, segment.start, copy_rows, shape[0])
            if not torch.equal(rows, copy_rows):
                problem = f"{copy}: differs from {name}, but Megatron's multi-token prediction layers share it; "
                raise CheckpointError(self.source.path, problem + "convert without --keep_mtp")
        return rows

    def _verify(self, file: str, pieces: dict[str, list[Piece]], written: dict[str, str]) -> None:
        """Read a file back and compare the digests of its Hugging Face tensors."""
        # Digests make the CRC-32 of the archives redundant.
        reader, stored = PieceReader(self.partial, check_crc=False), TensorDigests(self.partial / file)
        for name, tensor_pieces in pieces.items():
            weight = registry.weights(self.model)[name]
            whole, stacked = segments(weight, self.model), len(trainer_key(weight, self.model).index)
            for piece in tensor_pieces:
                first, num_rows = piece.offsets[stacked], piece.sizes[stacked]
                rows = reader.rows(name, piece, self.dtype_of(weight), (0,) * stacked, 0, num_rows)
                for segment in clip(whole, first, first + num_rows):
                    part, shape = weight.parts[segment.part]
                    stored.add(part, segment.start, rows[segment.offset : segment.offset + segment.size], shape[0])
        reader.close()
        if wrong := [name for name, value in stored.done.items() if written[name] != value]:
            problem = f"{', '.join(wrong)}: the disk has other bytes than were written. Check the disk"
            raise CheckpointError(self.partial / file, problem)


def _finish(output: Output, source: HfFolder, job: ToMegatron, num_buckets: int) -> None:
    """Write metadata, state, digests, config.json and tokenizer."""
    records = [output.done[index] for index in range(num_buckets)]
    tensors: dict[str, StoredTensor] = {}
    for record in records:
        for name, stored in record["pieces"].items():
            weight = registry.weights(source.model)[name]
            location = trainer_key(weight, source.model)
            earlier = tensors[location.key].pieces if location.key in tensors else ()
            pieces = (*earlier, *(Piece.from_json(piece) for piece in stored))
            shape = (*location.sizes, *weight.shape)
            tensors[location.key] = StoredTensor(job.dtypes[location.key], shape, pieces)
    objects = {key: Piece.from_json(piece) for record in records for key, piece in record["objects"].items()}
    file = f"__{num_buckets}_0.distcp"
    with open(output.partial / file, "wb") as stream:
        objects[_COMMON_STATE] = append(stream, [{}], file, ())  # type: ignore[list-item]
    write_metadata(output.partial, tensors, objects)
    digests.write(output.partial, output.digests, source=source.path.name)
    # With config.json and tokenizer the folder can be model.hf_path of a run.
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if "quantization_config" in source.config:
        config["dtype"] = "bfloat16"
    write_json(output.partial / "config.json", config)
    for side_file in side_files(source.path):
        shutil.copyfile(side_file, output.partial / side_file.name)
    files = sorted(f for f in output.partial.iterdir() if not f.name.startswith(".") or f.name == ".metadata")
    state = {
        "format": _FORMAT,
        "step": 0,
        "updates": 0,
        "extra": {},
        "weights_only": True,
        "config": {"model": asdict(source.model)},
        "files": {file.name: file.stat().st_size for file in files},
    }
    (output.partial / STATE).write_text(json.dumps(state, indent=1) + "\n")
