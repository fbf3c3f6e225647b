"""Records of requests: bounded, without texts, and readable by their own tenant only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.loop.run_state import MAX_TRACED
from orchestrator.observe.requests import MAX_SIZE, ObservedRequest, RequestRecords
from specrej import contracts as c
from specrej import telemetry
from specrej.contracts import errors, wire
from specrej.telemetry import metrics, names
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.caching import Clock, generation
from tests.serving import until
from tests.world import BOUND_S, World, small_request

TRACE = replace(generation().rounds[0], extend_ms=30.0, score_ms=8.0, prune_ms=2.0)
FINISHED = c.Finished(generation())


class Records(RequestRecords):
    """Records of one tenant's requests, on a clock that the test advances."""

    def __init__(self, max_requests: int = 4) -> None:
        self.clock = Clock()
        super().__init__(max_requests, clock=self.clock)

    def open(
        self, request_id: str = "r", **options: Any
    ) -> AbstractContextManager[ObservedRequest]:
        arrived = self.clock.now_s
        request = c.GenerationRequest(c.Prompt(text="hi"), selection=c.Selection(n=4))
        return self.observing(request_id, "t", request, arrived=arrived, **options)

    def write(self, request_id: str, *events: c.Event) -> None:
        """Record a request from its arrival to its end."""
        with self.open(request_id) as record:
            for event in events:
                record.add(event)

    def read(self, request_id: str = "r") -> c.RequestRecord:
        return self.find(request_id, "t")

    def ids(self) -> list[str]:
        """The ids that have a record, in order."""
        return sorted(request_id for _, request_id in self._kept)


@pytest.fixture
def records() -> Records:
    return Records()


async def test_times_are_since_arrival(records: Records) -> None:
    """Guards against rounds placed at their end, or on another clock than the rest."""
    clock = records.clock
    with records.open() as record:
        clock.now_s = 100.1

        @asynccontextmanager
        async def permit() -> AsyncIterator[None]:
            clock.now_s = 100.25
            yield

        async with AsyncExitStack() as stack:
            _, waited_ms = await record.admitted(stack, permit())
        assert waited_ms == pytest.approx(150)
        clock.now_s = 100.5
        record.add(c.Admitted(4, 9))
        clock.now_s = 101.0
        record.add(c.RoundCompleted(TRACE, (), "text"))
        running = records.read()
        clock.now_s = 102.0
        record.add(FINISHED)
        clock.now_s = 200.0
    ended = records.read()
    times_ms = [running.queued_at_ms, running.running_at_ms, running.opened_at_ms]
    assert times_ms == pytest.approx([100, 250, 500])
    assert running.rounds[0].start_ms == pytest.approx(960)
    assert (running.outcome, running.n, running.source) == ("", 4, None)
    assert running.elapsed_ms == pytest.approx(1000) and ended.elapsed_ms == pytest.approx(2000)
    assert (ended.outcome, ended.source, ended.answer_id) == ("OK", c.AnswerSource.RUN, 3)


@pytest.mark.parametrize(("first_round_ms", "starts_ms"), [(50.0, [10, 50]), (20.0, [0, 40])])
def test_a_cached_answer_has_the_rounds_of_its_run(
    records: Records, first_round_ms: float, starts_ms: list[float]
) -> None:
    """Guards against missing rounds, and rounds that begin before the request."""
    rounds, timings = (TRACE, replace(TRACE, number=2)), c.Timings(first_round_ms=first_round_ms)
    cached = replace(generation(), rounds=rounds, timings=timings)
    records.write("r", c.Finished(cached, c.AnswerSource.CACHE))
    record = records.read()
    assert [recorded.start_ms for recorded in record.rounds] == starts_ms
    assert record.source is c.AnswerSource.CACHE and record.queued_at_ms is None


@pytest.mark.parametrize(
    ("error", "passed_s", "events", "outcome"),
    [
        (errors.Overloaded("full"), 0, (), "OVERLOADED"),
        (errors.RewardInvalid("nan"), 0, (), "REWARD_INVALID"),
        (GeneratorExit(), 0, (), "CANCELLED"),
        (TimeoutError(), 0, (), "DEADLINE_EXCEEDED"),
        (ZeroDivisionError("prompt"), 0, (), "INTERNAL"),
        # The server cancels a late call just as a client that hangs up does.
        (asyncio.CancelledError(), 1, (), "CANCELLED"),
        (asyncio.CancelledError(), 4.8, (), "CANCELLED"),
        # grpc rounds the timeout up, and the client cancels before that.
        (asyncio.CancelledError(), 4.91, (), "DEADLINE_EXCEEDED"),
        # A stream is closed once it has sent its answer.
        (GeneratorExit(), 0, (FINISHED,), "OK"),
    ],
)
def test_the_outcome_is_ok_or_the_reason_of_the_error(
    records: Records, error: BaseException, passed_s: float, events: tuple[c.Event], outcome: str
) -> None:
    """Guards against errors under another name than the caller's status has."""
    with pytest.raises(type(error)), records.open(time_left_s=5.0) as record:
        records.clock.now_s += passed_s
        for event in events:
            record.add(event)
        raise error
    assert records.read().outcome == outcome


def test_the_oldest_records_are_dropped_and_running_ones_last(records: Records) -> None:
    """Guards against a running request without a record, because others came and went."""
    with records.open():
        for request_id in "012345":
            records.write(request_id, FINISHED)
        assert records.ids() == ["3", "4", "5", "r"]
    records.write("6")
    assert records.ids() == ["4", "5", "6", "r"]


@pytest.mark.parametrize(("max_requests", "kept"), [(4, ["6", "7", "8", "9"]), (0, [])])
def test_records_of_running_requests_are_bounded_too(max_requests: int, kept: list[str]) -> None:
    """Guards against records that grow with the queue, or that are switched off."""
    records = Records(max_requests)
    with ExitStack() as running:
        for request_id in "0123456789":
            running.enter_context(records.open(request_id)).add(FINISHED)
        assert records.ids() == kept
    assert records.ids() == kept


def test_the_size_is_bounded_for_any_n() -> None:
    """Guards against 256 records of as many candidates as the loop traces for each."""
    records = Records(1000)
    candidates = tuple(c.CandidateTrace(n, 0.5, c.Fate.KEPT) for n in range(1024))
    ended = c.RoundCompleted(replace(TRACE, candidates=candidates), (), "")
    for number in range(100):
        records.write(f"r{number}", *[ended] * (MAX_TRACED // 1024))
    kept = [opened.read() for opened in records._kept.values()]
    num_candidates = [sum(len(r.trace.candidates) for r in record.rounds) for record in kept]
    assert len(kept) > 1
    assert sum(num_candidates) <= MAX_SIZE
    assert kept[-1].request_id == "r99"


def test_records_are_listed_to_their_tenant(records: Records) -> None:
    records.write("1", FINISHED)
    assert [record.request_id for record in records.latest("t", 9)] == ["1"]
    assert records.latest("other", 9) == []


def test_a_run_is_counted(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against milliseconds as seconds, wrong savings, and answers in the log."""
    recorded: dict[object, float] = {}
    tokens: dict[object, float] = {}
    noted: dict[str, object] = {}

    def add(metric: object, value: float = 1, **labels: object) -> None:
        if metric is names.TOKENS:
            tokens[labels["kind"]] = value

    def record(metric: object, value: float, **_: object) -> None:
        recorded[metric] = value

    monkeypatch.setattr(metrics, "record", record)
    monkeypatch.setattr(metrics, "add", add)
    monkeypatch.setattr(telemetry, "note", lambda **fields: noted.update(fields))
    usage = generation().usage
    records.write("1", c.Finished(replace(generation(), timings=c.Timings(total_ms=2000.0))))
    assert recorded[names.REQUEST_DURATION] == 2.0
    assert tokens["saved"] == usage.best_of_n_tokens_estimate - usage.generated_tokens > 0
    assert "score" in noted and "answer" not in noted


# Over the public port


async def record_of(service: World, request_id: str, tenant: str = "") -> c.RequestRecord:
    metadata = (("specrej-tenant", tenant),) if tenant else ()
    reply = await service.stub.GetRecord(
        pb.GetRecordRequest(request_id=request_id), metadata=metadata, timeout=BOUND_S
    )
    return wire.from_message(reply.record, c.RequestRecord)


async def test_a_record_has_the_totals_of_the_answer_and_no_texts(service: World) -> None:
    """Guards against other rounds or totals, and prompts, answers or stop texts in a record."""
    prompt = common_pb2.Prompt(text="secret prompt")
    reply = await service.answer(small_request(prompt=prompt, sampling={"stop": ["stop-text"]}))
    record, final = await record_of(service, reply.request_id), wire.generation_from_message(reply)
    assert tuple(recorded.trace for recorded in record.rounds) == final.rounds
    assert (record.usage, record.answer_id, record.n) == (final.usage, final.best.id, final.n)
    times = [record.queued_at_ms, record.running_at_ms, record.opened_at_ms]
    times += [record.rounds[0].start_ms, record.elapsed_ms]
    assert None not in times and times == sorted(times)  # type: ignore[type-var]
    assert not any(text in repr(record) for text in ("secret", "stop-text", reply.text))


async def test_a_record_has_the_source_of_the_answer(cached_service: World) -> None:
    """Guards against a cached answer recorded as a run."""
    service, gate = cached_service, cached_service.generator.gates["open"]
    first = await gate.hold(service.answer(small_request()))
    second = asyncio.create_task(service.answer(small_request()))
    await until(lambda: len(service.orchestrator.records._kept) == 2)
    gate.open()
    replies = [await first, await second, await service.answer(small_request())]
    records = [await record_of(service, reply.request_id) for reply in replies]
    sources = {record.source for record in records}
    assert sources == {c.AnswerSource.RUN, c.AnswerSource.FLIGHT, c.AnswerSource.CACHE}
    assert len({len(record.rounds) for record in records}) == 1
