"""Locust itself, headless, against real processes with toys behind them."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from deploy.local.processes import Processes
from deploy.local.stack import Ports, Stack
from tests.programs import Outcome, outcome_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

USERS = ("--users", "4", "--spawn-rate", "8", "--run-time", "1s")
FAST, FULL = "speculative-rejection n=16", "best-of-n n=16"


async def locust(*arguments: str) -> Outcome:
    """Run Locust without its browser page, to its end."""
    shared = ("-f", "loadtest/locustfile.py", "--headless", "--json", "--stop-timeout", "30")
    return await outcome_of(sys.executable, "-m", "locust", *shared, *arguments)


def rows(run: Outcome, kind: str) -> dict[str, Any]:
    """Locust's rows of that type, by name."""
    printed = json.loads(run.stdout)
    return {row["name"]: row for row in printed if row["method"] == kind}


async def test_both_algorithms(toys: Stack) -> None:
    """Guards against a load test that measures failures or nothing, and against gevent's clock of
    before the imports: a run that is a second too short."""
    longer = ("--run-time", "2s", "--algorithm", "both")
    run = await locust(*USERS, *longer, "--host", toys.orchestrator_address)
    assert run.returncode == 0, run.stderr
    answers = rows(run, "answer")
    assert set(answers) == {FAST, FULL}
    for row in answers.values():
        assert row["num_requests"] > 0 and row["total_content_length"] > 0  # generated tokens
    assert rows(run, "failed") == {}
    began, ended = (
        datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f")
        for text in ("Run time limit set", "--run-time limit reached")
        for line in run.stderr.splitlines()
        if text in line
    )
    assert (ended - began).total_seconds() > 1.9


@pytest.mark.long
async def test_calls_that_hang_are_unfinished() -> None:
    """Guards against a run that measures only the calls that end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = ("--host", f"127.0.0.1:{silent.getsockname()[1]}", "--stop-timeout", "1")
        run = await locust(*USERS, *where)
    assert run.returncode == 1
    assert "UNFINISHED" in run.stderr
    assert "CANCELLED" not in run.stderr  # each call counts once
    assert rows(run, "failed")[FAST]["num_failures"] >= 4


@pytest.mark.long
async def test_refusals_are_one_row_by_status_name(toys: Stack, tmp_path: Path) -> None:
    limits = {"SPECREJ_ORCHESTRATOR_MAX_RUNNING": "1", "SPECREJ_ORCHESTRATOR_MAX_QUEUED": "0"}
    backends = {name: getattr(toys.ports, name) for name in ("generator", "reward", "redis")}
    narrow = Stack(replace(Ports.free(), **backends), environment=limits)
    program = narrow._replica(narrow._orchestrators[0])
    async with Processes([program], tmp_path, start_timeout_s=60):
        where = ("--host", narrow.orchestrator_address)
        run = await locust(*USERS, *where)
    assert run.returncode == 1, run.stderr
    assert " RESOURCE_EXHAUSTED" in run.stderr
    failed = rows(run, "failed")[FAST]
    assert failed["num_failures"] == failed["num_requests"] > 0
    assert rows(run, "answer")[FAST]["num_failures"] == 0
