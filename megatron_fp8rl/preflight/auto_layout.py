"""The search for layouts of trainer and engines that work, for ``doctor``, ``grpo`` and ``plan``. Pure; no torch.

    nearest      the smallest change after which a configuration works (doctor)
    fastest      the layout of a job whose user names none (grpo)
    all_layouts  every layout on a number of GPUs (plan)

All three accept what ``assessment.assess`` accepts, and the configuration itself is a candidate of each. ``nearest``
tries layouts in the order of their distance from the configuration, then the grid that ``all_layouts`` tries. So
``doctor`` and ``plan`` agree about the same number of GPUs:

    engines    degrees that divide and tile, a share of the GPU, as many replicas as fit
    trainer    tensor, pipeline, context, expert and expert-tensor degrees that divide and tile; more or fewer ranks
    memory     recompute, smaller microbatches, no virtual stages; on shared GPUs also sleeping and offloading

The architecture is never changed. Layouts whose weights, gradients and optimizer states alone exceed a GPU are
discarded without an assessment.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8rl import config as config_module
from megatron_fp8rl.config import EngineConfig, ParallelConfig, RunConfig
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight import engine_memory, tiling, trainer_memory
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess
from megatron_fp8rl.preflight.findings import Assessment, Change, apply, arguments
from megatron_fp8rl.preflight.memory import GIB, Gpu
from megatron_fp8rl.preflight.step_time import step_seconds

Fields = dict[str, Any]  # values by dotted field
Option = tuple[float, Fields]  # distance from the configuration, fields
Override = Callable[[RunConfig], RunConfig]  # sets the user's fields again
Check = Callable[[RunConfig], Assessment]

_MAX_ASSESSMENTS, _DEADLINE_S = 250, 1.0  # of CPU time of this process, so that other load does not matter
_MAX_ENGINES, _MAX_LAYOUTS = 6, 250  # combined with each other: the nearest ones
_MAX_GROWTH = 32  # of the number of ranks, if the number of GPUs is not given
_CUDA_BYTES = int(1.9 * GIB)
_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_SHARES = (0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # values of engine.gpu_memory_utilization
_LAYOUT = (
    "engine.tensor",
    "engine.expert",
    "engine.num_replicas",
    "optim.max_tokens_per_microbatch",
    "engine.gpu_memory_utilization",
    "engine.kv_cache_bytes",
    "engine.sleep_level",
    "optim.recompute",
    "optim.offload",
)
# The grid: degrees of the trainer, (data, tensor) of an engine, and the trainer's shares of separate GPUs.
_GRID_TENSOR, _GRID_STAGES, _GRID_EXPERTS = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64)
_GRID_ENGINES = ((1, 1), (1, 2), (1, 4), (1, 8), (8, 1), (4, 4), (2, 8), (16, 1), (32, 1), (4, 8))
_GRID_WORLDS = (0.25, 0.375, 0.5, 0.625, 0.75)
_SHORTEST, _LONGEST = 4096, 32768  # tokens of a microbatch on one rank that ``fastest`` chooses
_FEWEST_MICROBATCHES = 4  # of an update and pipeline stage


@dataclass(frozen=True)
class Outcome:
    """The result of a search. If no layout works, ``change`` is empty and ``tried`` describes what was tried.

    Both are empty if the configuration works as it is, without warnings about its layout.
    """

    change: Change = ()
    tried: str = ""


@dataclass(frozen=True)
class Layout:
    """A configuration that works, and its cost."""

    cfg: RunConfig
    assessment: Assessment
    cost: float


def nearest(cfg: RunConfig, machines: DoctorOptions, override: Override = lambda cfg: cfg) -> Outcome:
    """A change after which the run can work, if possible without warnings about its layout.

    ``override`` is applied to every candidate before it is assessed.
    """

    def check(cfg: RunConfig) -> Assessment:
        return assess(override(cfg), machines)

    now = check(cfg)
    if now.works and not now.num_layout_warnings:
        return Outcome()
    fields, unfixed = _fix_fields(cfg, check)
    if unfixed:
        return Outcome(tried=f"no value could be proposed for {', '.join(unfixed)}")
    gpu, num_gpus, node = machines.hardware, machines.num_gpus, machines.gpus_per_node
    search = _Search(check)
    for variant in _precisions(apply(cfg, fields), check):
        change = (*fields, *variant)
        base = apply(cfg, change)
        if search.accepts(base, change):
            return Outcome(change=change)
        steps = [step for _, step in sorted(_memory_steps(base), key=lambda option: option[0])]
        ranks = num_gpus or base.parallel.world_size * _MAX_GROWTH
        engines = list(itertools.islice(_near_engines(base, gpu, ranks, node), _MAX_ENGINES))
        trainers = _near_trainers(base, gpu, ranks, num_gpus is not None, node)
        search.num_engines, search.num_trainers = len(engines), len(trainers)
        for layout in _near_candidates(base, engines, trainers, num_gpus):
            if search.is_spent or _accepts_layout(search, base, change, layout, steps):
                break
        if search.best:
            return Outcome(change=search.best)
    if num_gpus is not None and not now.works:
        base = apply(cfg, fields)
        for candidate, *_ in _grid(base, machines, Counter()):
            if check(candidate).works:
                return Outcome(change=(*fields, *_difference(base, candidate)))
    return Outcome(tried=search.text(num_gpus))


def _difference(old: RunConfig, new: RunConfig) -> Change:
    """The layout fields of ``new`` that differ from ``old``."""
    paths = [f"parallel.{field.name}" for field in dataclasses.fields(ParallelConfig)]
    paths += [*_LAYOUT, "engine.data", "optim.logprob_chunk_tokens"]
    return tuple((path, new.value(path)) for path in paths if new.value(path) != old.value(path))


def _accepts_layout(search: _Search, base: RunConfig, change: Change, layout: Fields, steps: list[Fields]) -> bool:
    """Whether a layout works with one of the steps, in order of cost. If the most frugal step fails, all fail."""

    def accepts(step: Fields) -> bool:
        fields = {**layout, **step}
        if fields["parallel.pipeline"] == 1:
            fields["parallel.virtual_stages"] = 1
        new = tuple((path, value) for path, value in fields.items() if base.value(path) != value)
        return search.accepts(apply(base, new), (*change, *new))

    accepted = accepts(steps[-1])
    if not search.last_works:
        return False
    return any(accepts(step) for step in steps[:-1]) or accepted


class _Search:
    """Assesses candidates within a budget and remembers the best one."""

    def __init__(self, check: Check):
        self._check, self._count, self._end = check, 0, time.process_time() + _DEADLINE_S
        self._closest: tuple[float, str] = (math.inf, "")
        self.best: Change = ()  # without errors and with the fewest warnings
        self.last_works = False
        self.num_engines = self.num_trainers = 0
        self._num_warnings: float = math.inf

    @property
    def is_spent(self) -> bool:
        return self._count >= _MAX_ASSESSMENTS or time.process_time() > self._end

    def accepts(self, cfg: RunConfig, change: Change) -> bool:
        """Assess a candidate; return whether the search can stop with it."""
        result = self._check(cfg)
        self._count += 1
        self.last_works = result.works
        if result.works:
            if result.num_layout_warnings <= self._num_warnings:
                self.best, self._num_warnings = change, result.num_layout_warnings
            return not result.num_layout_warnings
        estimates = [
            e for e in (result.trainer, result.engine and result.engine.estimate, *result.phases) if e is not None
        ]
        if estimates:
            worst = max(estimates, key=lambda estimate: estimate.share)
            shown = f"{arguments((), change) or 'as it is'}: {worst.title} needs {worst.total_bytes / GIB:.1f} GiB of "
            self._closest = min(self._closest, (worst.share, f"{shown}{worst.capacity_bytes / GIB:.1f} GiB"))
        return False

    def text(self, num_gpus: int | None) -> str:
        limit = f"at most {num_gpus} GPUs" if num_gpus is not None else f"at most {_MAX_GROWTH} times as many ranks"
        tried = (
            f"{self._count} layouts on {limit} were checked. Nearest to the configuration, {self.num_engines} ways to "
            "divide an engine (engine.tensor, expert, gpu_memory_utilization) tile and leave memory for a KV cache, "
            f"and {self.num_trainers} layouts of the trainer (world_size, tensor, pipeline, context, expert, "
            "expert_tensor) tile and fit its states. Each was tried with recompute, smaller microbatches and, on "
            "shared GPUs, sleeping and offloading"
        )
        return f"{tried}. The closest: {self._closest[1]}" if self._closest[1] else tried


def _fix_fields(cfg: RunConfig, check: Check) -> tuple[Change, list[str]]:
    """(changes to fields outside the layout that remove their errors, options for which no value helps)."""
    changes: Fields = {}
    while True:
        now = apply(cfg, tuple(changes.items()))
        errors = check(now).errors
        fields = {
            error.subject[2:]: error
            for error in errors
            if error.subject.startswith("--") and error.code != "untiled_size" and not _is_of_layout(error.subject[2:])
        }
        if not fields:
            return tuple(changes.items()), []
        for path, finding in fields.items():
            for value in _values(now, path, finding.choices):
                after = check(apply(now, ((path, value),))).errors
                if len(after) < len(errors) and finding.subject not in {error.subject for error in after}:
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
    value = cfg.value(path)
    owner = type(getattr(cfg, section)) if section else RunConfig
    kind = typing.get_type_hints(owner, vars(config_module))[field]
    if typing.get_origin(kind) is typing.Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value and choice not in choices)
    elif isinstance(value, bool) and not choices:
        yield not value


def _precisions(cfg: RunConfig, check: Check) -> Iterator[Change]:
    """Changes for a model with a size that does not tile: BF16 for its layers, or at both ends; otherwise none."""
    untiled = {error.subject for error in check(cfg).errors if error.code == "untiled_size"}
    if not untiled:
        yield ()
        if cfg.precision.rollout == "bf16" or _degrees(cfg, "engine.tensor") != [1]:
            return  # FP8 blocks do not prevent dividing an engine
    first = cfg.model.first_dense_layers
    if untiled == {"--model.ffn_hidden_size"} and first:
        yield (("precision.bf16_first_layers", first),)
    yield (("precision.trainer", "bf16"), ("precision.rollout", "bf16"))


# Candidates near the configuration


def _near_candidates(
    cfg: RunConfig, engines: list[Option], trainers: list[Option], num_gpus: int | None
) -> Iterator[Fields]:
    """Combinations of trainer and engines, the nearest first."""

    def combined(cost: float, engine: Fields) -> list[tuple[float, str, Fields]]:
        combinations = []
        asked, ranks = max(1, cfg.engine.num_replicas), engine["engine.tensor"] * cfg.engine.data
        for distance, trainer in trainers:
            world = trainer["parallel.world_size"]
            free = world if cfg.engine.placement == "colocated" else num_gpus and num_gpus - world
            replicas = asked if free is None else min(asked, free // ranks)
            if replicas >= 1:
                candidate = {**trainer, **engine, "engine.num_replicas": replicas}
                total = cost + distance + _distance(replicas, asked, 0.5)
                combinations.append((round(total, 6), str(candidate), candidate))
        return sorted(combinations, key=lambda entry: entry[:2])

    merged = heapq.merge(*(combined(cost, engine) for cost, engine in engines), key=lambda entry: entry[:2])
    return (candidate for _, _, candidate in merged)


def _distance(new: int, old: int, weight: float) -> float:
    return weight * abs(math.log2(max(new, 1) / max(old, 1)))


def _near_engines(cfg: RunConfig, gpu: Gpu, num_gpus: int, node: int) -> Iterator[Option]:
    """Ways to divide an engine that leave memory for sequences, the nearest first."""
    engine, model, data = cfg.engine, cfg.model, cfg.engine.data
    options: list[Option] = []
    utilizations = {engine.gpu_memory_utilization: 0.0, 0.9: 0.5}
    if cfg.engine.placement == "colocated":
        utilizations |= {share: 2 * (0.95 - share) for share in _SHARES[1:-1]}
        utilizations[engine.gpu_memory_utilization] = 0.0
    for is_expert_parallel in (False, True) if model.is_moe else (False,):
        of_experts = replace(engine, tensor=1, expert=2 if is_expert_parallel else 1)
        for tensor in _degrees(replace(cfg, engine=of_experts), "engine.tensor"):
            ranks = data * tensor
            expert = ranks if is_expert_parallel else 1
            if ranks > num_gpus or (is_expert_parallel and (ranks == 1 or model.num_experts % ranks)):
                continue
            cost = _distance(tensor, engine.tensor, 1.0) + (4.0 if tensor > node else 0.0)
            cost += 0.5 if is_expert_parallel != (engine.expert > 1) else 0.0
            for share, more in utilizations.items():
                for cache in {engine.kv_cache_bytes: 0.0, None: 0.0}:
                    fields = {"engine.tensor": tensor, "engine.expert": expert, "engine.kv_cache_bytes": cache}
                    fields["engine.gpu_memory_utilization"] = share
                    options.append((cost + more + (cache != engine.kv_cache_bytes), fields))
    for cost, fields in sorted(options, key=lambda option: (option[0], str(option[1]))):
        if _has_memory(apply(cfg, tuple(fields.items())), gpu):
            yield cost, fields


def _has_memory(cfg: RunConfig, gpu: Gpu) -> bool:
    """Whether an engine has memory for its weights and enough sequences."""
    engine = engine_memory.worker(cfg, gpu.memory_bytes)
    return not engine.is_idle and engine.estimate.share <= 1


def _degrees(cfg: RunConfig, option: str) -> list[int]:
    """Values of a degree that divide and tile; 1 is among them if it tiles."""
    model = cfg.model
    known = tiling.common_degrees(tiling.matrices(cfg))
    if option in known:
        return known[option]
    whole = model.moe_ffn_hidden_size if option == "parallel.expert_tensor" else model.num_attention_heads
    return [degree for degree in range(1, 65) if whole % degree == 0] or [1]


def _near_trainers(cfg: RunConfig, gpu: Gpu, ranks: int, is_bounded: bool, node: int) -> list[Option]:
    """Layouts of the trainer that divide, tile and fit its states, the nearest first."""
    parallel, model = cfg.parallel, cfg.model
    single = replace(cfg, parallel=replace(parallel, tensor=1, expert_tensor=1))
    tensors = [degree for degree in _degrees(single, "parallel.tensor") if degree <= ranks]
    expert_tensors = _degrees(single, "parallel.expert_tensor") if model.is_moe else [1]
    experts = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0] if model.is_moe else [1]
    contexts = sorted({1, parallel.context, 2 * parallel.context, 4 * parallel.context})
    stages = sorted({*_STAGES, parallel.pipeline})
    powers = [factor << power for factor in (1, 3) for power in range(13)]
    nodes = range(node, min(ranks, 16 * node) + 1, node)
    worlds = sorted({n for n in (parallel.world_size, *powers, *nodes) if 1 <= n <= ranks})
    kernels = KernelChoice.of(cfg, Hardware(gpu.generation)).trainer
    count, shares = parameters.count(model), trainer_memory.shares_memory(cfg, kernels)
    options: list[Option] = []
    for fields in _divisions(cfg, worlds, tensors, stages, contexts, experts, [n for n in expert_tensors if n <= 8]):
        if _state_bytes(cfg, gpu, count, shares, fields) > gpu.memory_bytes:
            continue
        world, tensor, pipeline, context, expert, expert_tensor = fields.values()
        cost = _distance(world, parallel.world_size, 0.7 if is_bounded else 1.5) + (4.0 if tensor > node else 0.0)
        cost += _distance(tensor, parallel.tensor, 1.0) + _distance(pipeline, parallel.pipeline, 1.0)
        cost += _distance(context, parallel.context, 1.5) + _distance(expert, parallel.expert, 0.8)
        options.append((cost + _distance(expert_tensor, parallel.expert_tensor, 1.5), fields))
    return heapq.nsmallest(_MAX_LAYOUTS, options, key=lambda option: (option[0], *option[1].values()))


def _divisions(
    cfg: RunConfig,
    worlds: Sequence[int],
    tensors: Sequence[int],
    stages: Sequence[int],
    contexts: Sequence[int],
    experts: Sequence[int],
    expert_tensors: Sequence[int],
) -> Iterator[Fields]:
    """Degrees of the trainer whose products divide the number of ranks."""
    for world, tensor, pipeline, context in itertools.product(worlds, tensors, stages, contexts):
        if world % (tensor * pipeline * context) or pipeline > cfg.model.num_layers:
            continue
        for expert, expert_tensor in itertools.product(experts, expert_tensors):
            if world % (expert * expert_tensor * pipeline) == 0:
                yield {
                    "parallel.world_size": world,
                    "parallel.tensor": tensor,
                    "parallel.pipeline": pipeline,
                    "parallel.context": context,
                    "parallel.expert": expert,
                    "parallel.expert_tensor": expert_tensor,
                }


def _state_bytes(
    cfg: RunConfig, gpu: Gpu, count: parameters.ParameterCount, shares: tuple[bool, bool], fields: Fields
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
    apart = cfg.engine.placement == "colocated"  # an offloaded optimizer comes when the copies have gone
    return dense * of_dense + expert * of_expert + (max(copied, states) if apart else copied + states) + _CUDA_BYTES


def _memory_steps(cfg: RunConfig) -> Iterator[Option]:
    """Ways to save memory in the same layout: recompute, smaller microbatches, no virtual stages, sharing in turns."""
    engine, optim = cfg.engine, cfg.optim
    order = ("none", "selective", "full")
    longest = cfg.max_sequence_tokens
    sizes = [max(longest, cfg.optim.max_tokens_per_microbatch)]
    while sizes[-1] > longest and len(sizes) < 5:
        sizes.append(max(longest, sizes[-1] // 2))
    stages = {cfg.parallel.virtual_stages, 1}
    turns = [(optim.offload, engine.sleep_level)]
    if engine.placement == "colocated" and cfg.sampling.max_staleness == 0:
        sleep = engine.sleep_level or (1 if cfg.model.mla is not None else 2)
        offload = optim.offload or ("params", "gradients", "optimizer")
        turns += [(optim.offload, sleep), (offload, sleep)]
    for (i, recompute), (j, size), virtual, (k, (offload, sleep)) in itertools.product(
        enumerate(order[order.index(optim.recompute) :]), enumerate(sizes), stages, enumerate(dict.fromkeys(turns))
    ):
        cost = 0.4 * i + 0.6 * j + 0.3 * (virtual != cfg.parallel.virtual_stages) + 0.3 * k
        fields = {"parallel.virtual_stages": virtual, "optim.recompute": recompute, "optim.offload": offload}
        yield cost, {**fields, "engine.sleep_level": sleep, "optim.max_tokens_per_microbatch": size}


# All layouts on a number of GPUs


def all_layouts(
    cfg: RunConfig, machines: DoctorOptions, cost: Callable[[RunConfig], float]
) -> tuple[list[Layout], Counter[str]]:
    """(layouts on ``machines.num_gpus`` that work, the cheapest first; numbers of refused ones by reason).

    Layouts with warnings, such as memory that is almost full, are left out if others have none.
    """
    refused: Counter[str] = Counter()
    outcome, (fields, unfixed) = nearest(cfg, machines), _fix_fields(cfg, lambda cfg: assess(cfg, machines))
    grid = () if unfixed else _grid(apply(cfg, fields), machines, refused)
    candidates = itertools.chain(grid, [[apply(cfg, outcome.change)]])
    layouts: list[Layout] = []
    seen = set()
    for shortest, *longer in candidates:  # one layout with several lengths of microbatches
        key = shortest.parallel, shortest.engine, shortest.optim.recompute
        result = assess(shortest, machines)
        if not result.works:
            error = result.errors[0]
            refused[f"{error.subject}: {'does not fit its GPU' if error.code == 'memory' else error.problem}"] += 1
        elif key not in seen:
            seen.add(key)
            best = Layout(shortest, result, cost(shortest))
            for total, candidate in sorted(((cost(cfg), cfg) for cfg in longer), key=lambda entry: entry[0]):
                if total >= best.cost:
                    break
                other = assess(candidate, machines)
                if other.works and other.num_layout_warnings <= result.num_layout_warnings:
                    best = Layout(candidate, other, total)
                    break
            layouts.append(best)
    least = min((layout.assessment.num_layout_warnings > 0 for layout in layouts), default=False)
    layouts = [layout for layout in layouts if (layout.assessment.num_layout_warnings > 0) == least]
    return sorted(layouts, key=lambda layout: (layout.cost, str(layout.cfg.parallel))), refused


def _grid(cfg: RunConfig, machines: DoctorOptions, refused: Counter[str]) -> Iterator[list[RunConfig]]:
    """Layouts on all ``machines.num_gpus``, not yet assessed, each with one or several lengths of microbatches."""
    gpu, num_gpus, node = machines.hardware, machines.num_gpus, machines.gpus_per_node
    assert num_gpus is not None
    engines = []
    for data, tensor in _GRID_ENGINES:
        if data * tensor <= num_gpus and (engine := _divided_engine(cfg, data, tensor)) is not None:
            shares = dict.fromkeys((cfg.engine.gpu_memory_utilization, 0.8, 0.7, 0.6, 0.5))
            sized = (replace(engine, gpu_memory_utilization=share) for share in shares)
            fitting = next((size for size in sized if _has_memory(replace(cfg, engine=size), gpu)), None)
            if fitting is None:
                refused["an engine has no memory for sequences"] += 1
            else:
                engines.append(fitting)
    for parallel in _grid_trainers(cfg, num_gpus, node):
        trainers = list(_with_longer_microbatches(replace(cfg, parallel=parallel), gpu))
        if not trainers:
            refused["a trainer rank does not fit its GPU"] += 1
            continue
        free = num_gpus if cfg.engine.placement == "colocated" else num_gpus - parallel.world_size
        for engine in engines:
            if free < engine.ranks:
                refused["no GPU is left for an engine"] += 1
                continue
            engine = replace(engine, num_replicas=free // engine.ranks)
            yield [replace(trainer, engine=engine) for trainer in trainers]


def _divided_engine(cfg: RunConfig, data: int, tensor: int) -> EngineConfig | None:
    """Engines of these degrees; None if vLLM does not divide the model so."""
    model, ranks = cfg.model, data * tensor
    if model.num_attention_heads % tensor or (data > 1 and not model.is_moe):
        return None
    expert = ranks if model.is_moe and ranks > 1 and model.num_experts % ranks == 0 else 1
    if data > 1 and expert == 1:
        return None
    return replace(cfg.engine, data=data, tensor=tensor, expert=expert)


def _grid_trainers(cfg: RunConfig, num_gpus: int, node: int) -> Iterator[ParallelConfig]:
    model, sampling, context = cfg.model, cfg.sampling, cfg.parallel.context
    step = node if num_gpus >= 2 * node else 1
    worlds = sorted({max(step, int(num_gpus * share) // step * step) for share in _GRID_WORLDS})
    if cfg.engine.placement == "colocated":
        worlds = [num_gpus]
    tensors = [n for n in _GRID_TENSOR if n <= node and model.num_attention_heads % n == 0]
    experts = [n for n in _GRID_EXPERTS if model.is_moe and model.num_experts % n == 0] or [1]
    for fields in _divisions(cfg, worlds, tensors, _GRID_STAGES, [context], experts, [1]):
        parallel = apply(cfg, (*fields.items(), ("parallel.virtual_stages", 1))).parallel
        if parallel.data <= sampling.prompts_per_step * sampling.completions_per_prompt:
            yield parallel


def microbatches_of(tokens: int) -> Change:
    """Microbatches of so many tokens, whose logits exist at once."""
    return ("optim.max_tokens_per_microbatch", tokens), ("optim.logprob_chunk_tokens", tokens)


def _with_longer_microbatches(cfg: RunConfig, gpu: Gpu) -> Iterator[RunConfig]:
    """The configuration with once, twice and four times as many tokens in a microbatch, as long as the trainer fits."""
    tokens = cfg.optim.max_tokens_per_microbatch
    for size in (tokens, 2 * tokens, 4 * tokens):
        longer = cfg if size == tokens else apply(cfg, microbatches_of(size))
        if trainer_memory.worst_rank(longer, gpu, gpu.memory_bytes).is_tight:
            return
        yield longer


# The layout of a job whose user names none


def fastest(start: RunConfig, machines: DoctorOptions, override: Override) -> tuple[RunConfig, Change, str]:
    """(configuration, difference from ``start``, reason).

    A dense model gets the layout nearest to ``start``. Experts may be divided over any number of a node's ranks: of the
    layouts nearest to each number, the one whose steps take least by the arithmetic of ``plan``. With fewer experts, a
    rank may keep what it would have to move, and have longer microbatches.
    """
    degrees = math.gcd(start.parallel.world_size, max(1, start.model.num_experts), machines.gpus_per_node)
    starts: dict[ParallelConfig, RunConfig] = {}  # a single entry, if the user has set the degree
    for degree in (n for n in range(1, degrees + 1) if degrees % n == 0):
        divided = override(replace(start, parallel=replace(start.parallel, expert=degree)))
        starts.setdefault(divided.parallel, divided)
    layouts = []
    for divided in starts.values():
        cfg, change = _nearest_job(divided, machines, override)
        if divided.parallel.expert != start.parallel.expert:
            change = tuple(({"parallel.expert": divided.parallel.expert} | dict(change)).items())
        layouts.append((cfg, change))
    if len(layouts) == 1:
        return *layouts[0], "nearest to data parallel that fits and moves least between trainer and engines"

    def order(layout: tuple[RunConfig, Change]) -> tuple[int, int, float]:
        result = assess(override(layout[0]), machines)
        return (
            len(result.errors),
            result.num_layout_warnings,
            step_seconds(layout[0], machines) if result.works else 0.0,
        )

    reason = "fastest by the arithmetic of plan, of the layouts nearest to each division of the experts"
    return *min(layouts, key=order), reason


def _nearest_job(start: RunConfig, machines: DoctorOptions, override: Override) -> tuple[RunConfig, Change]:
    """(configuration, change) of the layout nearest to ``start`` that fits, at best without offloading."""
    change = in_place(start, machines, override) if start.engine.placement == "colocated" else ()
    result = assess(override(apply(start, change)), machines)
    if result.errors or result.num_layout_warnings:
        change = nearest(start, machines, override).change
    cfg = override(apply(start, change))
    longer = longer_microbatches(cfg, machines, override)
    with_longer = apply(cfg, longer)
    if override(with_longer) == with_longer:  # otherwise the user has set one of these fields
        change, cfg = tuple((dict(change) | dict(longer)).items()), with_longer
    return cfg, change


def in_place(cfg: RunConfig, machines: DoctorOptions, override: Override = lambda cfg: cfg) -> Change:
    """The change after which engines share the trainer's GPUs and least of their memory moves in every step.

    At best nothing moves, else engines sleep, with microbatches of half as many tokens or selective recompute if
    nothing less fits. Empty if all of these need offloading, or a KV cache for less than half of the sequences that are
    decoded at once. To move what an 80 GB GPU holds takes seconds, more than the recompute of a step; a smaller KV
    cache costs nothing while it holds all sequences.
    """
    tokens, wanted = cfg.optim.max_tokens_per_microbatch, _decoded_at_once(cfg) / 2
    sizes = (tokens, tokens // 2) if tokens // 2 >= max(_SHORTEST, cfg.max_sequence_tokens) else (tokens,)
    savings = [(recompute, size) for recompute in dict.fromkeys((cfg.optim.recompute, "selective")) for size in sizes]
    if cfg.model.is_moe:  # shorter microbatches cost more there: as many kernels to launch, as many gradients to read
        savings.sort(key=lambda saving: -saving[1])
    for (recompute, size), sleep in itertools.product(savings, dict.fromkeys((0, cfg.engine.sleep_level))):
        for share in _SHARES:
            change = (("engine.sleep_level", sleep), ("engine.gpu_memory_utilization", share), ("optim.offload", ()))
            change += (("optim.recompute", recompute), ("optim.max_tokens_per_microbatch", size))
            result = assess(override(apply(cfg, change)), machines)
            if result.works and not result.num_layout_warnings:
                if result.engine is not None and result.engine.full_sequences >= wanted:
                    return tuple((path, value) for path, value in change if cfg.value(path) != value)
                break
    return ()


def longer_microbatches(cfg: RunConfig, machines: DoctorOptions, override: Override = lambda cfg: cfg) -> Change:
    """The change after which a microbatch has 4, 2 or 1.5 times as many tokens, whose logits exist at once.

    Engines on the trainer's GPUs may give up KV cache that no sequence needs. Empty if nothing longer fits, if few
    microbatches would be left, or if the configuration does not work as it is. The host launches as many kernels for a
    long microbatch as for a short one, and each reads and writes all gradients.
    """
    engine, parallel = cfg.engine, cfg.parallel
    if not assess(override(cfg), machines).works:
        return ()
    shares = [engine.gpu_memory_utilization]
    if engine.placement == "colocated":
        shares += [share for share in _SHARES if share < shares[0]]
    for size in (times * cfg.optim.max_tokens_per_microbatch // 2 for times in (8, 4, 3)):
        longer = microbatches_of(size)
        if size > _LONGEST * parallel.context:
            continue
        if trainer_memory.num_microbatches(apply(cfg, longer)) < _FEWEST_MICROBATCHES * parallel.pipeline:
            continue
        for share in shares:
            change = (*longer, ("engine.gpu_memory_utilization", share))
            result = assess(override(apply(cfg, change)), machines)
            if result.engine is None or result.engine.full_sequences < _decoded_at_once(cfg):
                break
            if result.works and not result.num_layout_warnings:
                return tuple((path, value) for path, value in change if cfg.value(path) != value)
    return ()


def _decoded_at_once(cfg: RunConfig) -> int:
    """Sequences that one engine decodes at once, at most."""
    num_asked = math.ceil(cfg.sampling.prompts_per_step * cfg.sampling.completions_per_prompt / cfg.engine.num_replicas)
    return min(cfg.engine.max_num_sequences, num_asked)
