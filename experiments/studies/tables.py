"""Results as tables: Markdown for readers, CSV and JSON for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from experiments.studies.statistics import Estimate

Cell = str | int | float | Estimate


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings. `name` is used for files and HTML ids."""

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, name: str, caption: str, items: Iterable[Any], columns: Mapping[str, Any]) -> Table:
        """A row per item; `columns` maps each heading to an attribute's path or a function."""
        values = [attrgetter(get) if isinstance(get, str) else get for get in columns.values()]
        rows = tuple(tuple(value(item) for value in values) for item in items)
        return cls(name, caption, tuple(columns), rows)

    def without_empty_columns(self) -> Table:
        """Without the columns in which every row is NaN."""
        if not self.rows:
            return self
        used = [i for i, get in enumerate(zip(*self.rows, strict=True)) if not _is_nan(get)]
        rows = tuple(tuple(row[i] for i in used) for row in self.rows)
        return replace(self, headings=tuple(self.headings[i] for i in used), rows=rows)


class Result(Protocol):
    def tables(self) -> tuple[Table, ...]:
        """The result as tables."""


def _is_nan(cells: Iterable[Cell]) -> bool:
    values = (cell.value if isinstance(cell, Estimate) else cell for cell in cells)
    return all(isinstance(value, float) and math.isnan(value) for value in values)


def shown(cell: Cell) -> str:
    """A cell as text: three digits, an interval in brackets, nothing for NaN."""
    if isinstance(cell, Estimate):
        if math.isnan(cell.value) or math.isnan(cell.low):
            return shown(cell.value)
        return f"{shown(cell.value)} ({shown(cell.low)} to {shown(cell.high)})"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    if math.isnan(cell):
        return ""
    if math.isinf(cell):
        return _infinite(cell)
    if 1000 <= abs(cell) < 1e6:
        return f"{cell:,.0f}"
    return f"{cell + 0.0:.3g}"  # adding 0.0 turns -0.0 into 0.0


def _infinite(value: float) -> str:
    return "beyond" if value > 0 else "-beyond"


def to_markdown(table: Table) -> str:
    """The table under its caption."""
    table = table.without_empty_columns()
    lines = [f"**{table.caption}**", "", _line(table.headings)]
    lines.append(_line("---" if i == 0 else "---:" for i in range(len(table.headings))))
    lines += [_line(map(shown, row)) for row in table.rows]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def to_csv(table: Table) -> str:
    """The table with all digits; an estimate takes three columns."""
    table = table.without_empty_columns()
    headings: list[str] = []
    columns: list[list[Any]] = []
    for i, heading in enumerate(table.headings):
        cells = [row[i] for row in table.rows]
        headings.append(heading)
        columns.append([cell.value if isinstance(cell, Estimate) else cell for cell in cells])
        if any(isinstance(cell, Estimate) for cell in cells):
            headings += [f"{heading}, low", f"{heading}, high"]
            columns += ([getattr(cell, end, math.nan) for cell in cells] for end in ("low", "high"))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for row in zip(*columns, strict=True):
        writer.writerow("" if _is_nan([cell]) else cell for cell in row)
    return out.getvalue()


def to_json(value: Any) -> Any:
    """A result as JSON values: NaN is null, infinity the text "beyond"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else _infinite(value)
    return value
