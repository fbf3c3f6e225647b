"""Arguments and the result line of all benchmarks."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from benchmarks.harness import parse_arguments, report


@pytest.mark.parametrize("given", ["--n 0", "--n 4 -1", "--alpha nan", "--alpha 0"])
def test_numbers_of_options_are_above_zero(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards minutes of measurements that end in a division by zero."""
    monkeypatch.setattr("sys.argv", ["bench", *given.split()])
    with pytest.raises(SystemExit):
        parse_arguments(None, n=([16], ""), alpha=(0.5, ""))
    assert "must be above 0" in capsys.readouterr().err


def test_last_line_is_one_json_object_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report("speeds", ("engine", "tokens/s"), [("ours", 7)], {"ours": 7}, notes=["a note"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["ours"] == 7
    assert result["cores"] >= 1
    assert result["date"] == f"{datetime.now(UTC):%Y-%m-%d}"
    assert lines[-2] == "a note"
    assert any("ours" in line and "7" in line for line in lines[:-2])
