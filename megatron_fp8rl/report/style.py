"""Common plot style: colors, lines and axes. Pure."""

import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe-Ito colors, which color-blind readers can distinguish.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#8A8F98"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "#6B5B95", GREY)

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": "#B8BDC6",
    "axes.labelcolor": "#4A4F58",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E8EAEE",
    "grid.linewidth": 0.8,
    "text.color": "#22262C",
    "xtick.color": "#6B717B",
    "ytick.color": "#6B717B",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",  # readable without the font
}
SMOOTH_OVER = 40  # curves with at least this many points are drawn faintly under their moving average


def styled() -> Any:
    return matplotlib.rc_context(_RC)


def new_figure(width: float = 6.4, height: float = 3.3) -> Figure:
    """A figure with its own canvas: no global pyplot state, no window, usable in any thread."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Axes, title: str, *, x: str = "step", y: str = "", legend: bool = True) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x == "step":
        low, high = axes.get_xlim()
        if high - low < 1:  # of one step
            axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    handles, labels = axes.get_legend_handles_labels()
    if legend and labels:
        axes.legend(handles, labels, loc="best")


def curve(
    axes: Axes, steps: Sequence[int], values: Sequence[float], *, color: str, label: str, line: str = "-"
) -> None:
    """Draw a curve; a long one as a faint line under a moving average over 1/20 of the run."""
    if not values:
        return
    if len(values) >= SMOOTH_OVER and axes.get_yscale() == "linear":
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1.0)
        values = moving_average(values, max(3, len(values) // 20))
    marker = "o" if len(values) == 1 else None
    axes.plot(steps, values, color=color, label=label, linestyle=line, marker=marker, markersize=4)


def moving_average(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and its neighbors, ``width`` values in total; fewer at both ends."""
    reach = width // 2
    return [sum(part) / len(part) for part in (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))]


def save_png(figure: Figure, path: Path) -> None:
    """Save a PNG; readers never see a partial file."""
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)


def svg_uri(figure: Figure) -> str:
    """The figure as an SVG data URI, which browsers show without a separate file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
