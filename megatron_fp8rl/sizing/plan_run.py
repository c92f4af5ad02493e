"""``python -m megatron_fp8rl plan CONFIG --gpus 1024``: how long a step takes on so many GPUs, before asking for them.

In: a configuration, a number of GPUs, and a network. Out: the layouts that were considered and the best of them, its
seconds by phase, its memory, its GPU time for a million trained tokens, the time that failures cost, and how far the
same arithmetic is from every run that was measured. Needs neither a GPU nor torch.

Rates are measured on one machine (``rates.py``); the network, and so everything that spans nodes, is assumed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.preflight.memory import GIB, GPUS, GpuName
from megatron_fp8rl.sizing import against_runs, lost_time, rates
from megatron_fp8rl.sizing.layout_choices import Choice, Choices, choices
from megatron_fp8rl.sizing.step_time import Lengths

_CHECKPOINT_BYTES = 14  # of a parameter: BF16 weight, FP32 master and moments


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The machines, and what is known about the work."""

    gpus: int = 8
    gpu: GpuName = "h200"
    gpus_per_node: int = 8
    nic_gbits: float = 400.0  # of one GPU's network card; 80 % of it is counted with
    storage_gbytes: float = 2.0  # GB/s of one GPU to the shared file system
    prompt_tokens: float | None = None  # mean; None: half of rollout.max_prompt_tokens
    completion_tokens: float | None = None  # mean; None: half of rollout.max_completion_tokens
    dollars: float | None = None  # of a GPU for an hour
    failures_per_hour: float | None = None  # lost nodes; None: one for 64 nodes
    repair_hours: float = 2.0  # until a lost node is back
    spare_nodes: int = 1
    top: int = 5  # layouts shown

    def problems(self) -> list[str]:
        """Options with impossible values."""
        given = {name: getattr(self, name) for name in ("gpus", "gpus_per_node", "nic_gbits", "storage_gbytes", "top")}
        return [f"--{name} {value}: more than 0 is needed" for name, value in given.items() if not value > 0]


def run(cfg: RunConfig, options: PlanOptions) -> int:
    """Print the plan; return the exit status: 2 if no layout works."""
    if problems := options.problems():
        print("\n".join(f"python -m megatron_fp8rl plan: {problem}" for problem in problems), file=sys.stderr)
        return 2
    found, lines = plan(cfg, options)
    print("\n".join(lines))
    return 0 if found.found else 2


def plan(cfg: RunConfig, options: PlanOptions) -> tuple[Choices, list[str]]:
    """(layouts, the report)."""
    gpu, of_gpu = GPUS[options.gpu], rates.of(options.gpu)
    network = rates.Network(
        nic_bytes_per_s=options.nic_gbits / 8 * 1e9 * 0.8, storage_bytes_per_s=options.storage_gbytes * 1e9
    )
    rollout = cfg.rollout
    lengths = Lengths.of(rollout, options.prompt_tokens, options.completion_tokens)

    def layouts(cfg: RunConfig) -> Choices:
        return choices(cfg, gpu, options.gpus, lengths, of_gpu, network, options.gpus_per_node)

    found = layouts(cfg)
    counted = parameters.count(cfg.model)
    lines = [
        f"{cfg.name}: {counted.total / 1e9:.1f} G parameters, {counted.active / 1e9:.1f} G active; {options.gpus} "
        f"{gpu.name.upper()} in nodes of {options.gpus_per_node}; {rollout.prompts_per_step} x "
        f"{rollout.completions_per_prompt} sequences of {lengths.prompt:.0f} + {lengths.mean:.0f} tokens on average, "
        f"{lengths.longest:.0f} at most",
        f"rates: {of_gpu.source}. Network, assumed: {network.nic_bytes_per_s / 1e9:.0f} GB/s of a card, "
        f"{network.nvlink_bytes_per_s / 1e9:.0f} GB/s within a node. Nothing of this was measured across nodes.",
        "",
        f"{found.num_considered} layouts considered, {len(found.found)} can work",
        *(f"  {count:5d} refused: {reason[:150]}" for reason, count in found.refused.most_common(6)),
    ]
    if not found.found:
        return found, [*lines, "", "No layout works: ask for more GPUs, or let the doctor propose a change."]
    best = found.found[0]
    lines += ["", *_table(found.found[: options.top], options), "", *_why(found), "", *_phases(best, options)]
    lines += ["", *_against_bf16(best, layouts)]
    lines += ["", *_failures(best, options, network), "", *against_runs.report()]
    return found, lines


def _table(shown: tuple[Choice, ...], options: PlanOptions) -> list[str]:
    head = f"  {'step s':>8} {'sample':>8} {'train':>8} {'publish':>8} {'pause':>7} {'GPU s/Mtok':>11}  layout"
    rows = [
        f"  {c.time.step:8.1f} {c.time.rollouts:8.1f} {c.time.training:8.1f} {c.time.publish:8.2f} {c.time.pause:7.2f} "
        f"{c.time.gpu_seconds_per_million:11.0f}  {c.words}"
        for c in shown
    ]
    return [head, *rows]


def _why(found: Choices) -> list[str]:
    best = found.found[0]
    lines = [f"best: {best.words}"]
    for path, words in (
        (lambda c: c.cfg.parallel.world_size, "GPUs for the trainer"),
        (lambda c: c.cfg.parallel.tensor, "tensor-parallel ranks of the trainer"),
        (lambda c: c.cfg.parallel.pipeline, "pipeline stages"),
        (lambda c: c.cfg.parallel.expert, "expert-parallel ranks of the trainer"),
        (lambda c: c.cfg.rollout.data, "data-parallel ranks of an engine"),
        (lambda c: c.cfg.rollout.tensor, "tensor-parallel ranks of an engine"),
    ):
        other = next((c for c in found.found if path(c) != path(best)), None)
        if other is not None:
            slower = other.time.gpu_seconds_per_million / best.time.gpu_seconds_per_million - 1
            lines.append(f"  {path(best)} {words}; with another number the best is {path(other)}, {slower:.1%} dearer")
    return lines


def _phases(best: Choice, options: PlanOptions) -> list[str]:
    time = best.time
    how = "sampling overlaps training" if time.overlaps else "phases follow each other"
    moves = ["engines sleep and wake"] if best.cfg.rollout.sleep_level else []
    moves += [f"the trainer offloads {', '.join(best.cfg.optim.offload)}"] if best.cfg.optim.offload else []
    lines = [
        f"a step of the best layout: {time.step:.1f} s; {how} (computed)",
        f"  rollouts       {time.rollouts:9.2f} s",
        f"  driver         {time.driver:9.2f} s   ({time.driver / time.step:.1%} of the step); holds {time.driver_gb:.1f} GB",
        f"  old_logprobs   {time.old_logprobs:9.2f} s",
        f"  update         {time.update:9.2f} s   of which bubble {time.bubble:.2f} s, experts' traffic "
        f"{time.expert_traffic:.2f} s",
        f"  publish        {time.publish:9.2f} s   of which the wire {time.wire:.2f} s; engines pause {time.pause:.2f} s",
        *([f"  handover       {time.handover:9.2f} s   {'; '.join(moves)}"] if time.handover else []),
        f"  memory: trainer {best.trainer_share:.0%} of a GPU, engine {best.engine_share:.0%}",
        f"  {time.tokens / time.step:,.0f} trained tokens/s, {time.gpu_seconds_per_million:,.0f} GPU seconds for a "
        "million" + _dollars(best, options),
    ]
    return lines


def _against_bf16(best: Choice, layouts: Callable[[RunConfig], Choices]) -> list[str]:
    """Whether FP8 pays in whole steps, and how sure that is."""
    cfg = best.cfg
    if cfg.precision.trainer == cfg.precision.rollout == "bf16":
        return ["does FP8 pay? This run has none"]
    plain = PrecisionConfig(trainer="bf16", rollout="bf16", exact=cfg.precision.exact)
    others = layouts(replace(cfg, precision=plain, rollout=replace(cfg.rollout, kv_cache_dtype="auto"))).found
    if not others:
        return ["does FP8 pay? In BF16 no layout works on these GPUs"]
    time, other = best.time, others[0].time
    gain = other.gpu_seconds_per_million / time.gpu_seconds_per_million
    known = against_runs.ratios()
    wrong = max((max(1 + one.error, 1 / (1 + one.error)) for one in against_runs.steps()), default=float("inf"))
    answer = "yes" if gain > wrong else "no" if gain < 1 / wrong else "too close to say"
    lines = [
        f"does FP8 pay? {answer}: {gain:.2f} times the tokens of a GPU hour in BF16, whose best layout is {others[0].words} "
        "(computed)",
        *(
            f"  {name:<14} {getattr(other, name):9.2f} s in BF16 {getattr(time, name):9.2f} s in FP8"
            for name in ("rollouts", "old_logprobs", "update", "publish", "step")
        ),
    ]
    lines += [f"  measured: {name}: predicted {one:.2f}, measured {two:.2f} times" for name, one, two in known]
    if cfg.model.is_moe:
        lines.append("  updates of mixtures count as those of 11 layers of Qwen3-30B-A3B on two H200s (ledger, run P)")
    return [*lines, f"  so a ratio between {1 / wrong:.2f} and {wrong:.2f} says nothing"] if known else lines


def _dollars(best: Choice, options: PlanOptions) -> str:
    if options.dollars is None:
        return " (--dollars of a GPU hour gives a price)"
    return f", {best.time.gpu_seconds_per_million / 3600 * options.dollars:.2f} dollars"


def _failures(best: Choice, options: PlanOptions, network: rates.Network) -> list[str]:
    nodes = -(-options.gpus // options.gpus_per_node)
    failures = nodes / 64 if options.failures_per_hour is None else options.failures_per_hour
    state = parameters.count(best.cfg.model).total * _CHECKPOINT_BYTES / best.cfg.parallel.world_size
    load_s = state / network.storage_bytes_per_s
    restart = replace(lost_time.Restart(), load_s=load_s)
    lines = [
        f"failures: {failures:.2f} lost nodes an hour, back after {options.repair_hours:g} h; {options.spare_nodes} spare, "
        f"{lost_time.spares_for(failures, options.repair_hours * 3600)} would be enough for 99 % of the time; "
        f"a restart takes {restart.total:.0f} s, of which loading {load_s:.0f} s (computed)",
        f"  {'saved':>22} {'every':>9} {'lost a day':>11} {'saving':>8} {'repeated':>9} {'restarts':>9} {'waiting':>8}",
    ]
    neighbour_s = state / network.nic_bytes_per_s
    for words, save_s in (
        ("to files, waiting", load_s),
        ("to files, copied first", state / 25e9),
        ("to a neighbour", neighbour_s),
    ):
        best_s = lost_time.best_interval_s(failures, save_s) if failures else 86_400.0
        for every in sorted({best_s, 600.0, 3600.0}):
            every = max(every, best.time.step)
            lost = lost_time.loss(
                every,
                failures_per_hour=failures,
                save_s=save_s,
                restart=restart,
                repair_s=options.repair_hours * 3600,
                spare_nodes=options.spare_nodes,
            )
            mark = " *" if every == best_s else ""
            lines.append(
                f"  {words:>22} {every:7.0f} s {lost.share:10.1%} {lost.saving:7.0f}s {lost.repeated:8.0f}s "
                f"{lost.restarting:8.0f}s {lost.waiting:7.0f}s{mark}"
            )
    lines.append(
        f"  * loses least. {state / GIB:.1f} GiB of a rank: {load_s:.0f} s to files, {state / 25e9:.1f} s to the host "
        f"(25 GB/s, assumed), {neighbour_s:.1f} s to a neighbour's"
    )
    return lines
