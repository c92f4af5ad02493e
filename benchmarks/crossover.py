"""From how many tokens on is one kind of kernels faster than another? Lines of a table, and the plot.

In: rows that were timed for one shape with several numbers of tokens, which ``--sweep`` of benchmarks/experts.py and
benchmarks/linears.py measures. A crossover is told in numbers of tokens that were measured: "from 2,048" says faster at
2,048 and at all larger ones, and not at the next smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.measured_rows import NOISE, is_bf16, span
from benchmarks.results import Row

SWEEP = tuple(128 * 4**power for power in range(6))  # 128 to 131,072
_MIN_COUNTS = 3  # numbers of tokens of one shape that make a sweep

Accepts = Callable[[str], bool]  # of an arm
Duel = tuple[str, Accepts, Accepts]  # what it is called, arms of the one and of the other side


@dataclass(frozen=True)
class Sweep:
    """Times of one shape: {tokens: {arm: milliseconds}}, tokens in ascending order."""

    fields: Mapping[str, Any]  # all that tells it from other sweeps
    ms: Mapping[int, Mapping[str, float]]


def fp8_against_bf16() -> Duel:
    return "FP8 pays", lambda arm: not is_bf16(arm), is_bf16


def one_against(arm: str, other: str) -> Duel:
    return f"{arm} before {other}", arm.__eq__, other.__eq__


def one_against_all(arm: str) -> Duel:
    return f"{arm} before all", arm.__eq__, arm.__ne__


def sweeps(rows: Sequence[Row], measured: str, names: Sequence[str]) -> list[Sweep]:
    """Rows of kind ``measured``, put together by the fields ``names``, those with enough numbers of tokens."""
    found: dict[tuple, dict[int, dict[str, float]]] = {}
    for row in rows:
        if row["measured"] == measured and "ms" in row:
            key = tuple(row[name] for name in names)
            found.setdefault(key, {}).setdefault(row["tokens"], {})[row["arm"]] = row["ms"]
    return [
        Sweep(dict(zip(names, key, strict=True)), dict(sorted(ms.items())))
        for key, ms in found.items()
        if len(ms) >= _MIN_COUNTS
    ]


def lines(found: Sequence[Sweep], duels: Sequence[Duel]) -> list[Row]:
    """One line per sweep: the tokens that were measured, and where each duel is won."""
    return [
        {**sweep.fields, "tokens": span(list(sweep.ms))} | {name: won(sweep, a, b) for name, a, b in duels}
        for sweep in found
    ]


def won(sweep: Sweep, one: Accepts, other: Accepts) -> str | None:
    """Where the fastest arm of one side is faster than that of the other; None where they were not both timed."""
    faster = {}
    for tokens, ms in sweep.ms.items():
        sides = [[time for arm, time in ms.items() if accepts(arm)] for accepts in (one, other)]
        if all(sides):
            faster[tokens] = min(sides[1]) > (1 + NOISE) * min(sides[0])
    if not faster:
        return None
    if len(set(faster.values())) == 1:
        return "everywhere" if faster[min(faster)] else "nowhere"
    runs = [[tokens for tokens, _ in run] for wins, run in groupby(faster.items(), key=lambda item: item[1]) if wins]
    return ", ".join(_run(run, first=min(faster), last=max(faster)) for run in runs)


def _run(tokens: list[int], first: int, last: int) -> str:
    if tokens[-1] == last:
        return f"from {tokens[0]:,}"
    return f"to {tokens[-1]:,}" if tokens[0] == first else span(tokens)


def told(line: Row) -> str:
    """A line of :func:`lines` in words."""
    return ", ".join(f"{name}: {value}" for name, value in line.items() if value is not None)


def plot(
    path: Path, title: str, bars: Sequence[tuple[str, Mapping[str, float]]], curves: Sequence[tuple[str, Sweep]],
    arms: Sequence[str], unit: str,
) -> None:  # fmt: skip
    """Speeds of all arms: bars over Transformer Engine's BF16, for each (name, milliseconds) that has it; below, for
    each (name, sweep) curves over the fastest BF16 arm. Writes nothing when there is neither."""
    from megatron_fp8rl.report import style

    bars = [(name, ms) for name, ms in bars if ms.get("te bf16")]
    heights = [0.6 + 0.75 * len(bars)] * bool(bars) + [3.0] * len(curves)
    if not heights:
        return
    with style.styled():
        figure = style.new_figure(11.0, 0.4 + sum(heights))
        all_axes = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
        colors = dict(zip(arms, style.CYCLE, strict=False))
        if bars:
            _bars(all_axes.pop(0), bars, colors)
        for axes, (name, sweep) in zip(all_axes, curves, strict=True):
            _curves(axes, name, sweep, colors, unit)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, bbox_inches="tight")


def _bars(axes: Any, bars: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str]) -> None:
    from megatron_fp8rl.report import style

    height = 0.8 / len(colors)
    for index, (arm, color) in enumerate(colors.items()):
        found = [(place, ms["te bf16"] / ms[arm]) for place, (_, ms) in enumerate(bars) if ms.get(arm)]
        if found:
            places = [place - 0.4 + (index + 0.5) * height for place, _ in found]
            axes.barh(places, [speed for _, speed in found], height, color=color, label=arm)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.axvline(1.0, color=style.GREY, linewidth=0.8)
    axes.invert_yaxis()
    style.finish(axes, "", x="speed, Transformer Engine in BF16 = 1", legend=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _curves(axes: Any, name: str, sweep: Sweep, colors: Mapping[str, str], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    from megatron_fp8rl.report import style

    best = {tokens: min(own) for tokens, ms in sweep.ms.items() if (own := [ms[arm] for arm in ms if is_bf16(arm)])}
    for arm, color in colors.items():
        points = [(tokens, best[tokens] / ms[arm]) for tokens, ms in sweep.ms.items() if arm in ms and tokens in best]
        if points:
            axes.plot(*zip(*points, strict=True), color=color, label=arm, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sweep.ms))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.axhline(1.0, color=style.GREY, linewidth=0.8)
    style.finish(axes, name, x=unit, y="speed, fastest BF16 = 1", legend=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
