"""Search for a layout of trainer and engines that works, close to the requested one. Pure.

In: a configuration, and a function that judges a configuration by all of preflight. Out: an :class:`Outcome`: a change
after which the judge finds no error, or a description of what was tried. Candidates are ordered by their distance from
the configuration, which does not depend on the machine. The number of judgements and their total time are bounded.

    engines    rollout.tensor and rollout.expert that tile (rollout.data stays), a larger share of the GPU, fewer replicas if GPUs are few
    trainer    tensor, pipeline, context, expert and expert tensor degrees that divide and tile, more or fewer ranks
    memory     recompute, smaller microbatches, no virtual stages; on shared GPUs also sleeping and offloading

The architecture is never changed. Layouts whose weights, gradients and optimizer states alone exceed a GPU on average
are discarded without a judgement.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import shlex
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megatron_fp8rl import config as config_module
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.preflight import engine_memory, tiling, trainer_memory
from megatron_fp8rl.preflight.findings import Change, Judgement
from megatron_fp8rl.preflight.memory import GIB, Gpu

Judge = Callable[[RunConfig], Judgement]
Option = tuple[float, dict[str, Any]]  # cost, fields

_MAX_JUDGEMENTS, _DEADLINE_S = 250, 1.0  # of CPU time of this process, so that other load does not matter
_MAX_ENGINES, _MAX_LAYOUTS = 6, 250  # combined with each other: the nearest ones
_MAX_GROWTH = 32  # of the number of ranks, if the number of GPUs is not given
_CUDA_BYTES = int(1.9 * GIB)
_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SHARES = (0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # values of rollout.gpu_memory_utilization
_LAYOUT = (
    "rollout.tensor",
    "rollout.expert",
    "rollout.num_replicas",
    "rollout.max_tokens_per_microbatch",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_bytes",
    "rollout.sleep_level",
    "optim.recompute",
    "optim.offload",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a search. If it found nothing, ``change`` is empty and ``tried`` describes what was tried."""

    change: Change = ()
    tried: str = ""


def apply(cfg: RunConfig, change: Change) -> RunConfig:
    """``cfg`` with the fields of ``change`` set."""
    for path, value in change:
        section, _, field = path.rpartition(".")
        if section:
            value = dataclasses.replace(getattr(cfg, section), **{field: value})
        cfg = dataclasses.replace(cfg, **{section or field: value})
    return cfg


def microbatches_of(tokens: int) -> Change:
    """Microbatches of so many tokens, whose logits exist at once."""
    return ("rollout.max_tokens_per_microbatch", tokens), ("optim.logprob_chunk_tokens", tokens)


def words(overrides: Sequence[str], change: Change) -> str:
    """``overrides`` followed by ``change``, as command-line arguments; a field set by both keeps the new value only."""
    fields = {path for path, _ in change}
    kept: list[str] = []
    is_old = False  # the following words are values of a field that ``change`` sets
    for word in overrides:
        if word.startswith("--"):
            is_old = word[2:].partition("=")[0].replace("-", "_") in fields
        if not is_old:
            kept.append(word)
    new = []
    for path, value in change:
        new += [f"--{path}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join([*kept, *new])


def search(cfg: RunConfig, judge: Judge, gpu: Gpu, num_gpus: int | None, gpus_per_node: int) -> Outcome:
    """A change after which the run can work, if possible without warnings about its layout."""
    fields, missing = _mend_fields(cfg, judge)
    if missing:
        return Outcome(tried=f"no value could be proposed for {', '.join(missing)}")
    budget = _Budget(judge)
    for variant in _precisions(apply(cfg, fields), judge):
        change = (*fields, *variant)
        base = apply(cfg, change)
        if budget.accepts(base, change):
            return Outcome(change=change)
        steps = sorted(_steps(base), key=lambda option: option[0])
        engines, layouts = _parts(base, gpu, num_gpus, gpus_per_node)
        budget.num_engines, budget.num_layouts = len(engines), len(layouts)
        for layout in _candidates(base, engines, layouts, num_gpus):
            if budget.is_spent or _accepts_layout(budget, base, change, layout, [fields for _, fields in steps]):
                break
        if budget.best:
            return Outcome(change=budget.best)
    return Outcome(tried=budget.text(num_gpus))


def _accepts_layout(budget: _Budget, base: RunConfig, change: Change, layout: dict, steps: list[dict]) -> bool:
    """Whether a layout works with one of the steps, tried in order of cost; if the most frugal step fails, all do."""

    def accepts(step: dict[str, Any]) -> bool:
        fields = {**layout, **step}
        if fields["parallel.pipeline"] == 1:
            fields["parallel.virtual_stages"] = 1
        new = tuple((path, value) for path, value in fields.items() if attrgetter(path)(base) != value)
        return budget.accepts(apply(base, new), (*change, *new))

    accepted = accepts(steps[-1])
    if not budget.last_works:
        return False
    return any(accepts(step) for step in steps[:-1]) or accepted


class _Budget:
    """Judges candidates within a budget and remembers the best one."""

    def __init__(self, judge: Judge):
        self._judge, self._judged, self._end = judge, 0, time.process_time() + _DEADLINE_S
        self._closest: tuple[float, str] = (math.inf, "")
        self.best: Change = ()  # without errors and with the fewest warnings
        self.last_works = False
        self.num_engines = self.num_layouts = 0
        self._num_warnings = math.inf

    @property
    def is_spent(self) -> bool:
        return self._judged >= _MAX_JUDGEMENTS or time.process_time() > self._end

    def accepts(self, cfg: RunConfig, change: Change) -> bool:
        """Judge a candidate; return whether the search can stop with it."""
        found = self._judge(cfg)
        self._judged += 1
        self.last_works = found.works
        if found.works:
            if found.num_layout_warnings <= self._num_warnings:
                self.best, self._num_warnings = change, found.num_layout_warnings
            return not found.num_layout_warnings
        estimates = [e for e in (found.trainer, found.engine and found.engine.estimate, *found.phases) if e is not None]
        if estimates:
            worst = max(estimates, key=lambda estimate: estimate.share)
            shown = f"{words((), change) or 'as it is'}: {worst.title} needs {worst.total_bytes / GIB:.1f} GiB of "
            self._closest = min(self._closest, (worst.share, f"{shown}{worst.capacity_bytes / GIB:.1f} GiB"))
        return False

    def text(self, num_gpus: int | None) -> str:
        limit = f"at most {num_gpus} GPUs" if num_gpus is not None else f"at most {_MAX_GROWTH} times as many ranks"
        tried = (
            f"{self._judged} layouts on {limit} were judged. Of those nearest to this one, {self.num_engines} ways to "
            "divide an engine (rollout.tensor, expert, gpu_memory_utilization) tile and have room for its weights and "
            f"a KV cache, and {self.num_layouts} layouts of the trainer (world_size, tensor, pipeline, context, "
            "expert, expert_tensor) tile and have room for its states; each was tried with recompute, smaller "
            "microbatches and, where both share GPUs, sleeping and offloading"
        )
        return f"{tried}. The closest: {self._closest[1]}" if self._closest[1] else tried


def _mend_fields(cfg: RunConfig, judge: Judge) -> tuple[Change, list[str]]:
    """(changes to fields outside the layout that remove their errors, options for which no value helps)."""
    changes: dict[str, Any] = {}
    while True:
        now = apply(cfg, tuple(changes.items()))
        errors = judge(now).errors
        fields = {f.subject[2:]: f for f in errors if f.subject.startswith("--") and not _is_of_layout(f.subject[2:])}
        fields = {path: finding for path, finding in fields.items() if finding.code != "untiled_size"}
        if not fields:
            return tuple(changes.items()), []
        for path, finding in fields.items():
            for value in _values(now, path, finding.choices):
                after = judge(apply(now, ((path, value),))).errors
                if len(after) < len(errors) and finding.subject not in {f.subject for f in after}:
                    changes[path] = value
                    break
            else:
                continue
            break
        else:
            return (), [f"--{path}" for path in fields]


def _is_of_layout(path: str) -> bool:
    return path.startswith("parallel.") or path in _LAYOUT


def _values(cfg: RunConfig, path: str, choices: Sequence[Any]) -> Iterator[Any]:
    """Values to try for a field: those of the violation, then all others of a field with few values.

    None for a field of the model, whose architecture is never changed.
    """
    section, _, field = path.rpartition(".")
    if path.count(".") > 1 or section == "model":
        return
    yield from choices
    value = attrgetter(path)(cfg)
    owner = type(getattr(cfg, section)) if section else RunConfig
    kind = typing.get_type_hints(owner, vars(config_module))[field]
    if typing.get_origin(kind) is typing.Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value and choice not in choices)
    elif isinstance(value, bool) and not choices:
        yield not value


def _precisions(cfg: RunConfig, judge: Judge) -> Iterator[Change]:
    """Changes for a model with a size that does not tile: BF16 for its layers, or at both ends; otherwise none."""
    wrong = {finding.subject for finding in judge(cfg).errors if finding.code == "untiled_size"}
    if not wrong:
        yield ()
        if cfg.precision.rollout == "bf16" or _degrees(cfg, "rollout.tensor") != [1]:
            return  # FP8 blocks do not prevent dividing an engine
    first = cfg.model.first_dense_layers
    if wrong == {"--model.ffn_hidden_size"} and first:
        yield (("precision.bf16_first_layers", first),)
    yield (("precision.trainer", "bf16"), ("precision.rollout", "bf16"))


def _parts(cfg: RunConfig, gpu: Gpu, num_gpus: int | None, node: int) -> tuple[list[Option], list[Option]]:
    """(ways to divide an engine, layouts of the trainer) that tile and fit, the nearest of each."""
    ranks = num_gpus or cfg.parallel.world_size * _MAX_GROWTH
    engines = list(itertools.islice(_engines(cfg, gpu, ranks, node), _MAX_ENGINES))
    return engines, _layouts(cfg, gpu, ranks, num_gpus is not None, node)


def _candidates(
    cfg: RunConfig, engines: list[Option], layouts: list[Option], num_gpus: int | None
) -> Iterator[dict[str, Any]]:
    """Combinations of trainer and engines, the nearest first."""
    merged = [_combined(cfg, cost, engine, layouts, num_gpus) for cost, engine in engines]
    return (candidate for _, _, candidate in heapq.merge(*merged, key=lambda entry: entry[:2]))


def _combined(
    cfg: RunConfig, cost: float, engine: dict[str, Any], layouts: list[Option], num_gpus: int | None
) -> list[tuple[float, str, dict[str, Any]]]:
    """One way to divide an engine, with every trainer layout and as many replicas as fit."""
    found = []
    replicas, ranks = max(1, cfg.rollout.num_replicas), engine["rollout.tensor"] * cfg.rollout.data
    for of_layout, layout in layouts:
        world = layout["parallel.world_size"]
        room = world if cfg.rollout.placement == "colocated" else num_gpus and num_gpus - world
        fitting = replicas if room is None else min(replicas, room // ranks)
        if fitting >= 1:
            candidate = {**layout, **engine, "rollout.num_replicas": fitting}
            total = cost + of_layout + _distance(fitting, replicas, 0.5)
            found.append((round(total, 6), str(candidate), candidate))
    return sorted(found, key=lambda entry: entry[:2])


def _distance(new: int, old: int, weight: float) -> float:
    return weight * abs(math.log2(max(new, 1) / max(old, 1)))


def _engines(cfg: RunConfig, gpu: Gpu, num_gpus: int, node: int) -> Iterator[Option]:
    """Ways to divide an engine that leave room for sequences, the nearest first."""
    rollout, model, data = cfg.rollout, cfg.model, cfg.rollout.data
    found: list[Option] = []
    utilizations = {rollout.gpu_memory_utilization: 0.0, 0.9: 0.5}
    if cfg.rollout.placement == "colocated":
        utilizations |= {share: 2 * (0.95 - share) for share in SHARES[1:-1]}
        utilizations[rollout.gpu_memory_utilization] = 0.0
    for is_expert_parallel in (False, True) if model.is_moe else (False,):
        of_experts = dataclasses.replace(rollout, tensor=1, expert=2 if is_expert_parallel else 1)
        for tensor in _degrees(dataclasses.replace(cfg, rollout=of_experts), "rollout.tensor"):
            ranks = data * tensor
            expert = ranks if is_expert_parallel else 1
            if ranks > num_gpus or (is_expert_parallel and (ranks == 1 or model.num_experts % ranks)):
                continue
            cost = _distance(tensor, rollout.tensor, 1.0) + (4.0 if tensor > node else 0.0)
            cost += 0.5 if is_expert_parallel != (rollout.expert > 1) else 0.0
            for share, more in utilizations.items():
                for cache in {rollout.kv_cache_bytes: 0.0, None: 0.0}:
                    fields = {"rollout.tensor": tensor, "rollout.expert": expert, "rollout.kv_cache_bytes": cache}
                    fields["rollout.gpu_memory_utilization"] = share
                    found.append((cost + more + (cache != rollout.kv_cache_bytes), fields))
    for cost, fields in sorted(found, key=lambda option: (option[0], str(option[1]))):
        worker = engine_memory.worker(apply(cfg, tuple(fields.items())), gpu.memory_bytes)
        if not worker.is_idle and worker.estimate.share <= 1:
            yield cost, fields


def _degrees(cfg: RunConfig, option: str) -> list[int]:
    """Values of a degree that divide and tile; 1 is among them if it tiles."""
    model = cfg.model
    known = tiling.common_degrees(tiling.matrices(cfg))
    if option in known:
        return known[option]
    whole = model.moe_ffn_hidden_size if option == "parallel.expert_tensor" else model.num_attention_heads
    return [degree for degree in range(1, 65) if whole % degree == 0] or [1]


def _layouts(cfg: RunConfig, gpu: Gpu, ranks: int, is_bounded: bool, node: int) -> list[Option]:
    """Layouts of the trainer that divide, tile and fit its states, the nearest first."""
    parallel, model = cfg.parallel, cfg.model
    single = dataclasses.replace(cfg, parallel=dataclasses.replace(parallel, tensor=1, expert_tensor=1))
    tensors = [degree for degree in _degrees(single, "parallel.tensor") if degree <= ranks]
    expert_tensors = _degrees(single, "parallel.expert_tensor") if model.is_moe else [1]
    expert_tensors = [degree for degree in expert_tensors if degree <= 8]
    experts = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0] if model.is_moe else [1]
    stages = sorted({n for n in (*_STAGES, parallel.pipeline) if n <= model.num_layers})
    contexts = sorted({1, parallel.context, 2 * parallel.context, 4 * parallel.context})
    count, shares = parameters.count(model), trainer_memory.shares_memory(cfg, gpu)
    found: list[Option] = []
    for world in _worlds(parallel.world_size, ranks, node):
        of_world = _distance(world, parallel.world_size, 0.7 if is_bounded else 1.5)
        for tensor, pipeline, context in itertools.product(tensors, stages, contexts):
            if world % (tensor * pipeline * context):
                continue
            cost = of_world + _distance(tensor, parallel.tensor, 1.0) + _distance(pipeline, parallel.pipeline, 1.0)
            cost += _distance(context, parallel.context, 1.5) + (4.0 if tensor > node else 0.0)
            for expert, expert_tensor in itertools.product(experts, expert_tensors):
                if world % (expert * expert_tensor * pipeline):
                    continue
                fields = {
                    "parallel.world_size": world,
                    "parallel.tensor": tensor,
                    "parallel.pipeline": pipeline,
                    "parallel.context": context,
                    "parallel.expert": expert,
                    "parallel.expert_tensor": expert_tensor,
                }
                if _state_bytes(cfg, gpu, count, shares, fields) <= gpu.memory_bytes:
                    more = _distance(expert, parallel.expert, 0.8)
                    more += _distance(expert_tensor, parallel.expert_tensor, 1.5)
                    found.append((cost + more, fields))
    return heapq.nsmallest(_MAX_LAYOUTS, found, key=lambda option: (option[0], *option[1].values()))


def _worlds(now: int, ranks: int, node: int) -> list[int]:
    """World sizes to try: powers of two, three times those, whole nodes, and the current one."""
    powers = [factor << power for factor in (1, 3) for power in range(13)]
    nodes = range(node, min(ranks, 16 * node) + 1, node)
    return sorted({n for n in (now, *powers, *nodes) if 1 <= n <= ranks})


def _state_bytes(
    cfg: RunConfig, gpu: Gpu, count: parameters.ParameterCount, shares: tuple[bool, bool], fields: dict[str, Any]
) -> float:
    """A lower bound for an average rank: weights, gradients, optimizer states, most of the FP8 copies, CUDA. ``shares``
    of ``trainer_memory.shares_memory``."""
    world, tensor, pipeline = (fields[f"parallel.{name}"] for name in ("world_size", "tensor", "pipeline"))
    per = trainer_memory.Bytes.of(cfg)
    copies = 0.9 * trainer_memory.fp8_copy_bytes(cfg, gpu)
    held = per.gradient + (0.9 if cfg.precision.params == "fp8" else per.weight)
    of_dense, of_expert = (per.gradient if is_shared else held for is_shared in shares)
    dense = (count.total - count.expert) / (tensor * pipeline)
    expert = count.expert / (pipeline * fields["parallel.expert"] * fields["parallel.expert_tensor"])
    linears = max(0.0, dense - count.embedding / (tensor * pipeline)) + expert
    copied, states = copies * linears, per.optimizer * count.total / world
    apart = cfg.rollout.placement == "colocated"  # an optimizer that is offloaded comes when copies have gone
    return dense * of_dense + expert * of_expert + (max(copied, states) if apart else copied + states) + _CUDA_BYTES


def _steps(cfg: RunConfig) -> Iterator[Option]:
    """Ways to save memory in the same layout: recompute, smaller microbatches, no virtual stages, sharing in turns."""
    rollout, optim = cfg.rollout, cfg.optim
    order = ("none", "selective", "full")
    longest = cfg.max_sequence_tokens
    sizes = [max(longest, rollout.max_tokens_per_microbatch)]
    while sizes[-1] > longest and len(sizes) < 5:
        sizes.append(max(longest, sizes[-1] // 2))
    stages = {cfg.parallel.virtual_stages, 1}
    turns = [(optim.offload, rollout.sleep_level)]
    if rollout.placement == "colocated" and rollout.max_staleness == 0:
        sleep = rollout.sleep_level or (1 if cfg.model.mla is not None else 2)
        offload = optim.offload or ("params", "gradients", "optimizer")
        turns += [(optim.offload, sleep), (offload, sleep)]
    for (i, recompute), (j, size), virtual, (k, (offload, sleep)) in itertools.product(
        enumerate(order[order.index(optim.recompute) :]), enumerate(sizes), stages, enumerate(dict.fromkeys(turns))
    ):
        cost = 0.4 * i + 0.6 * j + 0.3 * (virtual != cfg.parallel.virtual_stages) + 0.3 * k
        fields = {"parallel.virtual_stages": virtual, "optim.recompute": recompute, "optim.offload": offload}
        yield cost, {**fields, "rollout.sleep_level": sleep, "rollout.max_tokens_per_microbatch": size}
