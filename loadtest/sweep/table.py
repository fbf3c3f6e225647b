"""What a sweep prints."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from loadtest.sweep.figures import Cell
from loadtest.sweep.plan import Condition
from loadtest.sweep.plots import NAMES
from loadtest.sweep.results import Results


def print_table(results: Results) -> None:
    """Every cell in a line; the page has more."""
    table = Table(title="latency against N")
    for heading in ("condition", "algorithm", "N", "requests", "p50 s", "p95 s"):
        table.add_column(heading)
    for heading in ("first round s", "tokens", "reward", "good/s", "in time"):
        table.add_column(heading)
    for condition in Condition:
        for cell in results.cells:
            if cell.condition == condition.value:
                table.add_row(*_row(cell))
        table.add_section()
    Console(width=130).print(table)


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.condition,
        NAMES[cell.algorithm],
        str(cell.n),
        str(cell.num_requests),
        _number(cell.p50.value),
        _number(cell.p95.value),
        _number(cell.first_round.value),
        _number(cell.tokens.value),
        _number(cell.reward.value),
        _number(cell.goodput_per_s),
        f"{cell.good_share.value:.0%}",
    )


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "never" if math.isinf(value) else ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
