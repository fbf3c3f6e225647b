"""Reports without charts, for tests of their text."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.figures import plotting


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chart is an empty picture: drawing takes nearly all the time of a report."""

    def picture(name: str, heading: str, title: str, *_: Any, **__: Any) -> plotting.Picture:
        return plotting.Picture(name, heading, title, "<svg></svg>")

    monkeypatch.setattr(plotting, "picture", picture)
