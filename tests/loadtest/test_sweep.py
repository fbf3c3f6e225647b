"""`make latency-vs-n` as a process, against real services with toys behind them."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.sweep.journal import Journal, Kept
from specrej.stack import Stack
from tests.loadtest.commands import Ended, ended, start_sweep

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL = ("--ns", "1", "4", "--repeats", "2", "--minutes", "0.1", "--max-tokens", "32")
FAST = ("--rate", "20", "--patience-s", "5", "--num-prompts", "2")
FILE = "latency_vs_n"


async def sweep(stack: Stack, out: Path, *more: str) -> Ended:
    """One from beginning to end."""
    where = ("--address", stack.orchestrator_address, "--out", str(out))
    return await ended(await start_sweep(*where, *SMALL, *FAST, *more))


def files(out: Path) -> list[Path]:
    return list(out.iterdir())


def journal(out: Path) -> Kept:
    kept = Journal(out / f"{FILE}.jsonl").read()
    assert kept
    return kept


async def test_everything_is_measured_and_written(toys: Stack, tmp_path: Path) -> None:
    """Guards the whole way, from requests to files."""
    said = await sweep(toys, tmp_path)
    assert said.code == 0, said.err
    told = json.loads(said.out.splitlines()[-1])
    assert told["whole"]
    assert told["blocks"] == 2 * 3 * 2 * 2  # repeats, conditions, algorithms, Ns
    whole: dict[str, Any] = json.loads((tmp_path / f"{FILE}.json").read_text())
    assert told["requests"] == whole["requests"] == sum(c["num_requests"] for c in whole["cells"])
    for cell in whole["cells"]:
        assert cell["codes"] == {"OK": cell["num_requests"]}
        median = cell["p50"]
        if cell["num_requests"] < 4:  # too few for an interval
            assert median["low"] is median["high"] is None
        else:
            assert 0 < median["low"] <= median["value"] <= median["high"]
        assert 0 < median["value"] <= cell["p90"] <= cell["p95"]["value"] <= cell["p99"]
        assert cell["tokens"]["value"] > 0
    with (tmp_path / f"{FILE}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(whole["cells"]) == 12
    assert len(whole["examples"]) == 2
    assert "left" in said.err
    assert (tmp_path / f"{FILE}.html").stat().st_size > 10_000


async def test_requests_are_paired_and_interleaved(toys: Stack, tmp_path: Path) -> None:
    """Guards a fair comparison: same prompts and seeds, and neighbours in time."""
    await sweep(toys, tmp_path)
    kept = journal(tmp_path)
    planned = kept.head["plan"]
    for one, other in zip(planned[::2], planned[1::2], strict=True):
        assert {one["algorithm"], other["algorithm"]} == {"speculative-rejection", "best-of-n"}
        assert [one[name] for name in ("n", "condition", "repeat", "num_requests")] == [
            other[name] for name in ("n", "condition", "repeat", "num_requests")
        ]
    for key, requests in kept.requests.items():
        twin = key.replace("speculative-rejection", "best-of-n")
        asked = sorted((each.prompt, each.seed) for each in requests)
        assert asked == sorted((each.prompt, each.seed) for each in kept.requests[twin])


async def test_a_sweep_that_was_killed_goes_on(toys: Stack, tmp_path: Path) -> None:
    """Guards against a kill that costs more than the block under way."""
    where = ("--address", toys.orchestrator_address, "--out", str(tmp_path))
    process = await start_sweep(*where, *SMALL, *FAST)
    path = tmp_path / f"{FILE}.jsonl"
    await until(lambda: path.exists() and path.read_text().count('"ends"') >= 3)
    process.kill()
    await process.communicate()
    before = journal(tmp_path)
    # As if the kill had torn a block in the middle of a line.
    with path.open("a") as file:
        file.write('{"block": "1/alone/best-of-n/4", "n": 4')
    said = await sweep(toys, tmp_path)
    assert said.code == 0, said.err
    after = journal(tmp_path)
    assert json.loads(said.out.splitlines()[-1])["whole"]
    assert after.head == before.head
    assert {key: after.requests[key] for key in before.requests} == before.requests
    assert all(len(after.requests[key]) == block["size"] for key, block in after.blocks.items())
    assert f"{24 - len(before.blocks)} of 24 blocks to do" in said.err


async def test_other_settings_are_not_mixed_in(toys: Stack, tmp_path: Path) -> None:
    assert (await sweep(toys, tmp_path)).code == 0
    said = await sweep(toys, tmp_path, "--max-tokens", "16")
    assert said.code == 1
    assert "other settings" in said.err
    assert (await sweep(toys, tmp_path, "--max-tokens", "16", "--report")).code == 0


async def test_what_the_service_cannot_do_is_said_at_once(toys: Stack, tmp_path: Path) -> None:
    said = await sweep(toys, tmp_path, "--ns", "1", "1000000")
    assert said.code == 1
    assert "candidates at most" in said.err
    assert files(tmp_path) == []


async def test_nothing_there(tmp_path: Path) -> None:
    nothing = await start_sweep("--address", "127.0.0.1:1", "--out", str(tmp_path))
    said = await ended(nothing)
    assert said.code == 1
    assert "latency-vs-n:" in said.err
    assert "Traceback" not in said.err


async def test_users_give_up_at_a_fixed_rate(toys: Stack, tmp_path: Path) -> None:
    """Guards against an open loop whose slow answers are left out: they count as unanswered."""
    said = await sweep(toys, tmp_path, "--patience-s", "0.02")
    assert said.code == 0, said.err
    steady = [
        cell
        for cell in json.loads((tmp_path / f"{FILE}.json").read_text())["cells"]
        if cell["condition"] == "steady"
    ]
    for cell in steady:
        assert cell["codes"] == {"GAVE_UP": cell["num_requests"]}
        assert cell["p50"]["value"] is None
        assert cell["goodput_per_s"] == 0


async def until(holds: Callable[[], bool]) -> None:
    """Another process's files have no event."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
