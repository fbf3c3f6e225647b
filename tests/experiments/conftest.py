"""The command on toys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from experiments.__main__ import main

TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "vowels", "kind": "toy"}]',
}
# Runs a command on toys; returns the JSON object in the last line of its output, {} without one.
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    for name, value in TOYS.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["experiments", *map(str, arguments)])
        main()
        last: dict[str, Any] = json.loads((capsys.readouterr().out.splitlines() or ["{}"])[-1])
        return last

    return run
