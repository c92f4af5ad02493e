"""Hugging Face checkpoint -> the same in block FP8, as vLLM and transformers load it.

In:  a folder of BF16, FP16, FP32 or block FP8 weights.
Out: E4M3 matrices with one scale per 128x128 block (``weight_scale_inv``), everything else in BF16, and a config.json
     that names every module that is not FP8. The bytes are those that the trainer publishes to engines: the same layer
     table and the same quantizer decide them.
Runs in worker processes; no GPU, no Megatron-Core, no vLLM. Memory holds strips of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HfWriter, create_shards, plan_shards, shard_bytes, write_rest
from checkpoint_tools.hf_folder import SCALE, HfFolder, has_tokenizer, side_files
from checkpoint_tools.output import fingerprint, output_folder
from checkpoint_tools.published import check_files
from checkpoint_tools.report import say_converted
from checkpoint_tools.strips import strips
from checkpoint_tools.work import Bucket, Volume, WorkOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.types import Scales
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.quantizers import quantize
from megatron_fp8rl.rollout.vllm_args import quantization_config
from megatron_fp8rl.weight_sync.plan import PlanError, Transfer, plan


@dataclass(frozen=True, kw_only=True)
class Options(WorkOptions):
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to make."""
    scales: Scales = "pow2"
    """Powers of two, which every kernel uses exactly, or full FP32 scales."""
    bf16_first_layers: int = 0
    """Layers at the start whose matrices stay BF16."""
    bf16_last_layers: int = 0
    """Layers at the end whose matrices stay BF16."""
    tensor: int = 1
    """Tensor-parallel degree of the engine: matrices whose parts would cut through blocks are refused."""
    keep_mtp: bool = False
    """Keep multi-token prediction layers, in BF16."""
    shard_gb: float = 5.0
    """Largest shard, in GB of 10^9 bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("tensor", 1), ("bf16_first_layers", 0), ("bf16_last_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: at least {least} is needed")

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig(
            rollout="blockwise",
            scales=self.scales,
            bf16_first_layers=self.bf16_first_layers,
            bf16_last_layers=self.bf16_last_layers,
        )


def run(options: Options) -> int:
    """The command."""
    source = HfFolder.open(options.source, keep_mtp=options.keep_mtp)
    with say_converted(options.source, options.target) as said:
        said.left_out(source.left_out)
        said.checked(source, check_files(source.files, options))
        transfers, said.volume = convert(source, options.target, options)
        said.num_tensors = len(transfers)
        said.notes.append(f"{sum(t.is_fp8 for t in transfers)} matrices are FP8, scales {options.scales}")
        said.has_tokenizer = has_tokenizer(side_files(source.path))
    return 0


def convert(source: HfFolder, target: Path, options: Options) -> tuple[list[Transfer], Volume]:
    """Quantize, verify and rename; returns what was written, and how much.

    Raises CheckpointError as :func:`output_folder` does, when a tensor is damaged or holds NaN or infinity, and
    when an engine could not hold an FP8 matrix.
    """
    source.require_tied_head(options.memory_bytes)
    table = LayerTable.build(source.model, options.precision)
    try:
        planned = plan(source.model, table, TrainerLayout(), EngineLayout(tensor=options.tensor))
    except PlanError as error:
        problems = [_with_our_options(problem, options.tensor) for problem in error.problems]
        raise CheckpointError(source.path, problems) from error
    if not any(t.is_fp8 for t in planned.transfers):
        raise CheckpointError(source.path, "no matrix would be FP8; lower --bf16_first_layers or --bf16_last_layers")
    wire = {
        t.name: (getattr(torch, t.dtype), t.shape) for transfer in planned.transfers for t in transfer.wire_tensors()
    }
    sizes = {t.name: t.format.num_bytes(t.shape) for t in planned.transfers}
    buckets, total = fill_buckets(sizes.items()), sum(sizes.values())
    decides = {
        "command": "hf_to_fp8",
        "source": [str(source.path.resolve()), fingerprint(source.files)],
        "model": repr(source.model),
        "precision": repr(options.precision),
        "shard_gb": options.shard_gb,
    }
    with output_folder(target, decides, overwrite=options.overwrite, num_bytes=total) as output:
        shards = plan_shards(output.partial, wire, shard_bytes(options.shard_gb))
        create_shards(shards)
        entries = {name: entry for shard in shards for name, entry in shard.items()}
        transfers = {t.name: t for t in planned.transfers}
        job = ToFp8(source, HfWriter(entries, options.memory_bytes), transfers)
        volume = run_buckets(job, buckets, output, workers=options.workers, label="hf_to_fp8")
        done = {name: value for bucket in buckets for name, value in output.done[bucket.index]["digests"].items()}
        digests.write(output.partial, {name: done[name] for name in wire}, source=source.path.name)
        write_rest(output.partial, shards, _config(source, options.precision), side_files(source.path))
        output.commit()
    return planned.transfers, volume


def _with_our_options(problem: str, tensor: int) -> str:
    """A refusal of the plan, whose remedies are fields of a run, in the options of this command."""
    fields, lower = "precision.bf16_first_layers, bf16_last_layers", "lower engine.tensor or "
    problem = problem.replace(fields, "--bf16_first_layers, --bf16_last_layers")
    # One rank keeps it whole, but fuses it with its neighbours: the blocks of the next would begin within its last.
    return problem.replace("engine.tensor", "--tensor") if tensor > 1 else problem.replace(lower, "")


@dataclass
class ToFp8:
    """The job: a bucket of tensors, each quantized or rounded to BF16."""

    source: HfFolder
    writer: HfWriter
    transfers: dict[str, Transfer]

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """{digests by name}, on disk and read back."""
        written = digests.Running(self.source.path)
        for name in bucket.names:
            transfer, memory = self.transfers[name], self.writer.memory_bytes
            for first, end in strips(transfer.shape, memory):
                rows = self.source.rows(name, first, end)
                if not transfer.is_fp8:
                    self._write(name, first, rows.to(getattr(torch, transfer.dtype)), written)
                    continue
                data, scale = quantize(rows.to(torch.bfloat16), transfer.format)
                self._write(name, first, data, written)
                self._write(transfer.scale_name, transfer.format.blocks((first, end), 0)[0], scale, written)
        self.writer.verify(written.done)
        return {"digests": written.done}

    def _write(self, name: str, first: int, rows: Tensor, written: digests.Running) -> None:
        # FP8 has no infinity and few NaNs; a block that is not finite shows in its scale.
        if rows.dtype.itemsize > 1 and not rows.isfinite().all():
            name = name.removesuffix(SCALE)
            raise CheckpointError(self.source.path, f"{name}: holds NaN or infinity from row {first} on")
        self.writer.write(name, first, rows)
        written.add(name, first, rows, self.writer.entries[name].shape[0])


def _config(source: HfFolder, precision: PrecisionConfig) -> dict[str, Any]:
    """The source's config.json, completed for engines, with the modules that are not FP8."""
    config = registry.to_hf_config(source.model) | source.config | {"dtype": "bfloat16"}
    if source.model.num_mtp_layers == 0 and config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # engines would look for their weights
    return config | {"quantization_config": quantization_config(source.model, precision)}
