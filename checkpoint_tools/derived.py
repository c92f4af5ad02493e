"""Write a Hugging Face checkpoint of another architecture, made from the tensors of a source.

In:  a source folder and a recipe, which returns rows of the new tensors.
Out: a folder with the source's tokenizer, whose logits were compared with those of the source in float64.
Runs on: worker processes, without GPU, Megatron-Core or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
import tyro
from torch import Tensor

from checkpoint_tools.digests import TensorDigests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.float64_logits import fits, float64_logits
from checkpoint_tools.hf_files import HfWriter
from checkpoint_tools.hf_folder import HfFolder, side_files
from checkpoint_tools.output import fingerprint, output_folder
from checkpoint_tools.report import Report
from checkpoint_tools.row_chunks import row_chunks
from checkpoint_tools.workers import Bucket, WorkerOptions, fill_buckets, run_buckets
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.fused_tensors import fusion_of
from megatron_fp8rl.data.model_files import has_tokenizer
from megatron_fp8rl.names import registry

NUM_TOKENS = 64  # of the sequence whose logits are compared
TOLERANCE = 1e-9  # of a logit in float64, times the standard deviation of the logits if that is above 1
_FEW_LAYERS = 2  # compared when free memory is too small for all


@dataclass(frozen=True, kw_only=True)
class DerivedOptions(WorkerOptions):
    """Source, target and checks of a command that changes the architecture."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face checkpoint folder."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to create."""
    logits: Literal["auto", "yes", "no"] = "auto"
    """Compare logits in float64. auto: those of the first two layers if all would take much of the free memory."""
    shard_gb: float = 5.0
    """Largest shard, in GB of 10^9 bytes."""


class Recipe(Protocol):
    """The tensors of ``model`` from those of a source. Pickles."""

    source: HfFolder
    model: ModelConfig

    def dtype(self, name: str) -> torch.dtype: ...

    def rows(self, name: str, first: int, end: int, dtype: torch.dtype) -> Tensor: ...


def write(recipe: Recipe, options: DerivedOptions, inputs: dict[str, Any], report: Report, compare: Callable[[], str]):
    """Write and verify the folder, and add to ``report``.

    Args:
        recipe: the new tensors.
        options: target, checks and workers.
        inputs: what determines the content besides source and architecture.
        report: gets the number of tensors, their bytes and the result of ``compare``.
        compare: checks the function before the folder gets its name; returns a line.

    Raises:
        CheckpointError: like :func:`output_folder`, or a tensor is damaged or has NaN or infinity.
    """
    source, model = recipe.source, recipe.model
    source.require_tied_head(options.memory_bytes)
    tensors = {name: (recipe.dtype(name), shape) for name, shape in registry.hf_tensors(model).items()}
    num_bytes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in tensors.items()}
    inputs = inputs | {
        "source": [str(source.path.resolve()), fingerprint(source.files)],
        "model": repr(model),
        "shard_gb": options.shard_gb,
    }
    total = sum(num_bytes.values())
    with output_folder(options.target, inputs, overwrite=options.overwrite, num_bytes=total) as output:
        fusion = fusion_of(model.family)
        writer = HfWriter.create(output.partial, tensors, options.shard_gb, options.memory_bytes, fusion=fusion)
        buckets, label = fill_buckets(num_bytes.items()), inputs["command"]
        report.volume = run_buckets(_Write(recipe, writer), buckets, output, workers=options.workers, label=label)
        report.num_tensors = len(tensors)
        report.notes.append(compare())
        files = side_files(source.path)
        report.has_tokenizer = has_tokenizer(files)
        writer.finish(output, source.path.name, config_of(recipe), files)
        output.commit()


def config_of(recipe: Recipe) -> dict[str, Any]:
    """config.json of the new architecture, with the special tokens and the type of the source."""
    config = recipe.source.config
    kept = {f"{kind}_token_id": config.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    dtype = str(recipe.source.dtype("model.embed_tokens.weight")).removeprefix("torch.")
    tokens = {key: value for key, value in kept.items() if value is not None}
    return registry.to_hf_config(recipe.model) | tokens | {"dtype": dtype}


@dataclass
class _Write:
    """Job: write the tensors of a bucket."""

    recipe: Recipe
    writer: HfWriter

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Write, read back and verify; returns {"digests": by name}."""
        path = self.recipe.source.path
        written = TensorDigests(path)
        for name in bucket.names:
            entry = self.writer.entries[name]
            for first, end in row_chunks(entry.shape, self.writer.memory_bytes):
                rows = self.recipe.rows(name, first, end, entry.dtype)
                if not rows.isfinite().all():
                    raise CheckpointError(path, f"{name}: has NaN or infinity from row {first} on")
                self.writer.write(name, first, rows)
                written.add(name, first, rows, entry.shape[0])
        self.writer.verify(written.done)
        return {"digests": written.done}


@dataclass(frozen=True)
class Comparison:
    """Logits of a source and of the model that a recipe makes of it, in float64."""

    num_layers: int
    difference: float  # of unrounded weights, the largest
    rounded_difference: float  # of the weights in the type of the folder
    spread: float  # standard deviation of the source's logits

    @property
    def is_same(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.spread)


def check_logits(recipe: Recipe, options: DerivedOptions, prefix: str = "") -> tuple[str, Comparison | None]:
    """Compare logits: (text for the report, result or None). Raises CheckpointError, whose text begins with ``prefix``,
    if the function is another one."""
    result = compare_logits(recipe, options.logits)
    if result is None:
        why = "--logits no" if options.logits == "no" else "free memory is too small; --logits yes compares anyway"
        return f"logits: not compared: {why}", None
    if not result.is_same:
        problem = f"{prefix}logits in float64 differ by {result.difference:.2e}; report this with its config.json"
        raise CheckpointError(recipe.source.path, problem)
    layers = "" if result.num_layers == recipe.model.num_layers else f" of the first {result.num_layers} layers"
    text = f"logits{layers} of {NUM_TOKENS} random tokens in float64: max difference {result.difference:.1e}"
    return text, result


def compare_logits(recipe: Recipe, mode: Literal["auto", "yes", "no"]) -> Comparison | None:
    """Compare random tokens' logits; None without a comparison: by ``mode``, or because free memory is too small."""
    if mode == "no":
        return None
    source, model = recipe.source, recipe.model
    counts = [model.num_layers] if mode == "yes" else [model.num_layers, min(_FEW_LAYERS, model.num_layers)]
    for num_layers in counts:
        shapes = registry.hf_tensors(replace(model, num_layers=num_layers))
        if mode == "yes" or fits(sum(map(math.prod, shapes.values()))):
            break
    else:
        return None
    few = {"num_hidden_layers": num_layers}
    tokens = torch.randint(0, model.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    old = registry.hf_tensors(replace(source.model, num_layers=num_layers))

    def new(exact: bool) -> Tensor:
        def read(name: str) -> Tensor:
            return recipe.rows(name, 0, shapes[name][0], torch.float64 if exact else recipe.dtype(name))

        return float64_logits(config_of(recipe) | few, read, list(shapes), tokens)

    reference = float64_logits(source.config | few, lambda name: source.rows(name, 0, old[name][0]), list(old), tokens)
    exact, rounded = ((new(kind) - reference).abs().max().item() for kind in (True, False))
    return Comparison(num_layers, exact, rounded, reference.std().item())
