"""A result as rows: Markdown for readers, CSV and JSON for programs. Knows no study."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from experiments.studies.statistics import Estimate

Cell = str | int | float | Estimate


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings. `name` is a file's and an element's."""

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Result(Protocol):
    """What a study returns: a dataclass that knows its tables."""

    def tables(self) -> tuple[Table, ...]:
        """All there is to read."""


def shown(cell: Cell) -> str:
    """As a reader sees it: three digits, an interval in brackets, nothing for NaN."""
    if isinstance(cell, Estimate):
        if math.isnan(cell.value) or math.isnan(cell.low):
            return shown(cell.value)
        return f"{shown(cell.value)} ({shown(cell.low)} to {shown(cell.high)})"
    if isinstance(cell, float):
        return _number(cell)
    return f"{cell:,}" if isinstance(cell, int) else cell


def _number(value: float) -> str:
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "beyond" if value > 0 else "-beyond"
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    # Not "-0".
    return f"{value + 0.0:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def known(table: Table) -> Table:
    """Without columns in which nothing is known."""
    if not table.rows:
        return table
    kept = [
        i for i in range(len(table.headings)) if not all(_is_unknown(row[i]) for row in table.rows)
    ]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, headings=tuple(table.headings[i] for i in kept), rows=rows)


def _is_unknown(cell: Cell) -> bool:
    value = cell.value if isinstance(cell, Estimate) else cell
    return isinstance(value, float) and math.isnan(value)


def to_markdown(table: Table) -> str:
    """With its caption above."""
    table = known(table)
    lines = [f"**{table.caption}**", "", _line(table.headings)]
    lines.append(_line("---" if i == 0 else "---:" for i in range(len(table.headings))))
    lines += [_line(map(shown, row)) for row in table.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def to_csv(table: Table) -> str:
    """All digits; an estimate is three columns."""
    table = known(table)
    wide = [any(isinstance(row[i], Estimate) for row in table.rows) for i in range(_width(table))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headings: list[str] = []
    for heading, is_wide in zip(table.headings, wide, strict=True):
        headings += [heading, f"{heading}, low", f"{heading}, high"] if is_wide else [heading]
    writer.writerow(headings)
    for row in table.rows:
        cells: list[Any] = []
        for cell, is_wide in zip(row, wide, strict=True):
            cells += _three(cell) if is_wide else [cell]
        writer.writerow(_plain(cell) for cell in cells)
    return out.getvalue()


def _width(table: Table) -> int:
    return len(table.headings)


def _three(cell: Cell) -> list[Any]:
    return [cell.value, cell.low, cell.high] if isinstance(cell, Estimate) else [cell, "", ""]


def _plain(cell: Any) -> Any:
    return "" if isinstance(cell, float) and math.isnan(cell) else cell


def to_json(value: Any) -> Any:
    """A result as JSON has it: NaN is null, infinity the text "beyond"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("beyond" if value > 0 else "-beyond")
    return value
