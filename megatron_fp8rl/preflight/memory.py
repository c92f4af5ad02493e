"""GPU kinds, memory estimates, and the phases of a GPU shared by trainer and engine. Pure.

On a shared GPU, each phase of a step adds up the parts that are resident together (``runtime/colocation.py``):

    sampling     engine: everything                            trainer: CUDA context and everything not offloaded
    training     engine: CUDA context and graphs, while        trainer: everything; the optimizer's states, if they are
                 asleep, and everything at sleep level 0       offloaded, when activations are gone
    publishing   engine: weights, context and graphs, and      trainer: context, weights, and everything else that
                 one layer being loaded                        is not offloaded
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision.hardware import Generation

GIB = 1 << 30
TIGHT = 0.92  # share of a GPU above which fragments of the allocator may cause out-of-memory errors
FULL = 0.97  # share above which they do
GpuName = Literal["h100", "h200", "b200"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: GpuName
    generation: Generation
    memory_bytes: int  # total memory that CUDA reports, less than the nominal size

    @property
    def fp8_weight_copies(self) -> int:
        """FP8 copies of a weight that Transformer Engine keeps with per-tensor scales.

        Hopper's FP8 GEMM requires both operands K-major, so the backward pass needs the transpose; Blackwell's does
        not. Blockwise scaling always needs a second copy, because transposed blocks have different scales.
        """
        return 1 if self.generation == "blackwell" else 2


# torch.cuda.get_device_properties(0).total_memory of an H100 SXM 80 GB, an H200 SXM 141 GB and a B200 180 GB.
GPUS: dict[str, Gpu] = {
    "h100": Gpu(name="h100", generation="hopper", memory_bytes=int(79.1 * GIB)),
    "h200": Gpu(name="h200", generation="hopper", memory_bytes=int(139.8 * GIB)),
    "b200": Gpu(name="b200", generation="blackwell", memory_bytes=int(178.3 * GIB)),
}


def gpu_in(device: str) -> Gpu | None:
    """The kind of GPU of a device that CUDA calls by this name; None if it is not among :data:`GPUS`."""
    return next((gpu for gpu in GPUS.values() if gpu.name.upper() in device), None)


@dataclass(frozen=True)
class Part:
    name: str
    num_bytes: int
    formula: str  # the calculation, in numbers


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak memory of one process on one GPU."""

    title: str
    parts: tuple[Part, ...]
    capacity_bytes: int
    turns: tuple[frozenset[str], ...] = ()  # names of parts; parts of two turns are never there at once

    @property
    def total_bytes(self) -> int:
        in_turns = frozenset[str]().union(*self.turns)
        always = sum(part.num_bytes for part in self.parts if part.name not in in_turns)
        return always + max(
            (sum(part.num_bytes for part in self.parts if part.name in turn) for turn in self.turns), default=0
        )

    @property
    def is_tight(self) -> bool:
        """Whether it may not fit: activations leave fragments, and an offloaded optimizer that comes alone does not."""
        alone = frozenset[str]().union(
            *(turn for turn in self.turns if not any("activations" in name for name in turn))
        )
        return self.share > FULL or self.of({part.name for part in self.parts} - alone).share > TIGHT

    def of(self, names: Container[str]) -> Estimate:
        return replace(self, parts=tuple(part for part in self.parts if part.name in names))

    @property
    def share(self) -> float:
        return self.total_bytes / self.capacity_bytes

    def part(self, name: str) -> Part:
        """The part called ``name``. Raises KeyError if there is none."""
        return {part.name: part for part in self.parts}[name]


_WEIGHTS = ("weights", "FP8 copies", "reference model")  # of the trainer
_OFFLOADED = {"params": _WEIGHTS, "gradients": ("gradients",), "optimizer": ("optimizer states",)}
WIDENED = "moments in a step"  # FP8 moments, in BF16
_CONTEXT = "communication, CUDA"
_ENGINE_WEIGHTS = ("weights, FP8", "weights, scales", "weights, BF16", "latent projections")
_ASLEEP = (_CONTEXT, "CUDA graphs")  # resident while an engine sleeps
_UPDATE = "weight update"


def phases(cfg: RunConfig, trainer: Estimate, engine: Estimate) -> tuple[Estimate, ...]:
    """Sampling, training and publishing; empty if trainer and engines have their own GPUs."""
    if cfg.engine.placement != "colocated":
        return ()
    everything = {part.name for part in trainer.parts}
    gone = {name for part in cfg.optim.offload for name in _OFFLOADED[part]}
    busy = {"activations", "temporaries", WIDENED}  # only during training
    resident = everything - gone - busy
    awake = {part.name for part in engine.parts} - {_UPDATE}
    asleep = set(_ASLEEP) if cfg.engine.sleep_level else awake
    publishing = {*_ENGINE_WEIGHTS, *_ASLEEP, _UPDATE} if cfg.engine.sleep_level else {*awake, _UPDATE}
    return (
        _together("sampling", trainer, resident, engine, awake),
        _together("training", trainer, everything, engine, asleep),
        _together("publishing", trainer, resident | {*_WEIGHTS} & everything, engine, publishing),
    )


def copied_bytes(cfg: RunConfig, trainer: Estimate) -> dict[str, int]:
    """Bytes of one GPU that go to the host, for each part of ``optim.offload`` that is copied."""
    copied = {"params": {"weights", "reference model"}, "optimizer": {"optimizer states"}}
    return {part: trainer.of(names).total_bytes for part, names in copied.items() if part in cfg.optim.offload}


def host_bytes(cfg: RunConfig, trainer: Estimate, engine: Estimate) -> int:
    """Host memory for the offloaded state of one GPU: pinned, and kept once allocated."""
    copies = (cfg.engine.sleep_level == 1) + (cfg.weight_sync.spare_weights == "host")
    copies *= cfg.engine.placement == "colocated"
    return sum(copied_bytes(cfg, trainer).values()) + copies * engine.of(_ENGINE_WEIGHTS).total_bytes


def _together(
    phase: str, trainer: Estimate, trainer_parts: set[str], engine: Estimate, engine_parts: set[str]
) -> Estimate:
    parts = [
        replace(part, name=f"{end}: {part.name}")
        for end, estimate, names in (("trainer", trainer, trainer_parts), ("engine", engine, engine_parts))
        for part in estimate.of(names).parts
        if part.num_bytes
    ]
    turns = tuple(frozenset(f"trainer: {name}" for name in turn) for turn in trainer.turns)
    return Estimate(title=f"while {phase}", parts=tuple(parts), capacity_bytes=trainer.capacity_bytes, turns=turns)
