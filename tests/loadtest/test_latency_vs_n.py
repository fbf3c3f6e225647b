"""`make latency-vs-n`: its figures, its page, and the command against real services with toys."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import math
import re
import signal
from asyncio.subprocess import Process
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.local.stack import Stack
from loadtest.latency_vs_n.measure import Block, Condition, Measured, Request, Settings, blocks
from loadtest.latency_vs_n.report import write_page
from loadtest.latency_vs_n.results import FAST, FULL, Cell, Results, collate, write_csv, write_json
from specrej.contracts import Algorithm
from tests.loadtest.commands import completed, latency_vs_n, start
from tests.loadtest.conftest import TOYS

SETTINGS = Settings(prompts=("Why?", "<b>How?</b>"), ns=(64, 128))
in_session = pytest.mark.asyncio(loop_scope="session")
# A repeated N is measured once.
SMALL = ("--quick", "--ns", "1", "4", "4", "--rate", "14", "--patience-s", "1.5")


def measured(
    algorithm: Algorithm,
    n: int,
    *seconds: float,
    condition: Condition = Condition.ALONE,
    late_s: float = 0.0,
) -> Measured:
    """A block with one request per latency; an infinite latency is a request without an answer."""
    requests = tuple(
        Request(number, "OK", late_s, s, s / 4, 10 * n, 0.5)
        if math.isfinite(s)
        else Request(number, "GAVE_UP", late_s, 12.0)
        for number, s in enumerate(seconds)
    )
    return Measured(Block(0, condition, algorithm, n), requests, wall_s=10.0)


def results(*of: Measured) -> Results:
    return collate(SETTINGS, {"processor": "an <abacus>"}, of)


def only_cell(*of: Measured) -> Cell:
    (cell,) = results(*of).cells
    return cell


def test_percentiles_count_failures_as_infinite() -> None:
    """Guards against a service that looks fast because its slow requests are left out."""
    cell = only_cell(measured(FULL, 64, 1.0, 12.0), measured(FULL, 64, 2.0, math.inf))
    assert (cell.p50, cell.p99) == (2.0, math.inf)
    assert (cell.num_requests, cell.errors) == (4, {"GAVE_UP": 1})
    assert cell.in_time_share == 0.5  # the SLO is 10 s
    assert cell.answers_per_s == 3 / 20
    assert cell.tokens == 640
    assert cell.first_round == pytest.approx(15 / 4 / 3)
    empty = only_cell(measured(FULL, 64, math.inf))
    assert math.isnan(empty.reward) and math.isinf(empty.p50)
    assert empty.in_time_share == 0


def test_blocks_of_one_request_use_all_prompts() -> None:
    """Guards against the same few prompts, however long the test is."""
    settings = Settings(prompts=tuple(map(str, range(24))), ns=(64, 128))
    assert len({settings.prompt(repeat, 0) for repeat in range(24)}) == 24
    assert len({settings.prompt(0, index) for index in range(8)}) == 8


def test_comparison_uses_requests_of_equal_number() -> None:
    """Guards against prompts of different length in the two halves of a ratio."""
    compared = results(
        measured(FAST, 128, 3.0, math.inf, 9.0, 100.0), measured(FULL, 64, 6.0, 5.0, 18.0)
    )
    (comparison,) = compared.comparisons
    assert (comparison.n, comparison.best_of_n, comparison.latency) == (128, 64, 0.5)
    assert (comparison.num_pairs, comparison.num_faster) == (2, 2)
    assert comparison.tokens == 2.0
    assert compared.claim == comparison


def test_blocks_of_both_algorithms_alternate() -> None:
    """Guards against an order in which a drift of the machine looks like a difference."""
    pairs = list(itertools.islice(blocks(Settings(("Why?",))), 2 * 27))
    first = [one.algorithm for one, _ in pairs]
    assert abs(first.count(FULL) - len(pairs) / 2) <= 1
    for one, other in pairs:
        assert {one.algorithm, other.algorithm} == set(Algorithm)
        assert (one.repeat, one.condition, one.n) == (other.repeat, other.condition, other.n)
    assert len({(one.condition, one.n) for one, _ in pairs[:27]}) == 27
    assert [one.n for one, _ in pairs[:27]] != [one.n for one, _ in pairs[27:]]


def test_steady_blocks_are_long_enough_for_a_queue() -> None:
    """Guards percentiles of four requests to an idle service, and a first pass beyond half an hour.

    The documents name 18 blocks of 52 s.
    """
    for settings in (Settings(()), Settings((), rate=20.0), Settings((), patience_s=60.0)):
        counts = []
        for repeat in range(100):
            arrivals_s = settings.arrivals_s(repeat)
            assert arrivals_s[-1] < settings.patience_s + settings.window_s
            counts.append(sum(at_s >= settings.patience_s for at_s in arrivals_s))
        assert sum(counts) / 100 == pytest.approx(settings.rate * settings.window_s, rel=0.1)
        assert settings.rate * settings.window_s >= 20
    settings = Settings(())
    assert (2 * len(settings.ns), settings.patience_s + settings.window_s) == (18, 52)


async def one_at_a_time(seconds: object) -> dict[str, Any]:
    ended = await completed(await start("tests.loadtest.one_at_a_time", str(seconds)))
    assert ended.code == 0, ended.err
    result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return result


@in_session
async def test_a_rate_above_the_capacity_is_shown() -> None:
    """Guards percentiles that claim service at a rate that no queue sustains.

    20 requests per second arrive, of which 5 can be answered: in the end each waits 0.8 s or gives
    up after a second.
    """
    fast, slow = await one_at_a_time(0.005), await one_at_a_time(0.2)
    assert fast["codes"].count("OK") > slow["codes"].count("OK")
    assert fast["answers_per_s"] == pytest.approx(len(fast["codes"]))
    assert len(slow["codes"]) == len(fast["codes"]) >= 10
    assert fast["numbers"] == slow["numbers"] and fast["numbers"][0] >= 10  # of the warm-up
    assert slow["codes"].count("OK") < len(slow["codes"]) / 2
    assert slow["answers_per_s"] < 8


@in_session
async def test_a_service_that_does_not_become_idle_is_an_error() -> None:
    """Guards against a block that is measured beside another load."""
    assert await one_at_a_time("busy") == {"error": "the service is still busy after 0.2 s"}


def test_page_is_complete_and_self_contained(tmp_path: Path) -> None:
    """Guards against unescaped text, missing figures, and anything loaded over the network."""
    write_page(
        results(
            measured(FAST, 128, 3.0),
            measured(FULL, 64, 6.0, math.inf, late_s=0.1),
            measured(FULL, 64, math.inf, condition=Condition.STEADY),
        ),
        tmp_path / "page.html",
    )
    text = (tmp_path / "page.html").read_text("utf-8")
    tags = Counter(re.findall(r"<(\w+)", text))
    assert (tags["img"], tags["figure"], tags["tr"], tags["script"]) == (6, 6, 2 + 1 + 3, 0)
    addresses = re.findall(r'\b(?:src|href)\s*=\s*["\']?([^"\'> ]*)', text)
    assert len(addresses) >= 6
    assert all(address.startswith("data:") for address in addresses)
    contents = {content.strip() for content in re.findall(r">([^<]*)<", text)}
    assert {"an &lt;abacus&gt;", "never", "1 GAVE_UP", "0.5"} <= contents
    assert "nan" not in contents
    assert "N = 128 took 0.50 times as long as Best-of-N at N = 64" in text
    assert "2 requests were sent more than 50 ms after" in " ".join(text.split())


def test_files_have_finite_numbers_only(tmp_path: Path) -> None:
    """JSON has no NaN or infinity."""
    partial = results(measured(FULL, 64, math.inf))
    write_json(partial, tmp_path / "file.json")
    write_csv(partial, tmp_path / "file.csv")
    (cell,) = json.loads((tmp_path / "file.json").read_text())["cells"]
    assert cell["p50"] is cell["reward"] is None
    with (tmp_path / "file.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["p50"], row["errors"], row["n"]) == ("", "GAVE_UP=1", "64")


def where(toys: Stack, out: Path) -> tuple[str, ...]:
    return ("--address", toys.orchestrator_address, "--out", str(out))


async def measuring(toys: Stack, out: Path) -> Process:
    """The command, once it has measured some requests."""
    arguments = (*where(toys, out), *SMALL, "--minutes", "10")
    process = await start("loadtest.latency_vs_n", *arguments)
    assert process.stderr
    async with asyncio.timeout(60):
        while b"requests, slowest" not in await process.stderr.readline():
            pass
    return process


def cells_of(out: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((out / "latency_vs_n.json").read_text())["cells"]
    return cells


@in_session
async def test_command_measures_and_writes_everything(toys: Stack, tmp_path: Path) -> None:
    ended = await latency_vs_n(*where(toys, tmp_path), *SMALL)
    assert ended.code == 0, ended.err
    cells = cells_of(tmp_path)
    assert len(cells) == 3 * 2 * 2  # conditions, algorithms, Ns
    num_requests = sum(cell["num_requests"] for cell in cells)
    assert json.loads(ended.out.splitlines()[-1])["requests"] == num_requests
    for cell in cells:
        assert cell["errors"] == {}
        assert 0 < cell["p50"] <= cell["p90"] <= cell["p95"] <= cell["p99"]
        assert cell["tokens"] > 0
    assert (tmp_path / "latency_vs_n.csv").read_text().count("\n") == 13
    assert (tmp_path / "latency_vs_n.html").stat().st_size > 10_000
    written = json.loads((tmp_path / "latency_vs_n.json").read_text())
    assert {(c["n"], c["best_of_n"]) for c in written["comparisons"]} == {(1, 1), (4, 4)}
    assert written["facts"]["processor"]


@in_session
@pytest.mark.long
async def test_command_starts_services_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOYS.items():
        monkeypatch.setenv(name, value)
    ended = await latency_vs_n("--out", str(tmp_path), *SMALL[:3])
    assert ended.code == 0, ended.err
    assert len(cells_of(tmp_path)) == 3 * 2


@in_session
@pytest.mark.long
async def test_slow_requests_at_a_fixed_rate_are_cancelled(toys: Stack, tmp_path: Path) -> None:
    # No toy answers within a millisecond: its first step takes two.
    ended = await latency_vs_n(*where(toys, tmp_path), *SMALL, "--ns", "4", "--patience-s", "0.001")
    assert ended.code == 0, ended.err
    steady = [cell for cell in cells_of(tmp_path) if cell["condition"] == "steady"]
    assert len(steady) == 2  # algorithms
    for cell in steady:
        assert cell["errors"] == {"GAVE_UP": cell["num_requests"]}
        assert cell["p50"] is None


@in_session
@pytest.mark.long
async def test_interrupted_run_reports_what_was_measured(toys: Stack, tmp_path: Path) -> None:
    process = await measuring(toys, tmp_path)
    process.send_signal(signal.SIGINT)
    ended = await completed(process)
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert json.loads(ended.out.splitlines()[-1])["requests"] > 0
    assert (tmp_path / "latency_vs_n.html").exists()


@in_session
@pytest.mark.long
async def test_services_that_end_leave_what_was_measured(tmp_path: Path) -> None:
    """Guards half an hour of measurements against an error in its last minute."""
    async with Stack(environment=TOYS) as stack:
        process = await measuring(stack, tmp_path)
    ended = await completed(process)
    assert ended.code == 1, ended.err
    assert "latency-vs-n:" in ended.err.splitlines()[-1]
    assert json.loads(ended.out.splitlines()[-1])["requests"] > 0
    assert (tmp_path / "latency_vs_n.html").exists()


@in_session
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ns", "1", "1000000"), "candidates at most"),
        (("--ns", "0", "4"), "--ns 0: must be 1 or more"),
        (("--patience-s", "inf"), "--patience-s inf: must be above 0 and finite"),
        (("--rate", "0"), "--rate 0.0: must be above 0 and finite"),
        (("--address", "127.0.0.1:1"), "latency-vs-n:"),
    ],
)
async def test_errors_end_the_command_at_once(
    toys: Stack, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    ended = await latency_vs_n(*where(toys, tmp_path / "out"), *arguments)
    assert ended.code == 1
    assert problem in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "out").exists()
