"""The result line of all benchmarks."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from benchmarks.harness import report


def test_last_line_is_one_json_object_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report("speeds", ("engine", "tokens/s"), [("ours", 7)], {"ours": 7}, notes=["a note"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["ours"] == 7
    assert result["cores"] >= 1
    assert result["date"] == f"{datetime.now(UTC):%Y-%m-%d}"
    assert lines[-2] == "a note"
    assert any("ours" in line and "7" in line for line in lines[:-2])
