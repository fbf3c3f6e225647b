"""The report: one HTML page that needs no network, and the table on the terminal."""

from __future__ import annotations

import base64
import io
import math
from functools import partial
from pathlib import Path

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from loadtest.latency_vs_n.measure import Condition
from loadtest.latency_vs_n.results import FAST, FULL, Cell, Comparison, Results

_NAMES = {FAST.value: "Speculative Rejection", FULL.value: "Best-of-N"}
_COLORS = {FAST.value: "#0b62a4", FULL.value: "#c2500c"}
_TITLES = {
    Condition.ALONE: "One request at a time",
    Condition.STEADY: "At a fixed rate",
    Condition.SATURATED: "At saturation",
}
_HEADINGS = (
    *("condition", "algorithm", "N", "requests", "p50 s", "p90 s", "p95 s", "p99 s"),
    *("first round s", "tokens", "reward", "answers/s", "in time", "errors"),
)
_COMPARISON_HEADINGS = (
    *("Speculative Rejection's N", "Best-of-N's N", "pairs", "sooner", "latency, ratio"),
    *("tokens, ratio", "reward, difference"),
)


def write_page(results: Results, path: Path) -> None:
    """Write the whole page; figures are SVG in data URLs."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template("report.html.jinja").render(
        results=results,
        settings=results.settings,
        claim=_claim(results),
        figures=[(title, _data_url(figure)) for title, figure in _figures(results)],
        headings=_HEADINGS,
        rows=[_row(cell) for cell in results.cells],
        comparison_headings=_COMPARISON_HEADINGS,
        comparisons=[_comparison_row(comparison) for comparison in results.comparisons],
        num_late=sum(cell.num_late for cell in results.cells),
    )
    path.write_text(page + "\n", "utf-8")


def print_table(results: Results) -> None:
    """The page's table of figures, and its claim."""
    table = Table(*_HEADINGS, title="latency against N")
    for cell in results.cells:
        table.add_row(*_row(cell))
    Console(width=160).print(table)
    print(_claim(results))


def _claim(results: Results) -> str:
    claim = results.claim
    if claim is None:
        return "No request was answered by both algorithms at N and at 2 N."
    return (
        f"Speculative Rejection at N = {claim.n} took {claim.latency:.2f} times as long as "
        f"Best-of-N at N = {claim.best_of_n}, with one request at a time (ratio of medians; "
        f"sooner in {claim.num_faster} of {claim.num_pairs} pairs of equal prompt and seed), and "
        f"its mean reward was {claim.reward:+.3f} in comparison."
    )


def _row(cell: Cell) -> tuple[str, ...]:
    numbers = (cell.p50, cell.p90, cell.p95, cell.p99, cell.first_round, cell.tokens, cell.reward)
    return (
        cell.condition,
        _NAMES[cell.algorithm],
        str(cell.n),
        str(cell.num_requests),
        *map(_number, (*numbers, cell.answers_per_s)),
        f"{cell.in_time_share:.0%}",
        ", ".join(f"{count} {code}" for code, count in cell.errors.items()),
    )


def _comparison_row(row: Comparison) -> tuple[str, ...]:
    counts = map(str, (row.n, row.best_of_n, row.num_pairs, row.num_faster))
    return (*counts, _number(row.latency), _number(row.tokens), f"{row.reward:+.3f}")


def _number(value: float) -> str:
    """Three digits; an infinite latency is "never", NaN is empty."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "never"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _figures(results: Results) -> list[tuple[str, Figure]]:
    latencies = [
        (f"Latency: {title.lower()}", _against_n(results, condition, "seconds", "p50", "p95"))
        for condition, title in _TITLES.items()
    ]
    alone = partial(_against_n, results, Condition.ALONE)
    return [
        *latencies,
        ("First round, one request at a time", alone("seconds", "first_round")),
        ("Tokens, one request at a time", alone("tokens", "tokens")),
        ("Reward, one request at a time", alone("reward", "reward", scale="linear")),
    ]


def _against_n(
    results: Results, condition: Condition, unit: str, *fields: str, scale: str = "log"
) -> Figure:
    """One line per algorithm and field of `Cell`, at most two fields. Not finite: no point."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for algorithm, name in _NAMES.items():
        cells = [
            cell
            for cell in results.cells
            if (cell.condition, cell.algorithm) == (condition.value, algorithm)
        ]
        for field, style in zip(fields, ("-", "--"), strict=False):
            values = [(cell.n, getattr(cell, field)) for cell in cells]
            points = [(n, value) for n, value in values if math.isfinite(value)]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    marker="o",
                    markersize=4,
                    color=_COLORS[algorithm],
                    label=f"{name} {field}" if len(fields) > 1 else name,
                )
    axes.set_xscale("log", base=2)
    axes.set_xticks(results.settings.ns, map(str, results.settings.ns))
    axes.set(xlabel="N, candidates per request", ylabel=unit, yscale=scale)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(color="#e8ecf0")
    if axes.lines:
        axes.legend(fontsize=8)
    return figure


def _data_url(figure: Figure) -> str:
    """The figure as SVG; in documents of their own, so that their ids do not collide."""
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "specrej", "svg.fonttype": "path", "font.size": 9}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
