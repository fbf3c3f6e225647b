"""The tables that documents quote from result files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import tables


def test_stale_tables_are_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table: gpu -->\nold\n<!-- end of table -->\nb\n")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/README.md").write_text("nothing\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    with pytest.raises(SystemExit, match=r"stale tables in README\.md"):
        tables.main()
    assert "old" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["tables"])
    tables.main()
    assert "| 1,024 | 13,319 | 76.9 | 38.8 |" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    tables.main()
