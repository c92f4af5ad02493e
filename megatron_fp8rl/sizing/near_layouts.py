"""The layout of a job whose user names none: what fits, nearest to data parallel, and takes the least time.

In: a configuration as it would be on data-parallel ranks, the machines, and what the user has set. Out: the configuration
with a layout, microbatches and turns of trainer and engines, and how it differs. Pure; no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from megatron_fp8rl.config import ParallelConfig, RolloutConfig, RunConfig
from megatron_fp8rl.preflight import layout_search, trainer_memory
from megatron_fp8rl.preflight.diagnosis import DoctorOptions, gpus_wanted, judge
from megatron_fp8rl.sizing import rates
from megatron_fp8rl.sizing.step_time import Lengths, step_time

Override = Callable[[RunConfig], RunConfig]  # sets the user's fields again

_SHORTEST, _LONGEST = 4096, 32768  # tokens of a microbatch on one rank
_FEWEST = 4  # microbatches of an update and pipeline stage


def fastest(
    start: RunConfig, machines: DoctorOptions, override: Override
) -> tuple[RunConfig, layout_search.Change, str]:
    """(configuration, how it differs from ``start``, why). Dense models have the layout nearest to ``start``. Experts may be
    divided over any number of a node's ranks: of the layouts nearest to each, the one whose steps take least by the arithmetic
    of ``plan``. With fewer experts, a rank may keep what it would have to move, and have longer microbatches."""
    degrees = math.gcd(start.parallel.world_size, max(1, start.model.num_experts), machines.gpus_per_node)
    starts: dict[ParallelConfig, RunConfig] = {}  # one, if the user has set the degree
    for degree in (n for n in range(1, degrees + 1) if degrees % n == 0):
        divided = override(replace(start, parallel=replace(start.parallel, expert=degree)))
        starts.setdefault(divided.parallel, divided)
    judged = lambda cfg: judge(override(cfg), machines)  # noqa: E731
    found = []
    for one in starts.values():
        cfg, change = _nearest(one, judged, machines, override)
        if one.parallel.expert != start.parallel.expert:
            change = tuple(({"parallel.expert": one.parallel.expert} | dict(change)).items())
        found.append((cfg, change))
    if len(found) == 1:
        return *found[0], "nearest to data parallel that fits and moves least between trainer and engines"

    def order(one: tuple[RunConfig, layout_search.Change]) -> tuple[int, int, float]:
        verdict = judged(one[0])
        return len(verdict.errors), verdict.num_layout_warnings, _step_s(one[0], machines) if verdict.works else 0.0

    return *min(
        found, key=order
    ), "fastest by the arithmetic of plan, of the layouts nearest to each division of the experts"


def _nearest(
    start: RunConfig, judged: layout_search.Judge, machines: DoctorOptions, override: Override
) -> tuple[RunConfig, layout_search.Change]:
    """(configuration, change) of the layout nearest to ``start`` that fits, at best without offloading."""
    change = in_place(start, judged) if start.rollout.placement == "colocated" else ()
    found = judged(layout_search.apply(start, change))
    if found.errors or found.num_layout_warnings:
        change = layout_search.search(
            start, judged, machines.hardware, machines.num_gpus, machines.gpus_per_node
        ).change
    cfg = override(layout_search.apply(start, change))
    longer = longer_microbatches(cfg, judged)
    with_longer = layout_search.apply(cfg, longer)
    if override(with_longer) == with_longer:  # otherwise the user has set one of these fields
        change, cfg = tuple((dict(change) | dict(longer)).items()), with_longer
    return cfg, change


def _step_s(cfg: RunConfig, machines: DoctorOptions) -> float:
    """Seconds of a step, as ``plan`` computes them without options."""
    return step_time(
        cfg,
        Lengths.of(cfg.rollout),
        rates.of(machines.gpu),
        rates.Network(),
        memory_bytes=machines.hardware.memory_bytes,
        gpus=gpus_wanted(cfg),
        gpus_per_node=machines.gpus_per_node,
    ).step


def in_place(cfg: RunConfig, judge: layout_search.Judge) -> layout_search.Change:
    """The change after which engines share the trainer's GPUs and least of their memory moves in every step: at best
    none, else that of sleeping engines, with microbatches of half as many tokens or selective recompute if nothing less
    fits; empty if all of these need offloading, or a KV cache for less than half of the sequences that are decoded at once.

    Moving what an 80 GB GPU holds takes seconds, more than the recompute of a step; a smaller KV cache costs nothing
    while it holds all sequences.
    """
    wanted = _decoded_at_once(cfg.rollout) / 2
    ways = itertools.product(_less_activation_memory(cfg), dict.fromkeys((0, cfg.rollout.sleep_level)))
    for fewer_activations, sleep in ways:
        for share in layout_search.SHARES:
            change = (("rollout.sleep_level", sleep), ("rollout.gpu_memory_utilization", share), ("optim.offload", ()))
            change += fewer_activations
            found = judge(layout_search.apply(cfg, change))
            if found.works and not found.num_layout_warnings:
                if found.engine is not None and found.engine.full_sequences >= wanted:
                    return tuple((path, value) for path, value in change if attrgetter(path)(cfg) != value)
                break
    return ()


def _less_activation_memory(cfg: RunConfig) -> list[layout_search.Change]:
    """Recompute and tokens of a microbatch, the cheapest first. Half as many tokens cost a dense model little; for a layer of
    experts the host launches as many kernels as before, and GPUs read and write as many gradients."""
    tokens = cfg.rollout.max_tokens_per_microbatch
    sizes = (tokens, tokens // 2) if tokens // 2 >= max(_SHORTEST, cfg.max_sequence_tokens) else (tokens,)
    ways = [(recompute, size) for recompute in dict.fromkeys((cfg.optim.recompute, "selective")) for size in sizes]
    if cfg.model.is_moe:
        ways.sort(key=lambda way: -way[1])
    return [(("optim.recompute", recompute), ("rollout.max_tokens_per_microbatch", size)) for recompute, size in ways]


def longer_microbatches(cfg: RunConfig, judge: layout_search.Judge) -> layout_search.Change:
    """The change after which a microbatch has 4, 2 or 1.5 times as many tokens, whose logits exist at once, in the same
    layout; engines on the trainer's GPUs may give up KV cache that no sequence needs. Empty if neither fits, if few
    microbatches would be left, or if the configuration does not work as it is.

    The host launches as many kernels for a long microbatch as for a short one, and each reads and writes all gradients.
    """
    rollout, parallel = cfg.rollout, cfg.parallel
    if not judge(cfg).works:
        return ()
    shares = [rollout.gpu_memory_utilization]
    if rollout.placement == "colocated":
        shares += [share for share in layout_search.SHARES if share < shares[0]]
    for size in (times * rollout.max_tokens_per_microbatch // 2 for times in (8, 4, 3)):
        longer = layout_search.microbatches_of(size)
        if size > _LONGEST * parallel.context:
            continue
        if trainer_memory.num_microbatches(layout_search.apply(cfg, longer)) < _FEWEST * parallel.pipeline:
            continue
        for share in shares:
            change = (*longer, ("rollout.gpu_memory_utilization", share))
            found = judge(layout_search.apply(cfg, change))
            if found.engine is None or found.engine.full_sequences < _decoded_at_once(rollout):
                break
            if found.works and not found.num_layout_warnings:
                return tuple((path, value) for path, value in change if attrgetter(path)(cfg) != value)
    return ()


def _decoded_at_once(rollout: RolloutConfig) -> int:
    """Sequences that one engine decodes at once, at most."""
    num_asked = math.ceil(rollout.prompts_per_step * rollout.completions_per_prompt / rollout.num_replicas)
    return min(rollout.max_num_sequences, num_asked)
