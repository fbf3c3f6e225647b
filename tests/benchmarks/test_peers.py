"""What the comparison with peers asks, and what it makes of answers, failures and silence."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers import Bench, Case, as_json, parse_cases, prompt_ids, table
from benchmarks.workers.engines import EngineSpec
from benchmarks.workers.process import WorkerError

CASE = Case(4, 40, 64)
NAMES = ("specrej", "vllm", "llamacpp")


def _quick(request: dict[str, Any]) -> float:
    return 2.0


def _died(request: dict[str, Any]) -> float:
    raise WorkerError("ended by SIGKILL: out of memory")


@dataclass
class FakeWorker:
    answer: Callable[[dict[str, Any]], float] = _quick
    asked: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False

    def ready(self) -> dict[str, str]:
        return {"engine": "1.0"}

    def ask(self, request: dict[str, Any]) -> float:
        self.asked.append(request)
        try:
            return self.answer(request)
        except WorkerError as error:
            self.ended = "ended" in str(error)
            raise

    def has_ended(self) -> bool:
        return self.ended

    def stop(self) -> None:
        self.stopped = True


@dataclass
class FakeSpec:
    name: str
    answer: Callable[[dict[str, Any]], float] = _quick
    not_installed: str = ""
    not_started: str = ""
    started: list[FakeWorker] = field(default_factory=list)

    def install(self) -> None:
        if self.not_installed:
            raise WorkerError(self.not_installed)

    def start(self, threads: int) -> FakeWorker:
        if self.not_started:
            self.started.append(_Unready(self.not_started))
        else:
            self.started.append(FakeWorker(self.answer))
        return self.started[-1]


class _Unready(FakeWorker):
    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def ready(self) -> dict[str, str]:
        raise WorkerError(self.reason)


def _bench(*specs: FakeSpec, num_rounds: int = 3) -> Bench:
    bench = Bench(specs, threads=2, num_rounds=num_rounds, settle_s=0.0)
    bench.install()
    return bench


def _measured(bench: Bench) -> dict[str, tuple[float, ...]]:
    return {result.engine: result.rounds for result in bench.report.results}


@pytest.mark.parametrize("text", ["", " ; "])
def test_no_cases_means_all(text: str) -> None:
    assert len(parse_cases(text)) == 5 * 2 * 2


@pytest.mark.parametrize(
    ("text", "cases"),
    [
        ("n=64,prompt=40,new=64", [Case(64, 40, 64)]),
        ("n=64,prompt=40,new=64;n=128, prompt=512, new=8;", [Case(64, 40, 64), Case(128, 512, 8)]),
        ("n=4,new=8", [Case(4, 40, 8), Case(4, 512, 8)]),
        ("n=4,new=8,prompt=40;prompt=40,n=4,new=8", [Case(4, 40, 8)]),
    ],
)
def test_cases_may_leave_keys_out(text: str, cases: list[Case]) -> None:
    assert parse_cases(text) == cases


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows=4", "not one of n=, prompt=, new="),
        ("n", "n is a whole number from 1"),
        ("n=0", "n is a whole number from 1"),
        ("new=-8", "new is a whole number from 1"),
        ("n=4,n=8", "n is there twice"),
    ],
)
def test_bad_cases_are_told_apart(text: str, problem: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=problem):
        parse_cases(text)


def test_no_two_prompts_begin_alike() -> None:
    """A prefix cache would save one engine the prompt, and only that one."""
    assert len({prompt_ids(40, number)[0] for number in range(500)}) == 500


def test_every_round_asks_all_engines_the_same_but_none_twice() -> None:
    specs = [FakeSpec(name) for name in NAMES]
    bench = _bench(*specs)
    bench.measure(CASE)
    asked = [[r for r in spec.started[0].asked if "n" in r] for spec in specs]
    assert asked[0] == asked[1] == asked[2]
    assert len({tuple(request["prompt_ids"]) for request in asked[0]}) == 4
    assert [request["new_tokens"] for request in asked[0]] == [16, 64, 64, 64]


def test_the_warm_up_does_not_count() -> None:
    seconds = iter([100.0, 1.0, 4.0, 2.0])
    bench = _bench(FakeSpec("vllm", lambda request: next(seconds)))
    bench.measure(CASE)
    (result,) = bench.report.results
    assert result.rounds == (256.0, 64.0, 128.0)
    assert result.tokens_per_s == 128.0


def test_the_bound_is_the_fastest_pass_of_all_rounds() -> None:
    passes = iter([0.5, 0.25, 1.0])
    ours = FakeSpec("specrej", lambda request: next(passes) if "gemm_bound" in request else 1.0)
    bench = _bench(ours)
    bench.measure(CASE)
    assert bench.report.bounds == {4: 16.0}


@pytest.mark.parametrize(
    "missing",
    [FakeSpec("vllm", not_installed="no package"), FakeSpec("vllm", not_started="no package")],
)
def test_a_missing_peer_is_reported_and_the_rest_goes_on(missing: FakeSpec) -> None:
    bench = _bench(FakeSpec("specrej"), missing, FakeSpec("llamacpp"))
    bench.measure(CASE)
    bench.measure(Case(1, 40, 64))
    assert bench.report.missing == {"vllm": "no package"}
    assert bench.report.failed == []
    assert _measured(bench).keys() == {"specrej", "llamacpp"}
    assert len(missing.started) <= 1  # not tried again in every case


def test_a_worker_that_dies_loses_its_case_and_comes_back_for_the_next() -> None:
    def answer(request: dict[str, Any]) -> float:
        return _died(request) if request["n"] == 4 and request["new_tokens"] == 64 else 1.0

    dying = FakeSpec("vllm", answer)
    bench = _bench(FakeSpec("specrej"), dying)
    bench.measure(CASE)
    assert bench.report.failed == [("vllm", CASE, "ended by SIGKILL: out of memory")]
    assert _measured(bench).keys() == {"specrej"}
    bench.measure(Case(1, 40, 64))
    assert _measured(bench).keys() == {"specrej", "vllm"}
    assert [worker.stopped for worker in dying.started] == [True, False]


def test_a_refused_request_keeps_its_worker() -> None:
    def answer(request: dict[str, Any]) -> float:
        if request["n"] == 4:
            raise WorkerError("at most 2 sequences")
        return 1.0

    peer = FakeSpec("llamacpp", answer)
    bench = _bench(peer)
    bench.measure(CASE)
    bench.measure(Case(1, 40, 64))
    assert bench.report.failed == [("llamacpp", CASE, "at most 2 sequences")]
    assert len(peer.started) == 1


def test_stop_stops_all_that_runs() -> None:
    specs = [FakeSpec(name) for name in NAMES]
    bench = _bench(*specs)
    bench.measure(CASE)
    bench.stop()
    assert all(worker.stopped for spec in specs for worker in spec.started)


def test_json_and_table_tell_what_was_measured_and_what_is_missing() -> None:
    bench = _bench(
        FakeSpec("specrej", lambda request: 1.0),
        FakeSpec("transformers"),
        FakeSpec("vllm", not_installed="no such package"),
        FakeSpec("llamacpp", _died),
    )
    bench.measure(CASE)
    specs = [EngineSpec(name, f"{name}'s way", {}) for name in ("specrej", "transformers", "vllm")]
    told = json.loads(json.dumps(as_json(bench.report, specs)))
    case = {"n": 4, "prompt_tokens": 40, "new_tokens": 64}
    assert told["results"] == [
        {"engine": "specrej", **case, "tokens_per_s": 256.0, "rounds": [256.0] * 3},
        {"engine": "transformers", **case, "tokens_per_s": 128.0, "rounds": [128.0] * 3},
    ]
    assert told["gemm_bound_tokens_per_s"] == {"4": 4.0}
    assert told["missing"] == {"vllm": "no such package"}
    assert told["failed"] == [
        {"engine": "llamacpp", **case, "reason": "ended by SIGKILL: out of memory"}
    ]
    assert told["settings"]["vllm"] == "vllm's way"
    assert told["versions"]["transformers"] == {"engine": "1.0"}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(bench.report, specs))
    assert "128 (2.00x)" in captured.get()
    assert "vllm is missing: no such package" in captured.get()
