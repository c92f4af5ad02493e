"""Hugging Face checkpoint -> block FP8 or MXFP8 for vLLM and transformers.

In:  a folder of BF16, FP16, FP32 or block FP8 weights.
Out: E4M3 matrices with one scale per 128x128 block (``weight_scale_inv``), or one E8M0 scale per 32 values of a row
     (``weight_scale``, the MXFP8 of compressed-tensors); other tensors in BF16, and a config.json that lists the
     modules that are not FP8. The trainer's layer table and quantizer decide the bytes, so they equal the weights
     that the trainer publishes to engines.
Runs on: worker processes, without GPU, Megatron-Core or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from checkpoint_tools.digests import TensorDigests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HfWriter
from checkpoint_tools.hf_folder import HfFolder, side_files
from checkpoint_tools.hub_digests import check_hub_digests
from checkpoint_tools.output import fingerprint, output_folder
from checkpoint_tools.report import report_conversion
from checkpoint_tools.row_chunks import row_chunks
from checkpoint_tools.workers import Bucket, Volume, WorkerOptions, fill_buckets, require_at_least, run_buckets
from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.data.fused_tensors import SEPARATE, fusion_of
from megatron_fp8rl.data.model_files import has_tokenizer
from megatron_fp8rl.kernels.types import Scales
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.formats import weight_of_scales
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.quantizers import is_finite, quantize
from megatron_fp8rl.rollout.vllm_args import quantization_config
from megatron_fp8rl.weight_sync.plan import PlanError, Transfer, plan


@dataclass(frozen=True, kw_only=True)
class Options(WorkerOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to create."""
    format: Literal["blockwise", "mxfp8"] = "blockwise"
    """Scales per block of 128x128, or MXFP8: scales per 32 values of a row, for Blackwell GPUs."""
    scales: Scales = "pow2"
    """Of blockwise: powers of two, which every kernel applies exactly, or full FP32 scales."""
    bf16_first_layers: int = 0
    """Number of first layers whose matrices stay BF16."""
    bf16_last_layers: int = 0
    """Number of last layers whose matrices stay BF16."""
    tensor: int = 1
    """Tensor-parallel degree of the engine; matrices whose shards would cut through blocks are refused."""
    keep_mtp: bool = False
    """Keep multi-token prediction layers, in BF16."""
    shard_gb: float = 5.0
    """Largest shard, in GB of 10^9 bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, minimum in (("tensor", 1), ("bf16_first_layers", 0), ("bf16_last_layers", 0)):
            require_at_least(name, getattr(self, name), minimum)

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig(
            rollout=self.format,
            scales=self.scales,
            bf16_first_layers=self.bf16_first_layers,
            bf16_last_layers=self.bf16_last_layers,
        )


def run(options: Options) -> int:
    """Convert and print a report; returns 0."""
    source = HfFolder.open(options.source, keep_mtp=options.keep_mtp)
    if fusion_of(source.model.family) is not SEPARATE:
        problem = f"files of family {source.model.family} combine matrices, and no program reads that in block FP8"
        raise CheckpointError(source.path, f"{problem}. A run reads this folder as it is, and sends FP8 to its engines")
    with report_conversion(options.source, options.target) as report:
        report.add_source(source, check_hub_digests(source.files, options))
        transfers, report.volume = convert(source, options.target, options)
        report.num_tensors = len(transfers)
        how = "MXFP8" if options.format == "mxfp8" else f"FP8, scales {options.scales}"
        report.notes.append(f"{sum(t.is_fp8 for t in transfers)} matrices are {how}")
        report.has_tokenizer = has_tokenizer(side_files(source.path))
    return 0


def convert(source: HfFolder, target: Path, options: Options) -> tuple[list[Transfer], Volume]:
    """Quantize and verify; returns the written tensors and their bytes.

    Raises CheckpointError like :func:`output_folder`, when a tensor is damaged or has NaN or infinity, and when an
    engine could not load an FP8 matrix.
    """
    source.require_tied_head(options.memory_bytes)
    table = LayerTable.build(source.model, options.precision)
    try:
        transfers = plan(source.model, table, TrainerLayout(), EngineLayout(tensor=options.tensor)).transfers
    except PlanError as error:
        problems = [_name_options(problem, options.tensor) for problem in error.problems]
        raise CheckpointError(source.path, problems) from error
    if not any(t.is_fp8 for t in transfers):
        raise CheckpointError(source.path, "no matrix would be FP8; lower --bf16_first_layers or --bf16_last_layers")
    wire = {t.name: (getattr(torch, t.dtype), t.shape) for transfer in transfers for t in transfer.wire_tensors()}
    sizes = {t.name: t.format.num_bytes(t.shape) for t in transfers}
    buckets, total = fill_buckets(sizes.items()), sum(sizes.values())
    inputs = {
        "command": "hf_to_fp8",
        "source": [str(source.path.resolve()), fingerprint(source.files)],
        "model": repr(source.model),
        "precision": repr(options.precision),
        "shard_gb": options.shard_gb,
    }
    with output_folder(target, inputs, overwrite=options.overwrite, num_bytes=total) as output:
        writer = HfWriter.create(output.partial, wire, options.shard_gb, options.memory_bytes)
        job = ToFp8(source, writer, {t.name: t for t in transfers})
        volume = run_buckets(job, buckets, output, workers=options.workers, label="hf_to_fp8")
        writer.finish(output, source.path.name, _config(source, options.precision), side_files(source.path))
        output.commit()
    return transfers, volume


def _name_options(problem: str, tensor: int) -> str:
    """Replace the fields of a run by the options of this command."""
    fields, lower = "precision.bf16_first_layers, bf16_last_layers", "lower engine.tensor or "
    problem = problem.replace(fields, "--bf16_first_layers, --bf16_last_layers")
    # With one rank only fusion with the next matrix can misalign blocks; a lower degree does not help.
    return problem.replace("engine.tensor", "--tensor") if tensor > 1 else problem.replace(lower, "")


@dataclass
class ToFp8:
    """Job: quantize a bucket of tensors, or round them to BF16."""

    source: HfFolder
    writer: HfWriter
    transfers: dict[str, Transfer]

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Write, read back and verify; returns {"digests": by name}."""
        written = TensorDigests(self.source.path)
        for name in bucket.names:
            transfer = self.transfers[name]
            for first, end in row_chunks(transfer.shape, self.writer.memory_bytes):
                rows = self.source.rows(name, first, end)
                if not transfer.is_fp8:
                    self._write(name, first, rows.to(getattr(torch, transfer.dtype)), written)
                    continue
                data, scale = quantize(rows.to(torch.bfloat16), transfer.format)
                self._write(name, first, data, written)
                self._write(transfer.scale_name, transfer.format.blocks((first, end), 0)[0], scale, written)
        self.writer.verify(written.done)
        return {"digests": written.done}

    def _write(self, name: str, first: int, rows: Tensor, written: TensorDigests) -> None:
        if not is_finite(rows):
            name = weight_of_scales(name) or name
            raise CheckpointError(self.source.path, f"{name}: has NaN or infinity from row {first} on")
        self.writer.write(name, first, rows)
        written.add(name, first, rows, self.writer.entries[name].shape[0])


def _config(source: HfFolder, precision: PrecisionConfig) -> dict[str, Any]:
    config = registry.to_hf_config(source.model) | source.config | {"dtype": "bfloat16"}
    if source.model.num_mtp_layers == 0 and config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # engines would look for their weights
    return config | {"quantization_config": quantization_config(source.model, precision)}
