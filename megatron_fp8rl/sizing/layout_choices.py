"""Layouts of a run on a number of GPUs, and which is the best. Pure; no torch.

In:  a configuration, a kind of GPU, how many there are. Out: every layout that the rules allow and that fits, with its
seconds by phase, the cheapest first; and how many were refused, by reason.

Trainer: tensor-parallel degrees within a node, pipeline stages, experts over as many ranks as a stage has, or fewer; and
microbatches of as many tokens as asked for, or more where that is faster and fits.
Engines: data x tensor ranks of a replica. The GPUs between them are divided so that neither waits long for the other,
if sampling overlaps training, or else shared.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight import engine_memory, layout_search, rules, trainer_memory
from megatron_fp8rl.preflight.memory import Gpu
from megatron_fp8rl.sizing.rates import Network, Rates
from megatron_fp8rl.sizing.step_time import Lengths, StepTime, step_time

_TENSOR = (1, 2, 4, 8)
_STAGES = (1, 2, 4, 8, 16)
_EXPERTS = (1, 2, 4, 8, 16, 32, 64)
_ENGINES = ((1, 1), (1, 2), (1, 4), (1, 8), (8, 1), (4, 4), (2, 8), (16, 1), (32, 1), (4, 8))  # (data, tensor)
_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)  # of the GPUs, for the trainer


@dataclass(frozen=True)
class Choice:
    """One layout."""

    cfg: RunConfig
    time: StepTime
    trainer_share: float  # of a GPU's memory
    engine_share: float

    @property
    def words(self) -> str:
        parallel, rollout = self.cfg.parallel, self.cfg.rollout
        trainer = (
            f"{parallel.world_size} = TP{parallel.tensor} PP{parallel.pipeline} EP{parallel.expert} DP{parallel.data}"
        )
        trainer += f", {rollout.max_tokens_per_microbatch:,} tokens a microbatch"
        engine = f"DP{rollout.data} TP{rollout.tensor} EP{rollout.expert}"
        shared = " on the same GPUs" if rollout.placement == "colocated" else ""
        return f"{trainer}; {rollout.num_replicas} x {engine}{shared}"


@dataclass(frozen=True)
class Choices:
    """Layouts, the cheapest first; and numbers of those that were refused, by reason."""

    found: tuple[Choice, ...]
    refused: Counter[str]

    @property
    def num_considered(self) -> int:
        return len(self.found) + self.refused.total()


def choices(
    cfg: RunConfig, gpu: Gpu, num_gpus: int, lengths: Lengths, rates: Rates, network: Network, node: int
) -> Choices:
    """All layouts of ``cfg`` on ``num_gpus`` GPUs that can work."""
    found: list[Choice] = []
    refused: Counter[str] = Counter()
    engines = {}
    for data, tensor in _ENGINES:
        change = _engine(cfg, data, tensor)
        if change is None or data * tensor > num_gpus:
            continue
        if (fitting := _with_room(change, gpu)) is None:
            refused["an engine leaves no room for sequences"] += 1
        else:
            engines[data, tensor] = fitting

    def timed(cfg: RunConfig, trainer_share: float, engine_share: float) -> Choice:
        time = step_time(cfg, lengths, rates, network, memory_bytes=gpu.memory_bytes, gpus=num_gpus, gpus_per_node=node)
        return Choice(cfg, time, trainer_share, engine_share)

    for world in _worlds(cfg, num_gpus, node):
        for trainer in _trainers(cfg, world, node):
            fitting = list(_with_longer_microbatches(trainer, gpu))
            if not fitting:
                refused["a trainer rank does not fit its GPU"] += 1
                continue
            for of_engine, engine in engines.values():
                joined = [(_joined(one, of_engine, num_gpus), share) for one, share in fitting]
                if joined[0][0] is None:
                    refused["no GPU is left for an engine"] += 1
                    continue
                if wrong := rules.check(joined[0][0], accelerator=gpu.generation):
                    refused[f"{wrong[0].field}: {wrong[0].problem}"] += 1
                    continue
                found.append(min((timed(*one, engine.estimate.share) for one in joined), key=_cost))
    found.sort(key=_cost)
    return Choices(tuple(found), refused)


def _cost(choice: Choice) -> tuple[float, str]:
    return choice.time.gpu_seconds_per_million, choice.words


def _engine(cfg: RunConfig, data: int, tensor: int) -> RunConfig | None:
    """The configuration with engines of these degrees; None for what vLLM does not divide so."""
    model = cfg.model
    if model.num_attention_heads % tensor or (data > 1 and not model.is_moe):
        return None
    ranks = data * tensor
    expert = ranks if model.is_moe and ranks > 1 and model.num_experts % ranks == 0 else 1
    if data > 1 and expert == 1:
        return None
    return replace(cfg, rollout=replace(cfg.rollout, data=data, tensor=tensor, expert=expert))


def _with_room(cfg: RunConfig, gpu: Gpu) -> tuple[RunConfig, engine_memory.EngineEstimate] | None:
    """The largest share of a GPU for the engine that leaves room for what is outside it, such as spare weights."""
    for share in (cfg.rollout.gpu_memory_utilization, 0.8, 0.7, 0.6, 0.5):
        change = replace(cfg, rollout=replace(cfg.rollout, gpu_memory_utilization=share))
        engine = engine_memory.worker(change, gpu.memory_bytes)
        if not engine.is_idle and engine.estimate.share <= 1.0:
            return change, engine
    return None


def _worlds(cfg: RunConfig, num_gpus: int, node: int) -> list[int]:
    if cfg.rollout.placement == "colocated":
        return [num_gpus]
    step = node if num_gpus >= 2 * node else 1
    return sorted({max(step, int(num_gpus * share) // step * step) for share in _SHARES})


def _trainers(cfg: RunConfig, world: int, node: int) -> Iterator[RunConfig]:
    model = cfg.model
    experts = [n for n in _EXPERTS if model.is_moe and model.num_experts % n == 0] or [1]
    for tensor, pipeline, expert in itertools.product(_TENSOR, _STAGES, experts):
        if tensor > node or world % (tensor * pipeline * cfg.parallel.context) or world % (pipeline * expert):
            continue
        if pipeline > model.num_layers or model.num_attention_heads % tensor:
            continue
        sequences = cfg.rollout.prompts_per_step * cfg.rollout.completions_per_prompt
        if world // (tensor * pipeline * cfg.parallel.context) > sequences:
            continue
        parallel = replace(
            cfg.parallel,
            world_size=world,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            expert_tensor=1,
            virtual_stages=1,
        )
        yield replace(cfg, parallel=parallel)


def _with_longer_microbatches(cfg: RunConfig, gpu: Gpu) -> Iterator[tuple[RunConfig, float]]:
    """The configuration with as many tokens a microbatch, two and four times as many, as long as it fits, and the share of a
    GPU that its trainer takes."""
    tokens = cfg.rollout.max_tokens_per_microbatch
    for size in (tokens, 2 * tokens, 4 * tokens):
        longer = cfg if size == tokens else layout_search.apply(cfg, layout_search.microbatches_of(size))
        estimate = trainer_memory.worst_rank(longer, gpu, gpu.memory_bytes)
        if estimate.is_tight:
            return
        yield longer, estimate.share


def _joined(trainer: RunConfig, engine: RunConfig, num_gpus: int) -> RunConfig | None:
    """Trainer and engines together, with as many replicas as there is room for."""
    rollout = engine.rollout
    left = num_gpus if rollout.placement == "colocated" else num_gpus - trainer.parallel.world_size
    replicas = left // rollout.ranks
    if replicas < 1:
        return None
    tokens = trainer.rollout.max_tokens_per_microbatch
    return replace(trainer, rollout=replace(rollout, num_replicas=replicas, max_tokens_per_microbatch=tokens))
