"""Layouts of trainer and engines that work, for ``doctor``, ``grpo`` and ``plan``. Pure; no torch.

    nearest      the smallest change after which a configuration works (doctor)
    fastest      the layout of a job whose user names none (grpo)
    all_layouts  every layout on a number of GPUs (plan)

Candidates come from :func:`_layouts`, the nearest to the configuration first: degrees that divide the model and leave
memory for weights, optimizer states and sequences. :func:`assessment.assess` accepts or refuses them. ``nearest`` ends
with the candidates of ``all_layouts``, so ``doctor`` and ``plan`` agree. The model never changes.
"""

import dataclasses
import heapq
import itertools
import math
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8rl import config as config_module
from megatron_fp8rl.config import KERNELS, ParallelConfig, RunConfig
from megatron_fp8rl.envs.source_kind import is_supervised
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.preflight import engine_memory, tiling, trainer_memory
from megatron_fp8rl.preflight.assessment import Assessment, DoctorOptions, assess
from megatron_fp8rl.preflight.findings import Change, apply, arguments
from megatron_fp8rl.preflight.memory import GIB
from megatron_fp8rl.preflight.step_time import StepTime, step_seconds

Fields = dict[str, Any]  # values by dotted field
Option = tuple[float, Fields]  # distance from the configuration, fields
Override = Callable[[RunConfig], RunConfig]  # sets the user's fields again
Check = Callable[[RunConfig], Assessment]

_MAX_ASSESSMENTS, _DEADLINE_S = 250, 1.0  # CPU time of this process, so that other load does not matter
_MAX_ENGINES, _MAX_LAYOUTS = 6, 250  # combined with each other: the nearest
_MAX_GROWTH = 32  # of the number of ranks, if the number of GPUs is not known
_SHARES = (0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # values of engine.gpu_memory_utilization
_DEGREES = tuple(
    f"parallel.{name}" for name in ("world_size", "tensor", "pipeline", "context", "expert", "expert_tensor")
)
_LAYOUT = (
    *(f"parallel.{field.name}" for field in dataclasses.fields(ParallelConfig)),
    *(f"engine.{name}" for name in ("tensor", "expert", "num_replicas")),
    "optim.max_tokens_per_microbatch",
    *(f"engine.{name}" for name in ("gpu_memory_utilization", "kv_cache_bytes", "sleep_level")),
    *("optim.recompute", "optim.offload"),
)
# ``_near``: stages of a pipeline. ``_on_all_gpus``: degrees of the trainer, (data, tensor) of an engine, and the
# trainer's shares of separate GPUs.
_STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_GRID_TENSOR, _GRID_STAGES, _GRID_EXPERTS = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64)
_GRID_ENGINES = ((1, 1), (1, 2), (1, 4), (1, 8), (8, 1), (4, 4), (2, 8), (16, 1), (32, 1), (4, 8))
_GRID_WORLDS = (0.25, 0.375, 0.5, 0.625, 0.75)
_SHORTEST, _LONGEST = 4096, 32768  # tokens of a microbatch on one rank that ``fastest`` chooses
_FEWEST_MICROBATCHES = 4  # of an update and pipeline stage
_NO_TRAINER = "a trainer rank does not fit its GPU"


@dataclass(frozen=True)
class Outcome:
    """The result of a search. Both fields are empty if the configuration works without warnings about its layout."""

    change: Change = ()
    tried: str = ""  # a description of the search, if no layout works


@dataclass(frozen=True)
class _Space:
    engines: list[Option]
    trainers: list[Option]
    fills: bool = False  # engines take all GPUs that the trainer leaves; otherwise at most the configured replicas


@dataclass(frozen=True)
class Layout:
    """A configuration that works, and the seconds of its step."""

    cfg: RunConfig
    assessment: Assessment
    time: StepTime

    @property
    def cost(self) -> float:
        return self.time.gpu_seconds_per_million


def _changed(cfg: RunConfig, change: Iterable[tuple[str, Any]]) -> Change:
    return tuple((path, value) for path, value in change if cfg.value(path) != value)


def nearest(cfg: RunConfig, machines: DoctorOptions, override: Override = lambda cfg: cfg) -> Outcome:
    """A change after which the run can work, if possible without warnings about its layout; ``override`` changes each
    candidate before it is assessed."""

    def check(cfg: RunConfig) -> Assessment:
        return assess(override(cfg), machines)

    now = check(cfg)
    if now.works and not now.num_layout_warnings:
        return Outcome()
    fixes, unfixed = _fix_fields(cfg, check)
    if unfixed:
        return Outcome(tried=f"no value could be proposed for {', '.join(unfixed)}")
    search, fixed = _Search(check), apply(cfg, fixes)
    for variant in _precisions(fixed, check):
        change, base = (*fixes, *variant), apply(fixed, variant)
        if search.accepts(base, change):
            return Outcome(change=change)
        steps = [step for _, step in sorted(_memory_steps(base), key=lambda option: option[0])]
        search.space = _near(base, machines)
        for layout in _layouts(base, machines, search.space):
            if search.is_spent or search.accepts_layout(base, change, layout, steps):
                break
        if search.best:
            return Outcome(change=search.best)
    if machines.num_gpus is not None and not now.works:
        for layout in _layouts(fixed, machines, _on_all_gpus(fixed, machines, Counter())):
            change = _changed(fixed, layout.items())
            if check(apply(fixed, change)).works:
                return Outcome(change=(*fixes, *change))
    return Outcome(tried=search.text(machines.num_gpus))


class _Search:
    def __init__(self, check: Check):
        self._check, self._count, self._end = check, 0, time.process_time() + _DEADLINE_S
        self._closest: tuple[float, str] = (math.inf, "")
        self.best: Change = ()  # without errors and with the fewest warnings
        self.space = _Space([], [])
        self._last_works, self._num_warnings = False, math.inf

    @property
    def is_spent(self) -> bool:
        return self._count >= _MAX_ASSESSMENTS or time.process_time() > self._end

    def accepts(self, cfg: RunConfig, change: Change) -> bool:
        """Assess a candidate; return whether the search can stop with it."""
        result = self._check(cfg)
        self._count += 1
        self._last_works = result.works
        if result.works:
            if result.num_layout_warnings <= self._num_warnings:
                self.best, self._num_warnings = change, result.num_layout_warnings
            return not result.num_layout_warnings
        if result.trainer is not None:
            engines = (result.engine.estimate,) if result.engine is not None else ()
            worst = max((result.trainer, *engines, *result.phases), key=lambda estimate: estimate.share)
            text = f"{arguments((), change) or 'as it is'}: {worst.title} needs {worst.total_bytes / GIB:.1f} GiB of "
            self._closest = min(self._closest, (worst.share, f"{text}{worst.capacity_bytes / GIB:.1f} GiB"))
        return False

    def accepts_layout(self, base: RunConfig, change: Change, layout: Fields, steps: list[Fields]) -> bool:
        """Assess a layout with each step, in order of cost, unless it fails with the most frugal step."""

        def accepts(step: Fields) -> bool:
            fields = {**layout, **step}
            if fields["parallel.pipeline"] == 1:
                fields["parallel.virtual_stages"] = 1
            new = _changed(base, fields.items())
            return self.accepts(apply(base, new), (*change, *new))

        accepted = accepts(steps[-1])
        return self._last_works and (any(accepts(step) for step in steps[:-1]) or accepted)

    def text(self, num_gpus: int | None) -> str:
        limit = f"at most {num_gpus} GPUs" if num_gpus is not None else f"at most {_MAX_GROWTH} times as many ranks"
        tried = (
            f"{self._count} layouts on {limit} were checked. Nearest to the configuration, {len(self.space.engines)} "
            "ways to divide an engine (engine.tensor, expert, gpu_memory_utilization) tile and leave memory for a KV "
            f"cache, and {len(self.space.trainers)} layouts of the trainer (world_size, tensor, pipeline, context, "
            "expert, expert_tensor) tile and fit its states. Each was tried with recompute, smaller microbatches and, "
            "on shared GPUs, sleeping and offloading"
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
            if error.subject.startswith("--") and error.code != "untiled_size" and error.subject[2:] not in _LAYOUT
        }
        if not fields:
            return tuple(changes.items()), []
        fixes = (
            (path, value)
            for path, finding in fields.items()
            for value in _values(now, path, finding.choices)
            for after in [check(apply(now, ((path, value),))).errors]
            if len(after) < len(errors) and finding.subject not in {error.subject for error in after}
        )
        fix = next(fixes, None)
        if fix is None:
            return (), [f"--{path}" for path in fields]
        changes[fix[0]] = fix[1]


def _values(cfg: RunConfig, path: str, choices: Sequence[Any]) -> Iterator[Any]:
    """Values to try for a field: those of the violation, then all others of a field with few values. None for a field
    of the model."""
    section, _, field = path.rpartition(".")
    is_kernel = section == "precision.kernels"
    if section == "model" or (path.count(".") > 1 and not is_kernel):
        return
    yield from choices
    value = cfg.value(path)
    if is_kernel:
        yield from (choice for choice in KERNELS[field] if choice != value and choice not in choices)
        return
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
        if cfg.precision.rollout == "bf16" or _tiling_degrees(cfg, "engine.tensor") != [1]:
            return  # FP8 blocks do not prevent dividing an engine
    first = cfg.model.first_dense_layers
    if untiled == {"--model.ffn_hidden_size"} and first:
        yield (("precision.bf16_first_layers", first),)
    yield (("precision.trainer", "bf16"), ("precision.rollout", "bf16"))


def _distance(new: int, old: int, weight: float) -> float:
    return weight * abs(math.log2(max(new, 1) / max(old, 1)))


def _tiling_degrees(cfg: RunConfig, option: str) -> list[int]:
    """Values of a degree that divide and tile; 1 is among them if it tiles."""
    known = tiling.common_degrees(tiling.matrices(cfg))
    if option in known:
        return known[option]
    model = cfg.model
    whole = model.moe_ffn_hidden_size if option == "parallel.expert_tensor" else model.num_attention_heads
    return [degree for degree in range(1, 65) if whole % degree == 0] or [1]


def _layouts(
    cfg: RunConfig, machines: DoctorOptions, space: _Space, refused: Counter[str] | None = None
) -> Iterator[Fields]:
    """Combinations of trainer and engines, the nearest to ``cfg`` first; reasons for the others go to ``refused``."""
    asked, num_gpus = max(1, cfg.engine.num_replicas), machines.num_gpus

    def combined(cost: float, engine: Fields) -> list[tuple[float, str, Fields]]:
        combinations, ranks = [], engine["engine.tensor"] * engine["engine.data"]
        for distance, trainer in space.trainers:
            world = trainer["parallel.world_size"]
            free = world if cfg.engine.placement == "colocated" else num_gpus and num_gpus - world
            free = None if is_supervised(cfg) else free
            fitting = asked if free is None else free // ranks
            replicas = fitting if space.fills else min(asked, fitting)
            if replicas >= 1:
                layout = {**trainer, **engine, "engine.num_replicas": replicas}
                total = cost + distance + _distance(replicas, asked, 0.5)
                combinations.append((round(total, 6), str(layout), layout))
            elif refused is not None:
                refused["no GPU is left for an engine"] += 1
        return sorted(combinations, key=lambda entry: entry[:2])

    merged = heapq.merge(*(combined(*option) for option in space.engines), key=lambda entry: entry[:2])
    return (layout for *_, layout in merged)


def _engines(
    cfg: RunConfig, machines: DoctorOptions, degrees: Iterable[tuple[int, int, int]], shares: Iterable[float]
) -> Iterator[Option]:
    """Engines of (data, tensor, expert) degrees that leave memory for enough sequences, the nearest first. Those of the
    configuration for a job that starts none."""
    engine, options = cfg.engine, list[Option]()
    if is_supervised(cfg):
        names = ("tensor", "expert", "data", "kv_cache_bytes", "gpu_memory_utilization")
        yield 0.0, {f"engine.{name}": getattr(engine, name) for name in names}
        return
    for (data, tensor, expert), share in itertools.product(degrees, dict.fromkeys(shares)):
        cost = _distance(tensor, engine.tensor, 1.0) + (4.0 if tensor > machines.gpus_per_node else 0.0)
        cost += 0.5 if (expert > 1) != (engine.expert > 1) else 0.0
        if share != engine.gpu_memory_utilization:
            cost += 0.5 if share == 0.9 else 2 * (0.95 - share)
        for cache in dict.fromkeys((engine.kv_cache_bytes, None)):
            fields = {"engine.tensor": tensor, "engine.expert": expert, "engine.kv_cache_bytes": cache}
            fields |= {"engine.gpu_memory_utilization": share, "engine.data": data}
            options.append((cost + (cache != engine.kv_cache_bytes), fields))
    for cost, fields in sorted(options, key=lambda option: (option[0], str(option[1]))):
        worker = engine_memory.worker(apply(cfg, tuple(fields.items())), machines.hardware.memory_bytes)
        if not worker.is_idle and worker.estimate.share <= 1:
            yield cost, fields


def _trainers(
    cfg: RunConfig, machines: DoctorOptions, values: Sequence[Iterable[int]], refused: Counter[str] | None = None
) -> list[Option]:
    """Values of ``_DEGREES`` whose products divide the number of ranks and whose states fit a GPU."""
    gpu, count, options = machines.hardware, parameters.count(cfg.model), list[Option]()
    shares = trainer_memory.shares_memory(cfg, KernelChoice.of(cfg, Hardware(gpu.generation)).trainer)
    weights = (0.7 if machines.num_gpus is not None else 1.5, 1.0, 1.0, 1.5, 0.8, 1.5)
    old = [cfg.value(path) for path in _DEGREES]
    worlds, tensors, stages, contexts, *expert_values = values
    for world, tensor, pipeline, context in itertools.product(worlds, tensors, stages, contexts):
        if world % (tensor * pipeline * context) or pipeline > cfg.model.num_layers:
            continue
        for degrees in itertools.product(*expert_values):
            new = (world, tensor, pipeline, context, *degrees)
            if world % (math.prod(degrees) * pipeline):
                continue
            if _state_bytes(cfg, machines, count, shares, new) <= gpu.memory_bytes:
                cost = sum(_distance(*degree) for degree in zip(new, old, weights, strict=True))
                cost += 4.0 if tensor > machines.gpus_per_node else 0.0
                options.append((cost, dict(zip(_DEGREES, new, strict=True))))
            elif refused is not None:
                refused[_NO_TRAINER] += 1
    return options


def _state_bytes(
    cfg: RunConfig,
    machines: DoctorOptions,
    count: parameters.ParameterCount,
    shares: tuple[bool, bool],
    degrees: Sequence[int],
) -> float:
    """Lower bound for an average rank: weights, gradients, optimizer states, most FP8 copies, CUDA. ``shares``: see
    ``trainer_memory.shares_memory``. ``degrees``: values of ``_DEGREES``."""
    world, tensor, pipeline, _, expert_parallel, expert_tensor = degrees
    per = trainer_memory.Bytes.of(cfg)
    if cfg.lora.rank:
        per = replace(per, gradient=0, optimizer=0)
    copies = 0.9 * trainer_memory.fp8_copy_bytes(cfg, machines.hardware)
    separate = per.gradient + (0.9 if cfg.precision.params == "fp8" else per.weight)
    per_dense, per_expert = (per.gradient if is_shared else separate for is_shared in shares)
    dense = (count.total - count.expert) / (tensor * pipeline)
    expert = count.expert / (pipeline * expert_parallel * expert_tensor)
    linears = max(0.0, dense - count.embedding / (tensor * pipeline)) + expert
    copied, states = copies * linears, per.optimizer * count.total / world
    # An offloaded optimizer is in memory after the copies have gone.
    both = max(copied, states) if cfg.engine.placement == "colocated" else copied + states
    return dense * per_dense + expert * per_expert + both + trainer_memory.CONTEXT_BYTES


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
        sleep = engine.sleep_level or (1 if cfg.model.has("mla") else 2)
        offload = optim.offload or ("params", "gradients", "optimizer")
        turns += [(optim.offload, sleep), (offload, sleep)]
    for (i, recompute), (j, size), virtual, (k, (offload, sleep)) in itertools.product(
        enumerate(order[order.index(optim.recompute) :]), enumerate(sizes), stages, enumerate(dict.fromkeys(turns))
    ):
        cost = 0.4 * i + 0.6 * j + 0.3 * (virtual != cfg.parallel.virtual_stages) + 0.3 * k
        fields = {"parallel.virtual_stages": virtual, "optim.recompute": recompute, "optim.offload": offload}
        yield cost, {**fields, "engine.sleep_level": sleep, "optim.max_tokens_per_microbatch": size}


def _near(cfg: RunConfig, machines: DoctorOptions) -> _Space:
    parallel, engine, model, node = cfg.parallel, cfg.engine, cfg.model, machines.gpus_per_node
    ranks = machines.num_gpus or parallel.world_size * _MAX_GROWTH
    engines = []
    for is_expert_parallel in (False, True) if model.is_moe else (False,):
        divided = replace(engine, tensor=1, expert=2 if is_expert_parallel else 1)
        for tensor in _tiling_degrees(replace(cfg, engine=divided), "engine.tensor"):
            size = engine.data * tensor
            is_divided = size > 1 and model.num_experts % size == 0
            if size <= ranks and (is_divided or not is_expert_parallel):
                engines.append((engine.data, tensor, size if is_expert_parallel else 1))
    shares = (engine.gpu_memory_utilization, 0.9, *(_SHARES[1:-1] if engine.placement == "colocated" else ()))
    single = replace(cfg, parallel=replace(parallel, tensor=1, expert_tensor=1))
    tensors = [degree for degree in _tiling_degrees(single, "parallel.tensor") if degree <= ranks]
    expert_tensors = _tiling_degrees(single, "parallel.expert_tensor") if model.is_moe else [1]
    experts = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0] if model.is_moe else [1]
    contexts = sorted({1, parallel.context, 2 * parallel.context, 4 * parallel.context})
    powers = [factor << power for factor in (1, 3) for power in range(13)]
    nodes = range(node, min(ranks, 16 * node) + 1, node)
    worlds = sorted({n for n in (parallel.world_size, *powers, *nodes) if 1 <= n <= ranks})
    stages = sorted({*_STAGES, parallel.pipeline})
    trainers = _trainers(
        cfg, machines, (worlds, tensors, stages, contexts, experts, [n for n in expert_tensors if n <= 8])
    )
    return _Space(
        list(itertools.islice(_engines(cfg, machines, engines, shares), _MAX_ENGINES)),
        heapq.nsmallest(_MAX_LAYOUTS, trainers, key=lambda option: (option[0], *option[1].values())),
    )


def _on_all_gpus(cfg: RunConfig, machines: DoctorOptions, refused: Counter[str]) -> _Space:
    """Engines and trainers that together take all ``machines.num_gpus``; no data-parallel rank lacks a sequence."""
    model, num_gpus, node = cfg.model, machines.num_gpus, machines.gpus_per_node
    assert num_gpus is not None
    engines = []
    shares = (cfg.engine.gpu_memory_utilization, 0.8, 0.7, 0.6, 0.5)
    for data, tensor in _GRID_ENGINES:
        ranks = data * tensor
        expert = ranks if model.is_moe and model.num_experts % ranks == 0 else 1
        if ranks <= num_gpus and model.num_attention_heads % tensor == 0 and (data == 1 or expert > 1):
            option = next(_engines(cfg, machines, [(data, tensor, expert)], shares), None)
            if option is None:
                refused["an engine has no memory for sequences"] += 1
            else:
                engines.append(option)
    step = node if num_gpus >= 2 * node else 1
    worlds = sorted({max(step, int(num_gpus * share) // step * step) for share in _GRID_WORLDS})
    worlds = [num_gpus] if cfg.engine.placement == "colocated" or is_supervised(cfg) else worlds
    tensors = [n for n in _GRID_TENSOR if n <= node and model.num_attention_heads % n == 0]
    experts = [n for n in _GRID_EXPERTS if model.is_moe and model.num_experts % n == 0] or [1]
    values = (worlds, tensors, _GRID_STAGES, [cfg.parallel.context], experts, [1])
    trainers, sequences = [], cfg.sampling.prompts_per_step * cfg.sampling.completions_per_prompt
    for cost, degrees in _trainers(cfg, machines, values, refused):
        fields = {**degrees, "parallel.virtual_stages": 1}
        divided = apply(cfg, tuple(fields.items()))
        if divided.parallel.data <= sequences:
            if trainer_memory.worst_rank(divided, machines.hardware, machines.hardware.memory_bytes).is_tight:
                refused[_NO_TRAINER] += 1
            else:
                trainers.append((cost, fields))
    return _Space(engines, trainers, fills=True)


def microbatches_of(tokens: int) -> Change:
    return ("optim.max_tokens_per_microbatch", tokens), ("optim.logprob_chunk_tokens", tokens)


def all_layouts(
    cfg: RunConfig, machines: DoctorOptions, timed: Callable[[RunConfig], StepTime]
) -> tuple[list[Layout], Counter[str]]:
    """(layouts on ``machines.num_gpus`` that work, the cheapest first; numbers of refused layouts by reason).

    Layouts with warnings are left out if others have none. Each layout but the doctor's has the cheapest length of
    microbatches: once, twice or four times the configured length.
    """
    refused, seen, layouts = Counter[str](), set(), list[Layout]()
    outcome, (fixes, unfixed) = nearest(cfg, machines), _fix_fields(cfg, lambda cfg: assess(cfg, machines))
    fixed, space = apply(cfg, fixes), _Space([], [])
    if not unfixed:
        space = _on_all_gpus(fixed, machines, refused)
    candidates = _layouts(fixed, machines, space, refused)
    changed = ((apply(fixed, tuple(layout.items())), (2, 4)) for layout in candidates)
    for candidate, factors in itertools.chain(changed, [(apply(cfg, outcome.change), ())]):
        key = candidate.parallel, candidate.engine, candidate.optim.recompute
        result = assess(candidate, machines)
        if not result.works:
            error = result.errors[0]
            refused[f"{error.subject}: {'does not fit its GPU' if error.code == 'memory' else error.problem}"] += 1
        elif key not in seen:
            seen.add(key)
            tokens, best = candidate.optim.max_tokens_per_microbatch, Layout(candidate, result, timed(candidate))
            longer = (apply(candidate, microbatches_of(times * tokens)) for times in factors)
            cheaper = [(time, new) for new in longer if (time := timed(new)).gpu_seconds_per_million < best.cost]
            for time, new in sorted(cheaper, key=lambda entry: entry[0].gpu_seconds_per_million):
                other = assess(new, machines)
                if other.works and other.num_layout_warnings <= result.num_layout_warnings:
                    best = Layout(new, other, time)
                    break
            layouts.append(best)
    least = min((layout.assessment.num_layout_warnings > 0 for layout in layouts), default=False)
    layouts = [layout for layout in layouts if (layout.assessment.num_layout_warnings > 0) == least]
    return sorted(layouts, key=lambda layout: (layout.cost, str(layout.cfg.parallel))), refused


def fastest(start: RunConfig, machines: DoctorOptions, override: Override) -> tuple[RunConfig, Change, str]:
    """(configuration, difference from ``start``, reason).

    A dense model gets the layout nearest to ``start``. With experts, of the layouts nearest to each number of ranks
    that may divide them, the layout with the fastest steps by the arithmetic of ``plan`` is chosen.
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
        seconds = step_seconds(layout[0], machines) if result.works else 0.0
        return len(result.errors), result.num_layout_warnings, seconds

    reason = "fastest by the arithmetic of plan, of the layouts nearest to each division of the experts"
    return *min(layouts, key=order), reason


def _nearest_job(start: RunConfig, machines: DoctorOptions, override: Override) -> tuple[RunConfig, Change]:
    """(configuration, change) of the layout nearest to ``start`` that fits, if possible without offloading."""
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
    """The change after which engines share the trainer's GPUs and as little memory as possible moves in every step.

    Tries awake engines, then sleeping engines, with shorter microbatches or selective recompute. Empty if all need
    offloading (moving 80 GB takes seconds, more than a step's recompute) or a KV cache for less than half of the
    sequences decoded at once.
    """
    tokens, wanted = cfg.optim.max_tokens_per_microbatch, _decoded_at_once(cfg) / 2
    sizes = (tokens, tokens // 2) if tokens // 2 >= max(_SHORTEST, cfg.max_sequence_tokens) else (tokens,)
    savings = [(recompute, size) for recompute in dict.fromkeys((cfg.optim.recompute, "selective")) for size in sizes]
    if cfg.model.is_moe:  # shorter microbatches cost more there: as many kernels to launch, as many gradients to read
        savings.sort(key=lambda saving: -saving[1])
    sleeps, shares = (0, cfg.engine.sleep_level), _SHARES
    if is_supervised(cfg):
        sleeps, shares = sleeps[1:], (cfg.engine.gpu_memory_utilization,)
    for (recompute, size), sleep in itertools.product(savings, dict.fromkeys(sleeps)):
        for share in shares:
            change = (("engine.sleep_level", sleep), ("engine.gpu_memory_utilization", share), ("optim.offload", ()))
            change += (("optim.recompute", recompute), ("optim.max_tokens_per_microbatch", size))
            result = assess(override(apply(cfg, change)), machines)
            if result.works and not result.num_layout_warnings:
                if result.engine is None or result.engine.full_sequences >= wanted:
                    return _changed(cfg, change)
                break
    return ()


def longer_microbatches(cfg: RunConfig, machines: DoctorOptions, override: Override = lambda cfg: cfg) -> Change:
    """The change after which a microbatch has 4, 2 or 1.5 times as many tokens, whose logits exist at once.

    Fewer microbatches launch fewer kernels, and each reads and writes all gradients. Engines on the trainer's GPUs may
    give up KV cache that no sequence needs. Empty if nothing longer fits, if few microbatches would be left, or if the
    configuration does not work.
    """
    engine, parallel = cfg.engine, cfg.parallel
    if not assess(override(cfg), machines).works:
        return ()
    shares = [engine.gpu_memory_utilization]
    if engine.placement == "colocated" and not is_supervised(cfg):
        shares += [share for share in _SHARES if share < shares[0]]
    for size in (times * cfg.optim.max_tokens_per_microbatch // 2 for times in (8, 4, 3)):
        longer = microbatches_of(size)
        few = _FEWEST_MICROBATCHES * parallel.pipeline
        if size > _LONGEST * parallel.context or trainer_memory.num_microbatches(apply(cfg, longer)) < few:
            continue
        for share in shares:
            change = (*longer, ("engine.gpu_memory_utilization", share))
            result = assess(override(apply(cfg, change)), machines)
            if result.engine is not None and result.engine.full_sequences < _decoded_at_once(cfg):
                break
            if result.works and not result.num_layout_warnings:
                return _changed(cfg, change)
    return ()


def _decoded_at_once(cfg: RunConfig) -> int:
    """Sequences that one engine decodes at once, at most."""
    num_asked = math.ceil(cfg.sampling.prompts_per_step * cfg.sampling.completions_per_prompt / cfg.engine.num_replicas)
    return min(cfg.engine.max_num_sequences, num_asked)
