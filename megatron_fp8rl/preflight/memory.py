"""GPUs that a run is meant for, what an estimate of their memory is made of, and what trainer and engine share. Pure.

The GPUs need not be those of the machine that asks. Where trainer and engines use one GPU in turns, each phase of a
step adds up what is there together; the order of a step is that of ``megatron_fp8rl.colocation``:

    sampling     engine: everything                            trainer: its CUDA context, and what is not offloaded
    training     engine: CUDA context and graphs, while        trainer: everything
                 asleep, and everything at sleep level 0
    publishing   engine: weights, context and graphs, and      trainer: context, weights, and what of the rest is
                 one layer that is loaded                      not offloaded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision.hardware import Generation

GIB = 1 << 30
TIGHT = 0.92  # share of a GPU beyond which the allocator's fragments decide whether a run survives
GpuName = Literal["h100", "h200", "b200"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: GpuName
    generation: Generation
    memory_bytes: int  # that CUDA reports as total; what is printed on the box is more

    @property
    def fp8_weight_copies(self) -> int:
        """FP8 copies of a weight that Transformer Engine keeps under per-tensor scales.

        Hopper multiplies FP8 only with both operands K-major, so backward needs the transpose; Blackwell does not.
        Blockwise scales need a second copy everywhere: transposed blocks have scales of their own.
        """
        return 1 if self.generation == "blackwell" else 2


# torch.cuda.get_device_properties(0).total_memory of an H100 SXM 80 GB, an H200 SXM 141 GB and a B200 180 GB.
GPUS: dict[str, Gpu] = {
    "h100": Gpu(name="h100", generation="hopper", memory_bytes=int(79.1 * GIB)),
    "h200": Gpu(name="h200", generation="hopper", memory_bytes=int(139.8 * GIB)),
    "b200": Gpu(name="b200", generation="blackwell", memory_bytes=int(178.3 * GIB)),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One use of memory."""

    name: str
    num_bytes: int
    formula: str  # how the number comes about, in numbers


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak memory of one process on one GPU."""

    title: str
    parts: tuple[Part, ...]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def share(self) -> float:
        return self.total_bytes / self.capacity_bytes

    def part(self, name: str) -> Part:
        """The part called ``name``. Raises KeyError when there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)


_WEIGHTS = ("weights", "FP8 copies", "reference model")  # of the trainer
_OFFLOADED = {"params": _WEIGHTS, "gradients": ("gradients",), "optimizer": ("optimizer states",)}
_CONTEXT = "communication, CUDA"
_ENGINE_WEIGHTS = ("weights, FP8", "weights, scales", "weights, BF16", "latent projections")
_ASLEEP = (_CONTEXT, "CUDA graphs")  # what stays of an engine
_UPDATE = "weight update"


def phases(cfg: RunConfig, trainer: Estimate, engine: Estimate) -> tuple[Estimate, ...]:
    """Sampling, training, publishing; empty when trainer and engines have GPUs of their own."""
    if cfg.rollout.placement != "colocated":
        return ()
    everything = {part.name for part in trainer.parts}
    gone = {name for part in cfg.optim.offload for name in _OFFLOADED[part]}
    busy = {"activations", "temporaries"}  # while training alone
    resident = everything - gone - busy
    awake = {part.name for part in engine.parts} - {_UPDATE}
    asleep = set(_ASLEEP) if cfg.rollout.sleep_level else awake
    publishing = {*_ENGINE_WEIGHTS, *_ASLEEP, _UPDATE} if cfg.rollout.sleep_level else {*awake, _UPDATE}
    return (
        _together("sampling", trainer, resident, engine, awake),
        _together("training", trainer, everything, engine, asleep),
        _together("publishing", trainer, resident | {*_WEIGHTS} & everything, engine, publishing),
    )


def host_bytes(cfg: RunConfig, trainer: Estimate, engine: Estimate) -> int:
    """Host memory of one GPU's state that waits for the other side: page-locked, and kept once taken."""
    copied = {"params": ("weights", "reference model"), "optimizer": ("optimizer states",)}
    names = {name for part in cfg.optim.offload for name in copied.get(part, ())}
    found = sum(part.num_bytes for part in trainer.parts if part.name in names)
    if cfg.rollout.placement == "colocated" and cfg.rollout.sleep_level == 1:
        found += sum(part.num_bytes for part in engine.parts if part.name in _ENGINE_WEIGHTS)
    return found


def _together(phase: str, trainer: Estimate, of_trainer: set[str], engine: Estimate, of_engine: set[str]) -> Estimate:
    parts = [
        Part(name=f"{whose}: {part.name}", num_bytes=part.num_bytes, formula=part.formula)
        for whose, estimate, names in (("trainer", trainer, of_trainer), ("engine", engine, of_engine))
        for part in estimate.parts
        if part.name in names and part.num_bytes
    ]
    return Estimate(title=f"while {phase}", parts=tuple(parts), capacity_bytes=trainer.capacity_bytes)
