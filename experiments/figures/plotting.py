"""Charts by matplotlib as SVG, readable on light and dark backgrounds.

Figures are created without pyplot, which would keep state and need a display. Equal figures give
files that are equal byte by byte.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from experiments.studies.statistics import Estimate

# Distinguishable with red-green blindness (Okabe and Ito, 2008), on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f7fc1", "#d9710f", "#1f9e77", "#b565a7", "#808890"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_INK = "#4a545e"  # replaced by the colour of the surrounding text in a page
_SIZE = (4.3, 3.1)  # inches
_TICKS = 8
_FEW_DOUBLINGS = 8  # highest over lowest value of an axis
_DPI = 100
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    # An offset above the axis would have to be added to every label by the reader.
    "axes.formatter.useoffset": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

Drawing = Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart. `name` is its file's name; `title` describes it for screen readers."""

    name: str
    heading: str
    title: str
    svg: str

    @property
    def inline(self) -> str:
        """The SVG as part of a page: in the page's colours, with ids unique to this picture."""
        body = self.svg[self.svg.index("<svg") :].replace(_INK, "currentColor")
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        for attribute in ("width", "height"):  # set by the page's style
            body = re.sub(rf'(<svg[^>]*?) {attribute}="[^"]*"', r"\1", body, count=1)
        body = body.replace('id="', f'id="{self.name}-').replace('href="#', f'href="#{self.name}-')
        body = body.replace("url(#", f"url(#{self.name}-")
        return body.replace("<svg", '<svg class="plot" role="img"', 1)


def picture(
    name: str,
    heading: str,
    title: str,
    draw: Drawing | Sequence[Drawing],
    height: float = _SIZE[1],
) -> Picture:
    """One chart, or several in rows of two. `height` is in inches."""
    drawings = [draw] if callable(draw) else list(draw)
    columns = min(2, len(drawings))
    rows = -(-len(drawings) // columns)
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        cells = figure.subplots(rows, columns, squeeze=False).ravel()
        for drawing, axes in zip(drawings, cells, strict=False):
            drawing(axes)
        for axes in cells[len(drawings) :]:
            axes.set_axis_off()
        handles, labels = cells[0].get_legend_handles_labels()
        if labels:  # below the chart, where the legend hides nothing
            num_columns = 2 if max(map(len, labels)) > 14 or len(labels) < 3 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Title": title}, dpi=_DPI)
    return Picture(name, heading, title, svg.getvalue())


def band(
    axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], label: str, color: str
) -> None:
    """A line with its interval shaded."""
    axes.plot(x, [estimate.value for estimate in estimates], "o-", color=color, label=label)
    low, high = [estimate.low for estimate in estimates], [estimate.high for estimate in estimates]
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def log2_axis(axes: Axes, label: str, values: Sequence[float] = ()) -> None:
    """A horizontal axis in doublings; ticks at some of `values` if given."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    if values:
        axes.set_xticks(values[:: -(-len(values) // _TICKS)])
    else:
        axes.xaxis.set_major_locator(_locator(*axes.get_xlim()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def log_axis_up(axes: Axes, label: str) -> None:
    """A vertical axis in doublings; call it after drawing, since it reads the axis' limits."""
    axes.set_yscale("log", base=2)
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(_locator(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def least_span_up(axes: Axes, span: float) -> None:
    """Extend the vertical axis to at least `span`, around what is drawn already."""
    low, high = axes.get_ylim()
    missing = max(0.0, span - (high - low)) / 2
    axes.set_ylim(low - missing, high + missing)


def _locator(low: float, high: float) -> LogLocator:
    """With doublings alone, a short axis would have one label."""
    subs = (1.0, 1.5) if high < _FEW_DOUBLINGS * low else (1.0,)
    return LogLocator(base=2, subs=subs, numticks=_TICKS)


def short(value: float) -> str:
    """A number for an axis: 0.5, 16, 16.4k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}"
