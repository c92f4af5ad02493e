"""Plots of one run. Each ``draw_`` function fills axes; it returns False if the run has no data for the plot."""

import re
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_fp8rl.observe.metrics import PHASES, START_PHASES
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.report.style import BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, curve, finish, new_figure

Draw = Callable[[Axes, RunData], bool]
_PHASE_COLORS = dict(zip(PHASES, (BLUE, SKY, GREEN, "#9BD3C0", ORANGE, RED, GREY, PURPLE, "#C9CED6"), strict=True))
_PASS_AT = re.compile(r"eval/pass_at_(\d+)/mean")


def _curves(
    title: str, *curves: tuple[str, str, str], y: str = "", limits: tuple[float | None, float | None] = (None, None)
) -> Draw:
    """A plot of several metrics: (key, label, color) of each curve."""

    def draw(axes: Axes, run: RunData) -> bool:
        for key, label, color in curves:
            curve(axes, *run.series(key), color=color, label=label)
        axes.set_ylim(*limits)
        finish(axes, title, y=y, legend=len(curves) > 1)
        return bool(axes.lines)

    return draw


def draw_reward(axes: Axes, run: RunData) -> bool:
    steps, rewards = run.series("reward/score/mean")
    eval_steps, evals = run.series("eval/pass_rate/mean")
    if not rewards and not evals:
        return False
    curve(axes, steps, rewards, color=BLUE, label="reward")
    pass_steps, passes = run.series("reward/pass_rate/mean")
    if passes != rewards:
        curve(axes, pass_steps, passes, color=GREEN, label="pass rate", line="--")
    if evals:
        # Numbers stand in the legend, where no curve crosses them.
        last = f"held-out pass rate, last {evals[-1]:.0%}" if len(evals) > 1 else "held-out pass rate"
        axes.plot(eval_steps, evals, "D", color=ORANGE, markersize=6, label=last, zorder=5, clip_on=False)
        is_warm = eval_steps[0] == 0 and run.warm_start.records
        first = f"{'after the warm start' if is_warm else 'first'}: {evals[0]:.0%}"
        axes.axhline(evals[0], color=ORANGE, linestyle=":", linewidth=1.2, label=first)
        low, high = (run.values(f"eval/pass_rate_{end}/mean") for end in ("low", "high"))
        if len(low) == len(high) == len(evals):
            axes.vlines(eval_steps, low, high, color=ORANGE, linewidth=1.2, clip_on=False)  # 95 %
    highest = max([1.0, *rewards, *evals])
    axes.set_ylim(min([0.0, *rewards]), highest * 1.06)
    finish(axes, "Reward")
    return True


def draw_mismatch(axes: Axes, run: RunData) -> bool:
    """Difference of the log-probabilities of trainer and engine."""
    axes.set_yscale("log")
    shown = False
    for key, label, color, line in (
        ("mismatch/abs_logprob_diff/max", "|old − rollout|, max", ORANGE, "-"),
        ("mismatch/abs_logprob_diff/mean", "|old − rollout|, mean", BLUE, "-"),
        ("mismatch/kl_k3/mean", "KL (k3)", GREEN, "-"),
    ):
        steps, values = run.series(key)
        points = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0]
        if points:
            curve(axes, [p[0] for p in points], [p[1] for p in points], color=color, label=label, line=line)
            shown = True
    finish(axes, "Mismatch between trainer and engine", y="nats, log scale")
    if shown:
        _legend_above(axes, 0.16, 3)
    return shown


def draw_weight_health(axes: Axes, run: RunData) -> bool:
    """Fractions of tokens lost to importance weights."""
    steps, size = run.series("mismatch/effective_sample_size/mean")
    if not size or run.is_exact:
        return False
    axes.set_yscale("log")
    lost = [max(0.0, 1 - value) for value in size]
    for values, label, color in (
        (lost, "1 − effective sample size", BLUE),
        (run.values("mismatch/fraction_corrected/mean"), "corrected", ORANGE),
        (run.values("mismatch/fraction_vetoed/mean"), "vetoed", RED),
    ):
        # A log axis cannot show zero: a step without such tokens leaves a gap.
        heights = [value if value > 0 else float("nan") for value in values]
        if len(heights) == len(steps):
            name = label if any(values) else f"{label}: none"
            axes.plot(steps, heights, color=color, label=name, marker=".", markersize=3, linewidth=1.2)
    finish(axes, "Importance weights: share of tokens lost", y="fraction, log scale")
    _legend_above(axes, 0.22, 3)
    return True


def draw_weight_range(axes: Axes, run: RunData) -> bool:
    steps, high = run.series("mismatch/ratio/max")
    low_steps, low = run.series("mismatch/ratio/min")
    if not high or steps != low_steps or run.is_exact:
        return False
    scale = ""
    if max(high) > 4 or min(low) < 0.25:
        axes.set_yscale("log")
        low, scale = [max(value, 1e-9) for value in low], ", log scale"
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.13, linewidth=0, label="smallest to largest")
    for values in (low, high):
        axes.plot(steps, values, color=SKY, linewidth=1.0)
    axes.plot(*run.series("mismatch/ratio/mean"), color=BLUE, label="mean")
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=":")
    finish(axes, "Importance weights: range", y=f"exp(old − rollout){scale}")
    _legend_above(axes, 0.22, 2)
    return True


def _legend_above(axes: Axes, share: float, num_columns: int) -> None:
    """Put the legend above the curves, in ``share`` of the height."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** share if axes.get_yscale() == "log" else high + share * (high - low))
    axes.legend(loc="upper right", ncols=num_columns, columnspacing=1.0, handlelength=1.2)


def draw_entropy(axes: Axes, run: RunData) -> bool:
    key = "train/entropy/mean" if run.values("train/entropy/mean") else "loss/entropy/mean"
    curve(axes, *run.series(key), color=BLUE, label="entropy (trainer)")
    curve(axes, *run.series("rollout/surprisal/mean"), color=ORANGE, label="surprisal (engine)", line="--")
    axes.set_ylim(bottom=0)
    finish(axes, "Entropy", y="nats per token")
    return bool(axes.lines)


draw_kl = _curves(
    "Policy movement",
    ("loss/kl_update/mean", "KL(old ‖ trainer), within the step", BLUE),
    ("loss/kl_ref/mean", "KL(trainer ‖ reference)", PURPLE),
    y="nats per token",
)


def draw_clipping(axes: Axes, run: RunData) -> bool:
    for key, label, color in (
        ("loss/clip_fraction_low/mean", "lower bound", BLUE),
        ("loss/clip_fraction_high/mean", "upper bound", ORANGE),
        ("loss/clip_fraction_dual/mean", "dual", PURPLE),
    ):
        if any(run.values(key)) or "dual" not in key:
            curve(axes, *run.series(key), color=color, label=label)
    finish(axes, "Clipped tokens", y="fraction")
    return bool(axes.lines)


draw_loss = _curves("Loss", ("train/loss/mean", "loss", BLUE))


def draw_grad_norm(axes: Axes, run: RunData) -> bool:
    values = run.values("train/grad_norm/max")
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    curve(axes, *run.series("train/grad_norm/max"), color=RED, label="gradient norm")
    finish(axes, "Gradient norm, before clipping", legend=False)
    return bool(values)


def draw_lengths(axes: Axes, run: RunData) -> bool:
    steps, mean = run.series("rollout/length/mean")
    if not mean:
        return False
    low, high = run.values("rollout/length/min"), run.values("rollout/length/max")
    if len(low) == len(high) == len(mean):
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="shortest to longest")
    curve(axes, steps, mean, color=BLUE, label="mean")
    limit = run.config.get("sampling", {}).get("max_completion_tokens")
    if limit and limit < 3 * max(high or mean):
        axes.axhline(limit, color=GREY, linestyle=":", linewidth=1.2, label="limit")
    axes.set_ylim(bottom=0)
    finish(axes, "Completion length", y="tokens")
    return True


draw_problem_share = _curves(
    "Without learning signal",
    ("reward/zero_variance/mean", "groups without variance", BLUE),
    ("rollout/truncated/mean", "truncated completions", ORANGE),
    ("reward/failed/mean", "completions not scored", RED),
    y="fraction",
    limits=(-0.02, 1.06),
)


def draw_start(axes: Axes, run: RunData) -> bool:
    """Time from the command to the first update: the parts of the start, then the phases of step 1."""
    steps = {record["step"]: record for record in run.records}
    if 0 not in steps or 1 not in steps or "time/start/s" not in steps[0]:
        return False
    parts = [(phase, steps[0].get(f"time/{phase}/s", 0.0)) for phase in START_PHASES]
    first = next((phase for phase in ("rollouts", "generate") if f"time/{phase}/s" in steps[1]), "rollouts")
    parts += [(f"step 1: {phase}", steps[1].get(f"time/{phase}/s", 0.0)) for phase in (first, "old_logprobs", "update")]
    parts = [(name.removeprefix("start_"), seconds) for name, seconds in parts if seconds >= 0.1]
    # Parts of a run with a warm start begin after it: its own start and steps are the rest of the time.
    rest = steps[1].get("time/first_update/s", 0.0) - sum(seconds for _, seconds in parts)
    if run.warm_start.records and rest >= 0.1:
        parts.insert(0, ("warm start", rest))
    at = 0.0
    for row, (name, seconds) in enumerate(parts):
        axes.barh(row, seconds, left=at, color=ORANGE if name.startswith("step") else BLUE, height=0.7)
        at += seconds
        axes.annotate(f" {seconds:.1f} s", (at, row), va="center", fontsize=8)
    axes.set_yticks(range(len(parts)), [name for name, _ in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, at * 1.12)
    finish(axes, f"Start: {at:.0f} s from the command to the first update", x="seconds", legend=False)
    return True


def draw_phase_times(axes: Axes, run: RunData) -> bool:
    """Seconds of every phase, stacked up to the whole step."""
    records = [record for record in run.records if "time/step/s" in record and record["step"] > 0]
    if len(records) < 2:
        return False
    steps = [record["step"] for record in records]
    below = [0.0] * len(records)
    total_of_run = sum(record["time/step/s"] for record in records)
    for phase in PHASES:
        key = f"time/{phase}/s"
        if phase == "rollouts" and not any(key in record for record in records):
            key = "time/generate/s"  # a synchronous loop has no separate wait for rollouts
        seconds = [record.get(key) or 0.0 for record in records]
        if sum(seconds) < 0.002 * total_of_run:
            continue  # thinner than a line in the plot
        above = [low + value for low, value in zip(below, seconds, strict=True)]
        style = {"color": _PHASE_COLORS[phase], "step": "mid" if len(steps) < 60 else None}
        axes.fill_between(steps, below, above, label=phase, alpha=0.85, linewidth=0, **style)
        below = above
    whole, style = [record["time/step/s"] for record in records], "steps-mid" if len(steps) < 60 else "default"
    axes.plot(steps, whole, color="#22262C", linewidth=1.0, label="step", drawstyle=style)
    # Limit the axis: one slow first step would flatten all others.
    ordered = sorted(record["time/step/s"] for record in records)
    axes.set_ylim(0, min(ordered[-1], 2.5 * ordered[len(ordered) // 2]) * 1.05)
    finish(axes, "Seconds per step", y="s")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(  # next to the stack, in the same order
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.0, borderaxespad=0.3
    )
    return True


draw_tokens_per_s = _curves(
    "Throughput",
    ("rollout/tokens_per_s/mean", "sampled", BLUE),
    ("train/tokens_per_s/mean", "trained", ORANGE),
    y="tokens/s",
    limits=(0, None),
)


def draw_publish(axes: Axes, run: RunData) -> bool:
    curve(axes, *run.series("publish/total/s"), color=BLUE, label="whole publication")
    curve(axes, *run.series("publish/pause/s"), color=ORANGE, label="engines paused")
    axes.set_ylim(bottom=0)
    megabytes = run.last("publish/bytes/sum")
    finish(axes, "Publishing weights" + (f" ({megabytes / 2**20:.1f} MiB)" if megabytes else ""), y="s")
    return bool(axes.lines)


def draw_positions(axes: Axes, run: RunData) -> bool:
    """Mismatch by completion position, for each third of the run."""
    details = [record for record in run.details if record.get("by_position")]
    if not details or run.is_exact:
        return False
    thirds = [details[i * len(details) // 3 : (i + 1) * len(details) // 3] for i in range(3)]
    names = ("first third of the run", "second third", "last third")
    if len(details) < 3:
        thirds, names = [details], ("whole run",)
    labels: list[str] = []
    for record in details:
        labels += [part["label"] for part in record["by_position"] if part["label"] not in labels]
    labels.sort(key=lambda label: int(label.partition("-")[0]))
    for records, name, color in zip(thirds, names, (SKY, BLUE, "#003B5C"), strict=False):
        sums = {label: [0.0, 0] for label in labels}
        for part in (part for record in records for part in record["by_position"]):
            sums[part["label"]][0] += part["abs_logprob_diff_mean"] * part["num_tokens"]
            sums[part["label"]][1] += part["num_tokens"]
        points = [(i, sums[label][0] / sums[label][1]) for i, label in enumerate(labels) if sums[label][1]]
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=color, markersize=4, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(bottom=0)
    finish(axes, "Mismatch along the completion", x="token of the completion", y="mean |old − rollout|, nats")
    return True


def _by_name(prefix: str, title: str, least: int) -> Draw:
    """A plot of all metrics with a prefix, if there are at least so many."""

    def draw(axes: Axes, run: RunData) -> bool:
        keys = sorted({key for record in run.records for key in record if key.startswith(prefix)})
        for key, color in zip(keys, CYCLE * len(keys), strict=False):
            curve(axes, *run.series(key), color=color, label=key.removeprefix(prefix).removesuffix("/mean"))
        finish(axes, title)
        return len(keys) >= least

    return draw


draw_environments = _by_name("reward/score_", "Reward by environment", 2)
draw_reward_parts = _by_name("reward/part_", "Parts of the reward", 1)  # before their weights


def draw_pass_at_k(axes: Axes, run: RunData) -> bool:
    """pass@k of checkpoints that the eval command evaluated, with 95 % intervals."""
    shown: set[int] = set()
    for number, evaluation in enumerate(run.evaluations):
        points = [(int(k), estimate) for k, estimate in evaluation["overall"]["pass_at"].items()]
        shown |= {k for k, _ in points}
        ks = [k * (1 + 0.02 * number) for k, _ in points]  # shift the markers apart
        color = CYCLE[number % len(CYCLE)]
        axes.vlines(ks, [e["low"] for _, e in points], [e["high"] for _, e in points], color=color, linewidth=1.2)
        axes.plot(ks, [e["value"] for _, e in points], "o-", color=color, markersize=4, label=evaluation["name"])
    if not shown:
        return False
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(shown), [str(k) for k in sorted(shown)])
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.06)
    finish(axes, "pass@k on held-out problems", x="k, completions per problem", y="chance that a completion passes")
    return True


def draw_pass_at_k_by_step(axes: Axes, run: RunData) -> bool:
    """pass@k of the evaluations during training, with 95 % intervals."""
    ks = sorted({int(match[1]) for record in run.records for key in record if (match := _PASS_AT.fullmatch(key))})
    others = [color for color in CYCLE if color != ORANGE]
    for name, label, color in [
        ("pass_rate", "pass@1", ORANGE),
        *((f"pass_at_{k}", f"pass@{k}", others[i % len(others)]) for i, k in enumerate(ks)),
    ]:
        steps, values = run.series(f"eval/{name}/mean")
        low, high = (run.values(f"eval/{name}_{end}/mean") for end in ("low", "high"))
        if len(low) == len(high) == len(values):
            axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
        axes.plot(steps, values, "o-", color=color, markersize=4, label=label)
    axes.set_ylim(-0.02, 1.06)
    finish(axes, "Held-out problems: at least one of k completions passes")
    return bool(ks)


def draw_validation(axes: Axes, run: RunData) -> bool:
    """Losses of supervised jobs on training and held-out rows."""
    if has_validation := bool(run.values("eval/loss/mean")):
        curve(axes, *run.series("train/loss/mean"), color=GREY, label="training")
        axes.plot(*run.series("eval/loss/mean"), "o-", color=PURPLE, markersize=4, label="held out")
        finish(axes, "Loss on held-out rows", y="nats")
    return has_validation


def draw_warm_start(axes: Axes, run: RunData) -> bool:
    key = "loss/nll/mean" if run.warm_start.values("loss/nll/mean") else "train/loss/mean"
    curve(axes, *run.warm_start.series(key), color=PURPLE, label="negative log-likelihood")
    axes.set_ylim(bottom=0)
    finish(axes, "Supervised warm start", y="nats per token", legend=False)
    return bool(axes.lines)


def draw_warm_start_pass_rate(axes: Axes, run: RunData) -> bool:
    """Expected pass rate of the warm start, and the value at which it stops."""
    curve(axes, *run.warm_start.series("sft/expected_pass_rate/mean"), color=PURPLE, label="expected pass rate")
    target = run.config.get("warm_start", {}).get("stop_pass_rate")
    if target:
        axes.axhline(target, color=GREY, linestyle=":", linewidth=1.2, label="stops here")
    axes.set_ylim(0, 1.05)
    finish(axes, "Supervised warm start: expected pass rate")
    return bool(run.warm_start.values("sft/expected_pass_rate/mean"))


# Sentences that stand for plots of zeros alone, with the metrics of each plot.
_OF_ZEROS: dict[Draw, tuple[str, tuple[str, ...]]] = {
    draw_problem_share: (
        "Each group had different rewards, and no completion was truncated or without a score.",
        ("reward/zero_variance/mean", "rollout/truncated/mean", "reward/failed/mean"),
    ),
    draw_kl: ("The KL divergence within a step was 0.", ("loss/kl_update/mean", "loss/kl_ref/mean")),
    draw_clipping: (
        "No token was clipped.",
        tuple(f"loss/clip_fraction_{bound}/mean" for bound in ("low", "high", "dual")),
    ),
}


def sentence_for_zeros(draw: Draw, run: RunData) -> str:
    """What a report says instead of a plot without a value other than 0; empty if the plot has one."""
    sentence, keys = _OF_ZEROS.get(draw, ("", ()))
    values = [value for key in keys for value in run.values(key)]
    return sentence if keys and run.values(keys[0]) and not any(values) else ""


AGREEMENT = "Agreement of trainer and engine"
SECTIONS: dict[str, tuple[Draw, ...]] = {
    "Learning": (
        draw_reward,
        draw_entropy,
        draw_lengths,
        draw_problem_share,
        draw_environments,
        draw_reward_parts,
        draw_pass_at_k_by_step,
        draw_validation,
        draw_warm_start,
        draw_warm_start_pass_rate,
    ),
    AGREEMENT: (draw_mismatch, draw_positions, draw_weight_health, draw_weight_range),
    "Optimization": (draw_loss, draw_grad_norm, draw_kl, draw_clipping),
    "Time": (draw_start, draw_phase_times, draw_tokens_per_s, draw_publish),
}
# The first six of these that have data.
OVERVIEW = (draw_reward, draw_mismatch, draw_phase_times, draw_entropy, draw_weight_range, draw_positions)
OVERVIEW += (draw_lengths, draw_grad_norm, draw_problem_share)


def make_figure(draw: Draw, run: RunData) -> Figure | None:
    """A figure with one plot; None if the run has no data for it."""
    figure = new_figure()
    return figure if draw(figure.subplots(), run) else None


def overview(run: RunData) -> Figure:
    """A figure with up to six plots."""
    draws = [draw for draw in OVERVIEW if make_figure(draw, run) is not None][:6]
    figure = new_figure(14.0, 7.4 if len(draws) > 3 else 3.9)
    for i, draw in enumerate(draws):
        draw(figure.add_subplot(1 + (len(draws) > 3), 3, i + 1), run)
    model, precision = run.config.get("model", {}), run.config.get("precision", {})
    title = run.config.get("name", run.run_dir.name)
    if model:
        title += f"   ·   {model['family']}, training {precision['trainer']}, rollouts {precision['rollout']}"
    if run.is_exact:
        title += "   ·   trainer and engine agree on every token"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure
