"""The comparison with peers: requests, failures, missing engines, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.engines import WorkerError
from benchmarks.peers import Bench, Case

CASE, OTHER = Case(4, 40, 64), Case(1, 40, 64)


Answer = Callable[[dict[str, Any]], float]


def _fails(request: dict[str, Any]) -> float:
    raise WorkerError("ended by SIGKILL: out of memory")


@dataclass
class FakeWorker:
    answer: Answer
    not_ready: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False

    def ready(self) -> dict[str, str]:
        if self.not_ready:
            raise WorkerError(self.not_ready)
        return {"engine": "1.0"}

    def measure(self, request: dict[str, Any]) -> float:
        self.requests.append(request)
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
    answer: Answer = lambda request: 2.0
    no_environment: str = ""
    not_ready: str = ""
    workers: list[FakeWorker] = field(default_factory=list)
    num_starts: int = 0

    @property
    def settings(self) -> str:
        return f"settings of {self.name}"

    def start(self, threads: int) -> FakeWorker:
        self.num_starts += 1
        if self.no_environment:
            raise WorkerError(self.no_environment)
        self.workers.append(FakeWorker(self.answer, self.not_ready))
        return self.workers[-1]


def _measured(*specs: Any, cases: tuple[Case, ...] = (CASE,)) -> Bench:
    bench = Bench(specs, threads=2, num_rounds=3, settle_s=0.0)
    for case in cases:
        bench.measure(case)
    return bench


def test_every_round_sends_one_new_request_to_all_engines() -> None:
    """The warm-up does not count; the bound is the fastest pass of all rounds."""
    passes, seconds = iter([0.5, 0.25, 1.0]), iter([100.0, 1.0, 4.0, 2.0])
    specs = [
        FakeSpec("specrej", lambda request: next(passes) if "gemm_bound" in request else 1.0),
        FakeSpec("vllm", lambda request: next(seconds)),
        FakeSpec("llamacpp"),
    ]
    bench = _measured(*specs)
    sent = [[r for r in spec.workers[0].requests if "n" in r] for spec in specs]
    assert sent[0] == sent[1] == sent[2]
    assert len({tuple(request["prompt_ids"]) for request in sent[0]}) == 4
    assert [request["new_tokens"] for request in sent[0]] == [16, 64, 64, 64]
    assert bench.speeds["vllm", CASE] == [256.0, 64.0, 128.0]
    assert bench.bounds == {4: 16.0}
    bench.stop()
    assert all(worker.stopped for spec in specs for worker in spec.workers)


@pytest.mark.parametrize(
    "missing",
    [FakeSpec("vllm", no_environment="no package"), FakeSpec("vllm", not_ready="no package")],
)
def test_missing_peer_is_reported_once_and_the_rest_goes_on(missing: FakeSpec) -> None:
    bench = _measured(FakeSpec("specrej"), missing, FakeSpec("llamacpp"), cases=(CASE, OTHER))
    assert bench.missing == {"vllm": "no package"}
    assert bench.failed == {}
    assert {name for name, _ in bench.speeds} == {"specrej", "llamacpp"}
    assert missing.num_starts == 1


@pytest.mark.parametrize(
    ("reason", "num_workers"),
    [("ended by SIGKILL: out of memory", 2), ("at most 2 sequences", 1)],
)
def test_failed_case_is_lost_and_the_next_is_measured(reason: str, num_workers: int) -> None:
    """A worker that died is started again; one that refused a request is kept."""

    def answer(request: dict[str, Any]) -> float:
        if request["n"] == 4 and request["new_tokens"] == 64:
            raise WorkerError(reason)
        return 1.0

    peer = FakeSpec("vllm", answer)
    bench = _measured(FakeSpec("specrej"), peer, cases=(CASE, OTHER))
    assert bench.failed == {("vllm", CASE): reason}
    measured = {("specrej", CASE), ("specrej", OTHER), ("vllm", OTHER)}
    assert set(bench.speeds) == measured
    assert len(peer.workers) == num_workers
    assert [worker.stopped for worker in peer.workers] == [True, False][-num_workers:]


def test_report_holds_measured_missing_and_failed_engines() -> None:
    bench = _measured(
        FakeSpec("specrej", lambda request: 1.0),
        FakeSpec("transformers"),
        FakeSpec("vllm", no_environment="no such package"),
        FakeSpec("llamacpp", _fails),
    )
    result = json.loads(json.dumps(bench.result()))
    case = {"n": 4, "prompt_tokens": 40, "new_tokens": 64}
    assert result["results"] == [
        {"engine": "specrej", **case, "tokens_per_s": 256.0, "rounds": [256.0] * 3},
        {"engine": "transformers", **case, "tokens_per_s": 128.0, "rounds": [128.0] * 3},
    ]
    assert result["gemm_bound_tokens_per_s"] == {"4": 4.0}
    assert result["missing"] == {"vllm": "no such package"}
    assert result["failed"] == [
        {"engine": "llamacpp", **case, "reason": "ended by SIGKILL: out of memory"}
    ]
    assert result["settings"]["vllm"] == "settings of vllm"
    assert result["versions"]["transformers"] == {"engine": "1.0"}
    assert [*bench.rows()] == [(4, 40, 64, "256", "128 (2.00x)", "-", "-", "4")]
    assert "vllm is missing: no such package" in bench.notes()
