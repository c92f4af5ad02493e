"""Terminal progress of a run, on the writing trainer rank: a live panel, plain lines, or nothing."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Literal

from megatron_fp8rl.observe import spans
from megatron_fp8rl.observe.metrics import PHASES

_BARS = "▁▂▃▄▅▆▇█"
# Seconds between two plain lines: 1, growing to 10 over the first 100 minutes. A log gets below 10,000 lines a day.
_MIN_INTERVAL_S, _MAX_INTERVAL_S, _INTERVALS_OF_RUN = 1.0, 10.0, 600
_PASS_RATE, _EVAL_REWARD = "eval/pass_rate/mean", "eval/score/mean"
_MISMATCH = "mismatch/abs_logprob_diff/mean"
_CURVES = {"reward/score/mean": "reward", _MISMATCH: "mismatch", _PASS_RATE: "pass rate", _EVAL_REWARD: "eval reward"}
_RECENT_STEPS = 20  # in the estimate of the remaining time
_LONG_PHASE_S = 10.0  # the panel names a phase that takes longer


def make_display(kind: Literal["live", "plain", "none"], title: str, num_steps: int) -> Display:
    """Create a display; "live" falls back to "plain" if stdout is no terminal that can move its cursor."""
    if kind == "none":
        return Display()
    if kind == "live" and sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
        return LiveDisplay(title, num_steps)
    return PlainDisplay(title, num_steps)


class Display:
    """Shows only warnings, on stderr."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)


class PlainDisplay(Display):
    """One line per step, for log files. Quick steps are left out, except evaluations and the last step."""

    def __init__(self, title: str, num_steps: int) -> None:
        self._title, self._num_steps = title, num_steps
        self._shown_at = float("-inf")
        self._pace = _Pace(num_steps)

    def start(self) -> None:
        self._pace.start()

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.count(step)
        interval_s = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, self._pace.elapsed_s() / _INTERVALS_OF_RUN))
        is_kept = step >= self._num_steps or any(key.startswith("eval/") for key in metrics)
        if monotonic() - self._shown_at < interval_s and not is_kept:
            return
        self._shown_at = monotonic()
        parts = [f"{self._title} {step}/{self._num_steps}", *headline(metrics)]
        parts += phase_times(metrics)
        if (left := self._pace.left_s()) is not None:
            parts.append(f"{duration(left)} left")
        print("  ".join(parts), flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


class LiveDisplay(Display):
    """A panel that stays at the bottom of the terminal; other output scrolls above it."""

    def __init__(self, title: str, num_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title, self._num_steps = title, num_steps
        self._console = Console()
        self._pace = _Pace(num_steps)
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._curves: dict[str, list[float]] = {}
        # The panel refreshes between steps, so that its clock keeps running during a long step.
        how = {"refresh_per_second": 2, "redirect_stderr": sys.stderr.isatty()}
        self._live = Live(get_renderable=self._panel, console=self._console, **how)

    def start(self) -> None:
        self._pace.start()
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.count(step)
        self._step, self._metrics = step, metrics
        for key, label in _CURVES.items():
            if key in metrics and not (key == _EVAL_REWARD and _PASS_RATE in metrics):
                self._curves.setdefault(label, []).append(metrics[key])
        self._live.refresh()

    def message(self, text: str) -> None:
        # The terminal wraps, so that a path that is copied has no line ends in it.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="bold yellow", markup=False, highlight=False, soft_wrap=True)

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        left = self._pace.left_s()
        clock = duration(self._pace.elapsed_s()) + (f", {duration(left)} left" if left is not None else "")
        bar = ProgressBar(total=max(1, self._num_steps), completed=self._step)
        table.add_row(f"step {self._step}/{self._num_steps}", bar, clock)
        for label, values in self._curves.items():
            curve = _Fitted(partial(sparkline, values, low=0.0))
            table.add_row(label, curve, _number("{:.2e}" if label == "mismatch" else "{:.3f}", values[-1]))
        seconds = f"{self._metrics.get('time/step/s', 0.0):.2f} s"
        rest = headline(self._metrics, skip=("reward", "mismatch", "eval"))
        for label, items, value in (("seconds", phase_times(self._metrics), seconds), ("", rest, "")):
            if items:
                table.add_row(label, _Fitted(partial(wrapped, items)), value)
        if (phase := spans.current()) is not None and phase[1] >= _LONG_PHASE_S:
            table.add_row("now", phase[0].removeprefix("start_"), duration(phase[1]))
        return Panel(table, title=self._title, title_align="left", border_style="cyan")


@dataclass(frozen=True)
class _Fitted:
    """What rich draws as ``text(width=W)``, with W the width of its cell."""

    text: Callable[..., str]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield Text(self.text(width=options.max_width))


class _Pace:
    """Time since the start, and the remaining time from the lower median of recent steps. A step that compiles kernels
    does not change the median."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._start = monotonic()
        self._last: tuple[int, float] | None = None  # last finished step, and when
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def start(self) -> None:
        self._start = monotonic()

    def count(self, step: int) -> None:
        now = monotonic()
        if self._last is not None and step > self._last[0]:  # the first step starts engines and compiles kernels
            self._step_s.append((now - self._last[1]) / (step - self._last[0]))
        self._last = step, now

    def elapsed_s(self) -> float:
        return monotonic() - self._start

    def left_s(self) -> float | None:
        if self._last is None or not self._step_s:
            return None
        step, at = self._last
        return max(0.0, statistics.median_low(self._step_s) * (self._num_steps - step) - (monotonic() - at))


def headline(metrics: Mapping[str, float], skip: tuple[str, ...] = ()) -> list[str]:
    shown = (
        ("reward", "reward/score/mean", "reward {:.3f}"),
        ("eval", _PASS_RATE, "eval pass rate {:.3f}"),
        ("eval", "" if _PASS_RATE in metrics else _EVAL_REWARD, "eval reward {:.3f}"),
        ("nll", "loss/nll/mean", "nll {:.3f}"),
        ("mismatch", _MISMATCH, "mismatch {:.2e}"),
        ("length", "rollout/length/mean", "length {:.1f}"),
        ("grad", "train/grad_norm/max", "grad norm {:.3g}"),
        ("tokens", "rollout/tokens_per_s/mean", "{:.0f} tokens/s sampled"),
    )
    return [_number(text, metrics[key]) for name, key, text in shown if name not in skip and key in metrics]


def phase_times(metrics: Mapping[str, float]) -> list[str]:
    """``rollouts 0.50``: seconds of each phase of a step."""
    times = ((phase, metrics.get(f"time/{phase}/s", 0.0)) for phase in PHASES)
    return [f"{phase} {seconds:.2f}" for phase, seconds in times if seconds >= 0.005]


def _number(text: str, value: float) -> str:
    return (text if value else text.replace(".2e", ".0f")).format(value)  # no 0.00e+00


def wrapped(items: Sequence[str], width: int) -> str:
    """The items in lines of at most ``width`` characters; no item is broken in two."""
    joined = "  ".join(item.replace(" ", "\xa0") for item in items)
    return textwrap.fill(joined, max(1, width), break_on_hyphens=False).replace("\xa0", " ")


def sparkline(values: list[float], *, width: int = 60, low: float | None = None) -> str:
    """A row of at most ``width`` bars; each bar averages neighboring values. NaN becomes a blank."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    bottom = min(finite) if low is None else min(low, *finite)
    span = (max(finite) - bottom) or 1.0
    return "".join(
        _BARS[min(len(_BARS) - 1, int((value - bottom) / span * len(_BARS)))] if value in finite else " "
        for value in values
    )


def interval_text(estimate: Mapping[str, float]) -> str:
    """``0.412 [0.330, 0.500]``: a value and its interval, from {"value", "low", "high"}."""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table. Columns in ``right`` are aligned right, the others left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return ["  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def duration(seconds: float) -> str:
    """``75`` -> ``1m 15s``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"
