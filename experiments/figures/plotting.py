"""Charts by matplotlib, the one file that knows it: PNG and SVG, readable on light and dark.

A figure is made by hand, without pyplot, so that nothing is kept between figures and no display is
asked for. The same figure is the same file to the byte, whenever it is drawn.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from experiments.studies.statistics import Estimate

# Told apart by those who see no red or green too (Okabe and Ito, 2008), on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f7fc1", "#d9710f", "#1f9e77", "#b565a7", "#808890"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, GREY)
# Stands for the colour of the text around a picture, where there is text around it.
_INK = "#4a545e"
_SIZE = (4.3, 3.1)  # inches
_TICKS = 8
_FEW_DOUBLINGS = 8  # highest over lowest
_DPI = 100
_TITLE_LETTERS = 56  # of a line
_TITLE_LINE = 0.17  # inches

Drawing = Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart under a name that is its file's; `title` is for those who hear it read."""

    name: str
    heading: str
    title: str
    svg: str
    png: bytes

    @property
    def inline(self) -> str:
        """The SVG as part of a page: in the page's colours, its ids its own."""
        body = self.svg[self.svg.index("<svg") :].replace(_INK, "currentColor")
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        # The page says how wide it is.
        body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
        body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
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
    """One chart, or several of them in rows of two that share their labels' scale."""
    drawings = [draw] if callable(draw) else list(draw)
    columns = min(2, len(drawings))
    rows = -(-len(drawings) // columns)
    with matplotlib.rc_context(_style(name)):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        FigureCanvasAgg(figure)
        cells = figure.subplots(rows, columns, squeeze=False).ravel()
        for each, axes in zip(drawings, cells, strict=False):
            each(axes)
        for axes in cells[len(drawings) :]:
            axes.set_axis_off()
        _legend(figure, cells[0])
        svg = _svg(figure, title)
        # A file of its own has no caption around it, and needs room for one.
        lines = textwrap.wrap(title, _TITLE_LETTERS)
        figure.set_figheight(height + _TITLE_LINE * len(lines))
        figure.suptitle("\n".join(lines), fontsize=9)
        return Picture(name, heading, title, svg, _png(figure, title))


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the chart, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 2 if max(map(len, labels)) > 14 or len(labels) < 3 else 3
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def band(
    axes: Axes,
    x: Sequence[float],
    estimates: Sequence[Estimate],
    label: str,
    color: str,
    dashed: bool = False,
) -> None:
    """A line, and its interval shaded."""
    axes.plot(x, [e.value for e in estimates], "o--" if dashed else "o-", color=color, label=label)
    axes.fill_between(
        x,
        [e.low for e in estimates],
        [e.high for e in estimates],
        color=color,
        alpha=0.18,
        linewidth=0,
    )


def log2_axis(axes: Axes, label: str, values: Sequence[float] = ()) -> None:
    """Doublings across, written out; of `values`, if there are, as many as there is room for."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    if values:
        axes.set_xticks(values[:: -(-len(values) // _TICKS)])
    else:
        axes.xaxis.set_major_locator(_locator(*axes.get_xlim()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def log_axis_up(axes: Axes, label: str) -> None:
    """Doublings upwards; what is drawn must be there already."""
    axes.set_yscale("log", base=2)
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(_locator(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def least_span_up(axes: Axes, span: float) -> None:
    """At least so much from bottom to top, around what is drawn already."""
    low, high = axes.get_ylim()
    missing = max(0.0, span - (high - low)) / 2
    axes.set_ylim(low - missing, high + missing)


def _locator(low: float, high: float) -> LogLocator:
    """Doublings alone would leave a short axis with one number."""
    subs = (1.0, 1.5) if high < _FEW_DOUBLINGS * low else (1.0,)
    return LogLocator(base=2, subs=subs, numticks=_TICKS)


def short(value: float) -> str:
    """A number for an axis: 0.5, 16, 2k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1e3:.3g}k"
    return f"{value:.4g}"


def _style(name: str) -> Any:
    """Settings of matplotlib, whose names are too many for a type."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
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
        # Numbers are to be read where they stand, not added to one above the axis.
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


def _svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": title}, dpi=_DPI)
    return out.getvalue()


def _png(figure: Figure, title: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Title": title, "Software": None}
    # By itself a picture lies on anything: on white it is sure to be read.
    figure.savefig(out, format="png", dpi=_DPI, metadata=metadata, facecolor="white")
    return out.getvalue()
