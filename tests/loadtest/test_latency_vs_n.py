"""`make latency-vs-n`, on toys."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from loadtest.latency_vs_n import read_latencies
from tests.programs import outcome_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.long
async def test_both_algorithms_at_each_n(toys: Stack, tmp_path: Path) -> None:
    small = ("--n", "1,4", "--step-seconds", "2", "--max-tokens", "16", "--out", str(tmp_path))
    command = (sys.executable, "-m", "loadtest.latency_vs_n")
    run = await outcome_of(*command, "--address", toys.orchestrator_address, *small)
    assert run.returncode == 0, run.stderr
    latencies = json.loads(run.stdout.splitlines()[-1])["ms"]
    assert {series: [*by_n] for series, by_n in latencies.items()} == {
        "best-of-n": ["1", "4"],
        "speculative-rejection": ["1", "4"],
    }
    assert all(0 < median <= p95 for by_n in latencies.values() for median, p95 in by_n.values())
    assert (tmp_path / "latency_vs_n.svg").exists()


async def test_rows_without_answers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    rows = [
        "Type,Name,Request Count,50%,95%",
        "answer,best-of-n acme n=4,3,10,20",
        "answer,best-of-n acme n=8,0,N/A,N/A",
        "first round,best-of-n acme n=4,3,1,2",
        ",Aggregated,3,10,20",
    ]
    path.write_text("\n".join(rows))
    assert read_latencies(path) == {"best-of-n acme": {4: (10.0, 20.0)}}
