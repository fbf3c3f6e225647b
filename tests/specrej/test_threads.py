"""The environment of OpenMP's threads."""

from __future__ import annotations

import os

import pytest

from specrej import threads


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_idle_threads_sleep_unless_the_environment_differs(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spin_count: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    threads.bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count
