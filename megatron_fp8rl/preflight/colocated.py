"""Memory of one GPU that trainer and engine use in turns: what is there together, in each phase of a step.

In: the estimates of both sides, which know nothing of each other. Out: one :class:`Estimate` per phase, and the host
memory that waits for the other side. Pure. The order of a step is that of ``megatron_fp8rl.colocation``.

    sampling     engine: everything                            trainer: its CUDA context, and what is not offloaded
    training     engine: CUDA context and graphs, while        trainer: everything
                 asleep, and everything at sleep level 0
    publishing   engine: weights, context and graphs, and      trainer: context, weights, and what of the rest is
                 one layer that is loaded                      not offloaded
"""

from __future__ import annotations

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight.memory import Estimate, Part

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
