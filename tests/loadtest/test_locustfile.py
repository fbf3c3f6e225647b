"""Locust itself, headless, against real processes with toys behind them."""

from __future__ import annotations

import asyncio
import socket
from datetime import datetime

import pytest

from specrej.stack import Stack
from tests.loadtest.commands import ended, locust, start_locust
from tests.loadtest.conftest import TOYS

pytestmark = pytest.mark.asyncio(loop_scope="session")

USERS = ("--users", "4", "--spawn-rate", "4", "--run-time", "2s")
FAST, FULL = "speculative-rejection n=16", "best-of-n n=16"


async def test_both_algorithms_and_both_kinds_of_users(toys: Stack) -> None:
    """Guards against a load test that measures failures, or nothing at all."""
    said = await locust(*USERS, "--algorithm", "both", "--host", toys.orchestrator_address)
    assert said.code == 0, said.err
    answers, first = said.rows("answer"), said.rows("first round")
    assert set(answers) == {FAST, FULL}
    for name, row in answers.items():
        assert row["num_requests"] > first[name]["num_requests"] > 0  # unary users see no rounds
        assert row["total_content_length"] > 0  # generated tokens
    assert set(said.rows("between rounds")) == {FAST}
    assert said.rows("failed") == {}


async def test_a_run_lasts_as_long_as_it_is_told_to(toys: Stack) -> None:
    """Guards against a clock that was last read before the imports: a second less, or more."""
    said = await locust(*USERS[:4], "--run-time", "3s", "--host", toys.orchestrator_address)
    told = {
        text: next(line[1:24] for line in said.err.splitlines() if text in line)
        for text in ("Run time limit set", "--run-time limit reached")
    }
    began, ended_at = (datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f") for at in told.values())
    assert (ended_at - began).total_seconds() > 2.9


async def test_one_kind_of_user(toys: Stack) -> None:
    """A class that is named is the only one."""
    said = await locust(*USERS, "--host", toys.orchestrator_address, "UnaryUser")
    assert said.rows("answer")
    assert not said.rows("first round")


async def test_the_cache_answers_what_comes_back(toys: Stack) -> None:
    """Guards against cached answers that are taken for generated ones, or never come."""
    said = await locust(*USERS, "--cache", "on", "--host", toys.orchestrator_address)
    assert said.code == 0, said.err
    cached = said.rows("cached answer")[FAST]
    assert cached["num_requests"] > 0
    assert cached["total_content_length"] == 0


async def test_steps_over_n(toys: Stack) -> None:
    """Every N has its turn, and the run ends with the last."""
    steps = ("--shape", "steps", "--n", "1,4", "--step-seconds", "1.5")
    said = await locust(*USERS[:2], *steps, "--host", toys.orchestrator_address)
    assert said.code == 0, said.err
    answers = said.rows("answer")
    assert set(answers) == {"speculative-rejection n=1", "speculative-rejection n=4"}


@pytest.mark.parametrize("shape", ["ramp", "spike"])
async def test_shapes(toys: Stack, shape: str) -> None:
    """They end by themselves, in time."""
    shaped = ("--users", "4", "--run-time", "4s", "--shape", shape)
    said = await locust(*shaped, "--host", toys.orchestrator_address)
    assert said.code == 0, said.err
    assert "4 users" in said.err
    assert "1 users" in said.err
    assert said.rows("answer")[FAST]["num_requests"] > 0


async def test_master_and_workers(toys: Stack) -> None:
    """Guards distributed mode: two workers' requests, rounds and tokens come together."""
    port = str(_free_port())
    options = ("--algorithm", "both", "--min-goodput", "0.1")
    master = await start_locust(
        *("--master", "--expect-workers", "2", "--master-bind-port", port),
        *(*USERS, *options, "--host", toys.orchestrator_address),
    )
    workers = [await start_locust("--worker", "--master-port", port) for _ in range(2)]
    said = await ended(master)
    ends = await asyncio.gather(*(ended(worker) for worker in workers))
    assert said.code == 0, said.err
    assert [end.code for end in ends] == [0, 0], ends
    assert set(said.rows("answer")) == {FAST, FULL}
    assert said.rows("first round")[FAST]["num_requests"] > 0
    assert "goodput" in said.err


async def test_several_processes(toys: Stack) -> None:
    """The same by --processes; and the limits are the master's to judge."""
    broken = ("--processes", "2", "--max-p95-ms", "1")
    said = await locust(*USERS, *broken, "--host", toys.orchestrator_address)
    assert said.code == 1
    assert "limit not kept: p95 ms" in said.err


async def test_open_loop(toys: Stack) -> None:
    """Arrivals go on while earlier ones wait; all are accounted for."""
    open_loop = (*USERS, "--rate", "4", "--max-late-ratio", "0.9", "--n", "4")
    said = await locust(*open_loop, "--host", toys.orchestrator_address, file="openloop")
    assert said.code == 0, said.err
    name = "speculative-rejection n=4"
    answered = said.rows("answer")[name]["num_requests"]
    assert answered > 0
    assert said.rows("first round")[name]["num_requests"] == answered
    assert "of those due)" in said.err


async def test_open_loop_counts_what_it_could_not_send(toys: Stack) -> None:
    """Guards against an open loop that closes quietly when the service is slow."""
    narrow = (*USERS, "--rate", "20", "--max-in-flight", "1", "--max-late-ratio", "0.01")
    said = await locust(*narrow, "--host", toys.orchestrator_address, file="openloop")
    assert said.code == 1
    assert said.rows("missed")
    assert "limit not kept: late ratio" in said.err


async def test_refusals_are_told_by_name() -> None:
    """One row for all of them, whatever their texts; tolerated only if told so."""
    limits = {"SPECREJ_ORCHESTRATOR_MAX_RUNNING": "1", "SPECREJ_ORCHESTRATOR_MAX_QUEUED": "0"}
    async with Stack(environment={**TOYS, **limits}) as stack:
        where = (*USERS, "--host", stack.orchestrator_address)
        strict = await locust(*where)
        tolerant = await locust(*where, "--max-failure-ratio", "0.99")
    assert strict.code == 1
    assert " RESOURCE_EXHAUSTED" in strict.err
    assert "limit not kept: failure ratio" in strict.err
    assert tolerant.code == 0, tolerant.err
    failed = tolerant.rows("failed")[FAST]
    assert failed["num_failures"] == failed["num_requests"] > 0
    assert tolerant.rows("answer")[FAST]["num_failures"] == 0


@pytest.mark.parametrize("file", ["locustfile", "openloop"])
async def test_nothing_there_is_a_failure(file: str) -> None:
    """A load test against nothing must not look like a success."""
    nothing = (*USERS, "--host", "127.0.0.1:1", "--request-timeout", "1")
    said = await locust(*nothing, file=file)
    assert said.code == 1
    assert "UNAVAILABLE" in said.err or "DEADLINE_EXCEEDED" in said.err


async def test_wrong_options_are_refused() -> None:
    """At once, by name."""
    said = await locust(*USERS, "--n", "1,two")
    assert said.code != 0
    assert "--n" in said.err


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])
