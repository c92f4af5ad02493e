"""Plots of evaluations: pass@k during training and of checkpoints evaluated by the eval command.

In: a run's data. Out: filled axes; False if the run has no data for the plot.
"""

from __future__ import annotations

import re

from matplotlib.axes import Axes

from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.report.style import CYCLE, ORANGE, finish

_PASS_AT = re.compile(r"eval/pass_at_(\d+)/mean")


def draw_pass_at_k(axes: Axes, run: RunData) -> bool:
    """pass@k of the evaluated checkpoints over all problems, with 95 % intervals."""
    shown: set[int] = set()
    for number, one in enumerate(run.evaluations):
        points = [(int(k), estimate) for k, estimate in one["overall"]["pass_at"].items()]
        shown |= {k for k, _ in points}
        ks = [k * (1 + 0.02 * number) for k, _ in points]  # shift the markers apart
        color = CYCLE[number % len(CYCLE)]
        axes.vlines(ks, [e["low"] for _, e in points], [e["high"] for _, e in points], color=color, linewidth=1.2)
        axes.plot(ks, [e["value"] for _, e in points], "o-", color=color, markersize=4, label=one["name"])
    if not shown:
        return False
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(shown), [str(k) for k in sorted(shown)])
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.06)
    finish(axes, "pass@k on held-out problems", x="k, completions of a problem", y="chance that one passes")
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
    finish(axes, "Held-out problems: one of k completions passes")
    return bool(ks)
