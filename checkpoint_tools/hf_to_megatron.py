"""Hugging Face checkpoint -> Megatron-Core distributed checkpoint (torch_dist), which every parallel layout can load.

In:  a folder with config.json and safetensors, of BF16, FP16, FP32 or 128x128 block FP8 weights.
Out: a folder with the keys of the trainer's own checkpoints, and beside them config.json, tokenizer and digests.
Runs in worker processes; no GPU, no Megatron-Core. The model is never built: rows go from file to file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import HfFolder, has_tokenizer, side_files
from checkpoint_tools.keys import extra_state, object_key, place
from checkpoint_tools.megatron_folder import STATE
from checkpoint_tools.output import Output, fingerprint, output_folder
from checkpoint_tools.published import check_files
from checkpoint_tools.report import say_converted
from checkpoint_tools.strips import Segment, clip, is_finite, segments, strips
from checkpoint_tools.torch_dist import Piece, PieceReader, StoredTensor, append, write_metadata
from checkpoint_tools.work import Bucket, Volume, WorkOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

DType = Literal["keep", "bfloat16", "float32"]
_COMMON_STATE = "common_state/shard_0_1"  # where Megatron-Core looks for what is not a tensor
_FORMAT = 1  # of state.json, as trainer/checkpoint.py writes it


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to make."""
    dtype: DType = "keep"
    """Type of the weights. keep leaves them as they are and turns FP8 into BF16."""
    keep_mtp: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: left out)")] = False
    """Convert multi-token prediction layers, too. The trainer leaves them out."""


def run(options: Options) -> int:
    """The command."""
    source = HfFolder.open(options.source, keep_mtp=options.keep_mtp)
    with say_converted(options.source, options.target) as said:
        said.left_out(source.left_out)
        said.checked(source, check_files(source.files, options))
        said.volume = convert(source, options.target, options, dtype=options.dtype)
        if mixed := _mixed(source):
            more = ", ..." if len(mixed) > 1 else ""
            said.notes.append(
                f"types: parts of {len(mixed)} tensors differ and come back in the widest ({mixed[0]}{more})"
            )
        said.num_tensors = len(registry.hf_tensors(source.model))
        said.has_tokenizer = has_tokenizer(side_files(source.path))
    return 0


def convert(source: HfFolder, target: Path, work: WorkOptions, *, dtype: DType = "keep") -> Volume:
    """Convert, verify and rename; returns how much was written.

    Raises CheckpointError as :func:`output_folder` does, and when a tensor is damaged.
    """
    source.require_tied_head(work.memory_bytes)
    dtypes = _dtypes(source, dtype)
    job = ToMegatron(source, Path(), dtypes, work.memory_bytes)
    sizes = {name: _num_bytes(weight, job.dtype_of(weight)) for name, weight in registry.weights(source.model).items()}
    buckets = fill_buckets(sizes.items())
    decides = {
        "command": "hf_to_megatron",
        "source": [str(source.path.resolve()), fingerprint(source.files)],
        "model": repr(source.model),
        "dtype": dtype,
        "buckets": [bucket.num_bytes for bucket in buckets],
    }
    total = sum(sizes.values())
    with output_folder(target, decides, overwrite=work.overwrite, num_bytes=total) as output:
        job.partial = output.partial
        volume = run_buckets(job, buckets, output, workers=work.workers, label="hf_to_megatron")
        _complete(output, source, job, len(buckets))
        output.commit()
    return volume


def _dtypes(source: HfFolder, dtype: DType) -> dict[str, torch.dtype]:
    """Type of each key's tensor: one that holds all that is stacked in it exactly."""
    found: dict[str, torch.dtype] = {}
    for weight in registry.weights(source.model).values():
        key = place(weight, source.model).key
        for name, _ in weight.parts:
            kept = source.dtype(name)
            found[key] = torch.promote_types(found.get(key, kept), kept)
        if dtype != "keep":
            found[key] = torch.float32 if weight.dtype == "float32" else getattr(torch, dtype)
    return found


def _mixed(source: HfFolder) -> list[str]:
    """Keys of tensors that are stacked of parts of several types."""
    types: dict[str, set[torch.dtype]] = {}
    for weight in registry.weights(source.model).values():
        types.setdefault(place(weight, source.model).key, set()).update(source.dtype(name) for name, _ in weight.parts)
    return [key for key, found in types.items() if len(found) > 1]


def _num_bytes(weight: Weight, dtype: torch.dtype) -> int:
    return torch.Size(weight.shape).numel() * dtype.itemsize


@dataclass
class ToMegatron:
    """The job: a bucket of parameters becomes one file."""

    source: HfFolder
    partial: Path
    dtypes: dict[str, torch.dtype]  # by key
    memory_bytes: int
    not_finite: dict[str, None] = field(default_factory=dict)  # tensors of the bucket with NaN or infinity, in order

    @property
    def model(self) -> ModelConfig:
        return self.source.model

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.dtypes[place(weight, self.model).key]

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """{digests, what is not finite, pieces by Megatron name, objects by key}, on disk and read back."""
        file = f"__{bucket.index}_0.distcp"
        self.not_finite.clear()
        running = digests.Running(self.source.path)
        pieces: dict[str, list[Piece]] = {}
        objects: dict[str, Piece] = {}
        with open(self.partial / file, "wb") as stream:
            for name in bucket.names:
                weight = registry.weights(self.model)[name]
                found = place(weight, self.model)
                pieces[name] = []
                for first, rows in self._strips(weight, running):
                    offsets = (*found.index, first, *(0 for _ in weight.shape[1:]))
                    stacked = rows.view(*(1 for _ in found.index), *rows.shape)
                    pieces[name].append(append(stream, stacked, file, offsets))
                state = extra_state(weight, self.model)
                if state is not None:
                    objects[object_key(state)] = append(stream, [None], file, ())
            stream.flush()
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._verify(file, pieces, running.done)
        return {
            "digests": running.done,
            "not_finite": list(self.not_finite),
            "pieces": {name: [piece.to_json() for piece in found] for name, found in pieces.items()},
            "objects": {key: piece.to_json() for key, piece in objects.items()},
        }

    def _strips(self, weight: Weight, running: digests.Running) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of the Megatron tensor from top to bottom."""
        whole, dtype = segments(weight, self.model), self.dtype_of(weight)
        for first, end in strips(weight.shape, self.memory_bytes):
            rows = torch.empty(end - first, *weight.shape[1:], dtype=dtype)
            for segment in clip(whole, first, end):
                rows[segment.offset : segment.offset + segment.size] = self._part(weight, segment, dtype, running)
            yield first, rows

    def _part(self, weight: Weight, segment: Segment, dtype: torch.dtype, running: digests.Running) -> Tensor:
        name, shape = weight.parts[segment.part]
        rows = self.source.rows(name, segment.start, segment.stop).to(dtype)
        running.add(name, segment.start, rows, shape[0])
        if not is_finite(rows):
            self.not_finite[name] = None
        for copy in weight.copies:
            same = self.source.rows(copy, segment.start, segment.stop).to(dtype)
            running.add(copy, segment.start, same, shape[0])
            if not torch.equal(rows, same):
                raise CheckpointError(
                    self.source.path,
                    f"{copy}: differs from {name}, but Megatron's multi-token prediction layers share it; leave these "
                    "layers out (without --keep_mtp)",
                )
        return rows

    def _verify(self, file: str, pieces: dict[str, list[Piece]], written: dict[str, str]) -> None:
        """Read a file back, split its tensors as a reader would, and compare their digests."""
        # The digests say more than the CRC-32 of the archives.
        reader, again = PieceReader(self.partial, check_crc=False), digests.Running(self.partial / file)
        for name, found in pieces.items():
            weight = registry.weights(self.model)[name]
            whole, stacked = segments(weight, self.model), len(place(weight, self.model).index)
            for piece in found:
                first, num_rows = piece.offsets[stacked], piece.sizes[stacked]
                rows = reader.rows(name, piece, self.dtype_of(weight), (0,) * stacked, 0, num_rows)
                for segment in clip(whole, first, first + num_rows):
                    part, shape = weight.parts[segment.part]
                    again.add(part, segment.start, rows[segment.offset : segment.offset + segment.size], shape[0])
        reader.forget()
        wrong = [name for name, value in again.done.items() if written[name] != value]
        if wrong:
            raise CheckpointError(
                self.partial / file, f"{', '.join(wrong)}: what is on the disk is not what was written. Check the disk"
            )


def _complete(output: Output, source: HfFolder, job: ToMegatron, num_buckets: int) -> None:
    """Everything besides the weights: metadata, state, digests, and the files that belong to the model."""
    records = [output.done[index] for index in range(num_buckets)]
    tensors: dict[str, StoredTensor] = {}
    for record in records:
        for name, found in record["pieces"].items():
            weight = registry.weights(source.model)[name]
            where = place(weight, source.model)
            shape, known = (*where.sizes, *weight.shape), tensors.get(where.key)
            pieces = tuple(Piece.from_json(piece) for piece in found)
            tensors[where.key] = StoredTensor(job.dtypes[where.key], shape, (known.pieces if known else ()) + pieces)
    objects = {key: Piece.from_json(piece) for record in records for key, piece in record["objects"].items()}
    file = f"__{num_buckets}_0.distcp"
    with open(output.partial / file, "wb") as stream:
        objects[_COMMON_STATE] = append(stream, [{}], file, ())  # type: ignore[list-item]
    write_metadata(output.partial, tensors, objects)
    digests.write(
        output.partial,
        {name: value for record in records for name, value in record["digests"].items()},
        source=source.path.name,
    )
    _write_model_files(output.partial, source)
    files = sorted(
        file for file in output.partial.iterdir() if not file.name.startswith(".") or file.name == ".metadata"
    )
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


def _write_model_files(folder: Path, source: HfFolder) -> None:
    """config.json and tokenizer, so that the folder can be a run's model.hf_path, and comes back as it was."""
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if "quantization_config" in source.config:
        config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in side_files(source.path):
        (folder / file.name).write_bytes(file.read_bytes())
