"""The process: what it says and how it ends when it cannot start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from generator_service.__main__ import main


def test_a_missing_model_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It used to be a traceback of the event loop, below which the reason was lost."""
    monkeypatch.setattr(sys, "argv", ["generator", "--port", "0", "--model", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value.code).startswith(f"generator: no model in {tmp_path}")
