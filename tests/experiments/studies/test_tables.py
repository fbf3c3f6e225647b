"""Results as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.studies.statistics import Estimate
from experiments.studies.tables import Cell, Table, known, shown, to_csv, to_json, to_markdown

TABLE = Table(
    "t",
    "A caption",
    ("what", "how | much"),
    (("a|b", Estimate(1.5, 1.0, 2.0)), ("c", Estimate(2.0)), ("d", math.nan)),
)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (1234, "1,234"),
        (0.12345, "0.123"),
        (12345.6, "12,346"),
        (1.2e7, "1.2e+07"),
        (-0.0, "0"),
        (math.nan, ""),
        (math.inf, "beyond"),
        ("x", "x"),
        (Estimate(1.5, 1.0, 2.0), "1.5 (1 to 2)"),
        (Estimate(1.5), "1.5"),
    ],
)
def test_what_readers_see(cell: Cell, text: str) -> None:
    assert shown(cell) == text


def test_markdown_keeps_its_columns() -> None:
    """Guards against a bar in a text that would begin a column."""
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == "**A caption**"
    assert [line.replace("\\|", "").count("|") for line in lines[2:]] == [3] * 5


def test_csv_has_all_digits_and_the_interval() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert rows[0] == ["what", "how | much", "how | much, low", "how | much, high"]
    assert rows[1:] == [["a|b", "1.5", "1.0", "2.0"], ["c", "2.0", "", ""], ["d", "", "", ""]]


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    """Others keep their gaps, and a table without rows its headings."""
    rows = (("a", math.nan, Estimate(math.nan), 1.0), ("b", math.nan, Estimate(math.nan), math.nan))
    table = Table("name", "A caption", ("what", "x", "y", "z"), rows)
    assert to_csv(table).splitlines() == ["what,z", "a,1.0", "b,"]
    assert "| what | z |" in to_markdown(table)
    assert known(replace(table, rows=())).headings == table.headings


def test_json_has_no_nan() -> None:
    """Guards against what strict readers of JSON refuse."""
    kept = to_json({"a": Estimate(math.inf, math.nan, 1.0), "b": np.array([1.5, math.nan])})
    assert kept == {"a": {"value": "beyond", "low": None, "high": 1.0}, "b": [1.5, None]}
    json.dumps(kept, allow_nan=False)
