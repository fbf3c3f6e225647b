"""`make loadtest-report`, on toys."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from loadtest.bought import Bought, at_equal_reward
from loadtest.report import of_equal_reward, read_rows
from tests.programs import outcome_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
ONE = Bought("best-of-n", 1, 1, 9, 1.0, 2.0, 100.0, 0.5, 1.0)


@pytest.mark.long
async def test_the_report_has_both_algorithms(toys: Stack, tmp_path: Path) -> None:
    small = ("--n", "1", "4", "--users", "1", "3", "--users-n", "4", "--step-seconds", "2")
    command = (sys.executable, "-m", "loadtest.report", *small, "--out", str(tmp_path))
    run = await outcome_of(*command, "--alpha=.25", "--address", toys.orchestrator_address)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    both = {"best-of-n", "speculative-rejection"}
    assert {(row["algorithm"], row["n"]) for row in result["alone"]} == {
        (algorithm, n) for algorithm in both for n in (1, 4)
    }
    assert {(row["algorithm"], row["users"]) for row in result["loaded"]} == {
        (algorithm, users) for algorithm in both for users in (1, 3)
    }
    assert "report.svg" in (tmp_path / "report.html").read_text()


async def test_rows_without_answers_are_left_out(tmp_path: Path) -> None:
    """Guards against rewards in thousandths, and the tokens of another row."""
    path = tmp_path / "stats.csv"
    rows = [
        "Type,Name,Request Count,50%,95%,Average Response Time,Average Content Size,Requests/s",
        "answer,best-of-n n=4,3,1000,2000,1200,100,1.0",
        "reward x 1000,best-of-n n=4,3,510,700,500,100,1.0",
        "answer,best-of-n n=8,0,N/A,N/A,0,0,0",
        ",Aggregated,3,10,20,10,0,1",
    ]
    path.write_text("\n".join(rows))
    assert read_rows(path, 2) == [replace(ONE, n=4, users=2, answers=3)]


@pytest.mark.parametrize(
    ("reward", "cost"), [(0.5, (100, 1)), (0.6, (200, 2)), (0.2, (100, 1)), (0.9, (300, 3))]
)
async def test_costs_at_equal_reward_are_interpolated(
    reward: float, cost: tuple[float, float]
) -> None:
    others = [ONE, replace(ONE, n=4, tokens=300.0, median_s=3.0, reward=0.7)]
    assert at_equal_reward(replace(ONE, reward=reward), others) == pytest.approx(cost)


async def test_equal_rewards_need_an_answer_of_both_algorithms() -> None:
    """Guards against a failure of the program where a slow machine answers nothing in time."""
    ours = replace(ONE, algorithm="speculative-rejection", n=4, reward=0.6)
    others = [ONE, replace(ONE, n=8, reward=0.65), replace(ONE, n=2, reward=0.7)]
    assert of_equal_reward([*others, ours], 4) == [ours, others[1]]
    assert not of_equal_reward([*others, ours], 8)
    assert not of_equal_reward(others, 4)
    assert not of_equal_reward([ours], 4)
