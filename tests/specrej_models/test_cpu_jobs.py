"""Where compiled code is kept."""

from __future__ import annotations

from pathlib import Path

from specrej_models.cpu.jobs import cache_folder


def test_code_is_kept_apart_for_each_text_that_goes_into_it(tmp_path: Path) -> None:
    """Guards against a kernel that goes on with an older form of what it calls."""
    called = tmp_path / "called.py"
    called.write_text("1")
    before = cache_folder(tmp_path, tmp_path)
    assert cache_folder(tmp_path, tmp_path) == before
    called.write_text("2")
    assert cache_folder(tmp_path, tmp_path) != before
