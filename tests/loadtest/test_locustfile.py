"""Locust itself, headless, against real processes with toys behind them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from specrej.stack import Stack

TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}
LOCUST = str(Path(sys.executable).parent / "locust")


async def _locust(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        LOCUST,
        "-f",
        "loadtest/locustfile.py",
        *("--headless", "--users", "3", "--spawn-rate", "3", "--run-time", "3s", "--json"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.parametrize("flag", ["", "--best-of-n", "--cached"])
async def test_users_get_answers(flag: str) -> None:
    """Guards against a load test that measures failures, or nothing at all."""
    async with Stack(environment=TOYS) as stack:
        code, out, err = await _locust("--host", stack.orchestrator_address, *filter(None, [flag]))
    assert code == 0, err
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["generate"]["num_requests"] > 0
    assert sum(row["num_failures"] for row in rows.values()) == 0
    assert ("between rounds" in rows) == (flag != "--best-of-n")


async def test_failures_set_the_exit_code() -> None:
    """A load test against nothing must not look like a success."""
    code, _, _ = await _locust("--host", "127.0.0.1:1", "--request-timeout", "1")
    assert code == 1
