"""Charts by matplotlib as SVG, readable on light and dark backgrounds.

Figures are created without pyplot, which would keep state and need a display. Equal figures give
files that are equal byte by byte.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from experiments.statistics import Estimate

# Distinguishable with red-green blindness (Okabe and Ito, 2008), on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f7fc1", "#d9710f", "#1f9e77", "#b565a7", "#808890"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_INK = "#68727c"
_TICKS = 8
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    # An offset above the axis would have to be added to every label by the reader.
    "axes.formatter.useoffset": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def svg(name: str, title: str, draw: Callable[[Axes], None]) -> str:
    """One chart; `title` describes it for screen readers."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(4.3, 3.1), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:  # below the chart, where the legend hides nothing
            num_columns = 2 if max(map(len, labels)) > 14 or len(labels) < 3 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Title": title}, dpi=100)
    return text.getvalue()


def band(
    axes: Axes, x: Iterable[float], estimates: Iterable[Estimate], label: str, color: str
) -> None:
    """A line with its interval shaded."""
    at, rows = list(x), list(estimates)
    axes.plot(at, [row.value for row in rows], "o-", color=color, label=label)
    low, high = [row.low for row in rows], [row.high for row in rows]
    axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)


def log2_axis(axes: Axes, label: str, values: Iterable[float] = ()) -> None:
    """A horizontal axis in doublings; ticks at some of `values` if given."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    if ticks := list(values):
        axes.set_xticks(ticks[:: -(-len(ticks) // _TICKS)])
    else:
        axes.xaxis.set_major_locator(_locator(*axes.get_xlim()))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def log_axis_up(axes: Axes, label: str) -> None:
    """A vertical axis in doublings; call it after drawing, since it reads the axis' limits."""
    axes.set_yscale("log", base=2)
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(_locator(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def _locator(low: float, high: float) -> LogLocator:
    """With doublings alone, a short axis would have one label."""
    subs = (1.0, 1.5) if high < 8 * low else (1.0,)
    return LogLocator(base=2, subs=subs, numticks=_TICKS)
