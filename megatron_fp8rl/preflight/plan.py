"""``python -m megatron_fp8rl plan CONFIG --gpus 1024``: how long a step takes on so many GPUs, before asking for them.

Out: the best of the layouts, its seconds by phase, memory, GPU time for a million trained tokens, and the time that
failures cost. Needs neither a GPU nor torch. ``rates.toml`` has rates measured on one machine. The network, and so
everything that spans nodes, is assumed. ``benchmarks/planner`` compares the same arithmetic with measured runs.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import resolved
from megatron_fp8rl.preflight import step_time
from megatron_fp8rl.preflight.assessment import DoctorOptions
from megatron_fp8rl.preflight.auto_layout import Layout, all_layouts
from megatron_fp8rl.preflight.memory import GIB, GpuName
from megatron_fp8rl.preflight.step_time import Lengths, Network, Rates, StepTime
from megatron_fp8rl.preflight.trainer_memory import Bytes

_RESTART_S = 151.0  # a lost node is noticed (25 s), the job starts again (6 s), processes start and publish (120 s)
_HOST_BYTES_PER_S = 25e9  # a rank's copy to its host, assumed


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The machines, and what is known about the work."""

    gpus: int = 8
    gpu: GpuName = "h200"
    gpus_per_node: int = 8
    nic_gbits: float = 400.0  # of one GPU's network card; 80 % of it is used
    storage_gbytes: float = 2.0  # GB/s of one GPU to the shared file system
    prompt_tokens: float | None = None  # mean; None: half of sampling.max_prompt_tokens
    completion_tokens: float | None = None  # mean; None: half of sampling.max_completion_tokens
    dollars: float | None = None  # of a GPU for an hour
    failures_per_hour: float | None = None  # lost nodes; None: one for 64 nodes
    repair_hours: float = 2.0  # until a lost node is back
    top: int = 5  # layouts shown

    def problems(self) -> list[str]:
        values = {name: getattr(self, name) for name in ("gpus", "gpus_per_node", "nic_gbits", "storage_gbytes", "top")}
        return [f"--{name} {value}: more than 0 is needed" for name, value in values.items() if not value > 0]


def layout_text(cfg: RunConfig) -> str:
    parallel, engine = cfg.parallel, cfg.engine
    virtual = f" VP{parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
    shared = " on the same GPUs" if engine.placement == "colocated" else ""
    return (
        f"{parallel.world_size} = TP{parallel.tensor} PP{parallel.pipeline}{virtual} EP{parallel.expert} "
        f"DP{parallel.data}, {cfg.optim.max_tokens_per_microbatch:,} tokens a microbatch; "
        f"{engine.num_replicas} x DP{engine.data} TP{engine.tensor} EP{engine.expert}{shared}"
    )


@dataclass(frozen=True)
class Plan:
    """Layouts that work, the cheapest first; numbers of refused layouts, by reason; lines of the report."""

    layouts: list[Layout]
    refused: Counter[str]
    lines: list[str]


def run(cfg: RunConfig, options: PlanOptions) -> int:
    """Print the plan; return the exit status: 2 if no layout works."""
    if problems := options.problems():
        print("\n".join(f"python -m megatron_fp8rl plan: {problem}" for problem in problems), file=sys.stderr)
        return 2
    result = plan(cfg, options)
    print("\n".join(result.lines))
    return 0 if result.layouts else 2


def plan(cfg: RunConfig, options: PlanOptions) -> Plan:
    machines = DoctorOptions(gpu=options.gpu, num_gpus=options.gpus, gpus_per_node=options.gpus_per_node)
    rates, sampling = Rates.of(options.gpu), cfg.sampling
    network = Network(
        nic_bytes_per_s=options.nic_gbits / 8 * 1e9 * 0.8, storage_bytes_per_s=options.storage_gbytes * 1e9
    )
    lengths = Lengths.of(sampling, options.prompt_tokens, options.completion_tokens)

    how = {"memory_bytes": machines.hardware.memory_bytes, "gpus": options.gpus, "gpus_per_node": options.gpus_per_node}

    def on_machines(cfg: RunConfig) -> RunConfig:
        return resolved(cfg, Hardware(machines.hardware.generation))

    def timed(cfg: RunConfig) -> StepTime:
        return step_time.step_time(on_machines(cfg), lengths, rates, network, **how)

    counted = parameters.count(cfg.model)
    result = Plan(*all_layouts(cfg, machines, timed), [])
    layouts = result.layouts
    result.lines[:] = [
        f"{cfg.name}: {counted.total / 1e9:.1f} G parameters, {counted.active / 1e9:.1f} G active; {options.gpus} "
        f"{options.gpu.upper()} in nodes of {options.gpus_per_node}; {sampling.prompts_per_step} x "
        f"{sampling.completions_per_prompt} sequences of {lengths.prompt:.0f} + {lengths.mean:.0f} tokens on average, "
        f"{lengths.longest:.0f} at most",
        f"rates: {rates.source}. Network, assumed: {network.nic_bytes_per_s / 1e9:.0f} GB/s of a card, "
        f"{network.nvlink_bytes_per_s / 1e9:.0f} GB/s within a node. Nothing of this was measured across nodes.",
        "",
        f"{len(layouts) + result.refused.total()} layouts considered, {len(layouts)} can work",
        *(f"  {count:5d} refused: {reason[:150]}" for reason, count in result.refused.most_common(6)),
        "",
    ]
    if not layouts:
        result.lines.append("No layout works: ask for more GPUs, or let the doctor propose a change.")
        return result
    best = layouts[0]
    comparison = _against_bf16(best, lambda cfg: all_layouts(cfg, machines, timed)[0])
    shares = step_time.acceptance_to_win(on_machines(best.cfg), lengths, rates, network, **how)
    comparison = [*comparison, "", *_drafts(best.cfg, shares)]
    blocks = _table(layouts[: options.top]), _degrees(layouts), _phases(best, options), comparison
    for block in (*blocks, _failures(best, options, network)):
        result.lines.extend([*block, ""])
    del result.lines[-1]
    return result


def _table(layouts: list[Layout]) -> list[str]:
    head = f"  {'step s':>8} {'sample':>8} {'train':>8} {'publish':>8} {'pause':>7} {'GPU s/Mtok':>11}  layout"
    rows = [
        f"  {c.time.step:8.1f} {c.time.rollouts:8.1f} {c.time.training:8.1f} {c.time.publish:8.2f} {c.time.pause:7.2f} "
        f"{c.cost:11.0f}  {layout_text(c.cfg)}"
        for c in layouts
    ]
    return [head, *rows]


def _degrees(layouts: list[Layout]) -> list[str]:
    """For each degree of the best layout: the best layout with another value, and its cost."""
    best = layouts[0]
    lines = [f"best: {layout_text(best.cfg)}"]
    for path, name in (
        ("parallel.world_size", "GPUs for the trainer"),
        *((f"parallel.{degree}", f"trainer {degree}") for degree in ("tensor", "pipeline", "expert")),
        *((f"engine.{degree}", f"engine {degree}") for degree in ("data", "tensor")),
    ):
        degree = attrgetter(f"cfg.{path}")
        other = next((layout for layout in layouts if degree(layout) != degree(best)), None)
        if other is not None:
            more = other.cost / best.cost - 1
            lines.append(f"  {name} {degree(best)} (next best: {degree(other)}, {more:+.1%} GPU seconds)")
    return lines


def _phases(best: Layout, options: PlanOptions) -> list[str]:
    time, assessment = best.time, best.assessment
    order = "sampling overlaps training" if time.overlaps else "phases follow each other"
    moves = ["engines sleep and wake"] if best.cfg.engine.sleep_level else []
    moves += [f"the trainer offloads {', '.join(best.cfg.optim.offload)}"] if best.cfg.optim.offload else []
    dollars = " (--dollars of a GPU hour gives a price)"
    if options.dollars is not None:
        dollars = f", {time.gpu_seconds_per_million / 3600 * options.dollars:.2f} dollars"
    trainer, engine = assessment.trainer, assessment.engine
    assert trainer is not None and engine is not None  # the layout works
    return [
        f"a step of the best layout: {time.step:.1f} s; {order} (computed)",
        f"  rollouts       {time.rollouts:9.2f} s",
        f"  driver         {time.driver:9.2f} s   ({time.driver / time.step:.1%} of the step); "
        f"rank 0 holds {time.driver_gb:.1f} GB",
        f"  old_logprobs   {time.old_logprobs:9.2f} s",
        f"  update         {time.update:9.2f} s   pipeline bubble {time.bubble:.2f} s, "
        f"expert traffic {time.expert_traffic:.2f} s",
        f"  publish        {time.publish:9.2f} s   wire {time.wire:.2f} s; engines pause {time.pause:.2f} s",
        *([f"  handover       {time.handover:9.2f} s   {'; '.join(moves)}"] if time.handover else []),
        f"  memory: trainer {trainer.share:.0%} of a GPU, engine {engine.estimate.share:.0%}",
        f"  {time.tokens / time.step:,.0f} trained tokens/s, {time.gpu_seconds_per_million:,.0f} GPU seconds for a "
        f"million{dollars}",
    ]


def _against_bf16(best: Layout, layouts_of: Callable[[RunConfig], list[Layout]]) -> list[str]:
    """Whether FP8 pays in whole steps. The answer is yes or no only beyond the largest error of a measured step."""
    cfg = best.cfg
    if cfg.precision.trainer == cfg.precision.rollout == "bf16":
        return ["does FP8 pay? This run has none"]
    plain = PrecisionConfig(trainer="bf16", rollout="bf16", exact=cfg.precision.exact)
    others = layouts_of(replace(cfg, precision=plain, engine=replace(cfg.engine, kv_cache_dtype="auto")))
    if not others:
        return ["does FP8 pay? In BF16 no layout works on these GPUs"]
    time, other = best.time, others[0].time
    gain = other.gpu_seconds_per_million / time.gpu_seconds_per_million
    error = 1 + step_time.largest_step_error()
    answer = "yes" if gain > error else "no" if gain < 1 / error else "too close to say"
    return [
        f"does FP8 pay? {answer}: {gain:.2f} times the tokens of a GPU hour in BF16, whose best layout is "
        f"{layout_text(others[0].cfg)} (computed)",
        *(
            f"  {name:<14} {getattr(other, name):9.2f} s in BF16 {getattr(time, name):9.2f} s in FP8"
            for name in ("rollouts", "old_logprobs", "update", "publish", "step")
        ),
        f"  a ratio between {1 / error:.2f} and {error:.2f} says nothing: "
        f"measured steps differ from this arithmetic by {error - 1:.0%} at most",
    ]


def _drafts(cfg: RunConfig, shares: dict[int, float]) -> list[str]:
    """From which acceptance drafts pay. Predicted steps have none: a run's acceptance is not known before."""
    rows = [f"{sequences}: {share:.0%}" for sequences, share in shares.items()]
    without = "the host's work" + (" and the layer that drafts" if cfg.engine.speculation == "mtp" else "")
    return [
        f"do {cfg.engine.draft_tokens} drafts pay (engine.speculation)? They lose below this share of accepted drafts, "
        f"by sequences of an engine rank: {'; '.join(rows)}",
        f"  computed from weights, cache and products, without {without}; the steps above have no drafts",
    ]


def _failures(best: Layout, options: PlanOptions, network: Network) -> list[str]:
    """Time that lost nodes cost (half an interval and a restart each), with the save interval that loses least (Young,
    CACM 17(9), 1974). The number of nodes in repair is Poisson with mean rate x repair time."""
    per_hour = options.failures_per_hour
    if per_hour is None:
        per_hour = -(-options.gpus // options.gpus_per_node) / 64
    if not per_hour > 0:
        return ["failures: none expected"]
    per = Bytes.of(best.cfg)
    state = parameters.count(best.cfg.model).total * (per.weight + per.optimizer) / best.cfg.parallel.world_size
    load_s, rate = state / network.storage_bytes_per_s, per_hour / 3600
    spares = _spares(per_hour * options.repair_hours)
    lines = [
        f"failures: {per_hour:.2f} lost nodes an hour; {spares} spare nodes suffice for 99 % of the time; a restart "
        f"takes {_RESTART_S + load_s:.0f} s, {load_s:.0f} s of it to load {state / GIB:.1f} GiB of a rank (computed)"
    ]
    for target, save_s in (("files", load_s), ("files, after a copy to the host", state / _HOST_BYTES_PER_S)):
        interval = max(best.time.step, math.sqrt(2 * save_s / rate))
        lost = save_s / interval + rate * (interval / 2 + _RESTART_S + load_s)
        lines.append(f"  saved to {target}: every {interval:.0f} s loses least, {lost:.1%} of the time")
    return lines


def _spares(mean: float) -> int:
    """The smallest number of spare nodes that more nodes in repair exceed for less than 1 % of the time."""
    spares, term = 0, math.exp(-mean)
    total = term
    while 1 - total >= 0.01:
        spares += 1
        term *= mean / spares
        total += term
    return spares
