"""What is remembered of requests: bounded, without texts, and for their own tenant alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import text_format

from orchestrator import journal as journals
from orchestrator.journal import Journal
from specrej import contracts as c
from specrej import errors, wire
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import BOUND_S, HeldGenerator, Whole, whole
from tests.orchestrator.test_cache import generation
from tests.orchestrator.test_service import answer, ask, events
from tests.serving import failure_of, until

TRACE = replace(generation().rounds[0], extend_ms=30.0, score_ms=8.0, prune_ms=2.0)
CUT = c.Selection(n=4)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(clock: Clock) -> Journal:
    return Journal(4, clock=clock)


def write(journal: Journal, request_id: str, *seen: c.Event, tenant: str = "t") -> None:
    with journal.writing(request_id, tenant, CUT, 64, arrived=100.0) as entry:
        for event in seen:
            entry.saw(event)


def rounds_with(num_candidates: int) -> c.RoundCompleted:
    each = tuple(c.CandidateTrace(n, 0.5, c.Fate.KEPT) for n in range(num_candidates))
    return c.RoundCompleted(replace(TRACE, candidates=each), (), "")


def test_times_are_since_arrival(journal: Journal, clock: Clock) -> None:
    """Guards against rounds shown where they ended, or on another clock than the rest."""
    with journal.writing("r", "t", CUT, 64, arrived=100.0) as entry:
        clock.now = 100.1
        entry.queued()
        clock.now = 100.25
        entry.running()
        clock.now = 100.5
        entry.saw(c.Admitted(4, 9))
        clock.now = 101.0
        entry.saw(c.RoundCompleted(TRACE, (), "text"))
        running = journal.find("r", "t")
        clock.now = 102.0
        entry.saw(c.Finished(generation()))
        clock.now = 200.0
    ended = journal.find("r", "t")
    assert [running.queued_at_ms, running.running_at_ms, running.opened_at_ms] == pytest.approx(
        [100, 250, 500]
    )
    assert running.rounds[0].start_ms == pytest.approx(960)
    assert (running.outcome, running.n, running.source) == ("", 4, None)
    assert running.elapsed_ms == pytest.approx(1000) and ended.elapsed_ms == pytest.approx(2000)
    assert (ended.outcome, ended.source, ended.answer_id) == ("OK", c.AnswerSource.RUN, 3)


def test_an_answer_of_another_run_has_that_runs_rounds(journal: Journal) -> None:
    """Guards against a cached answer whose rounds are gone, or began before the request did."""
    rounds = (TRACE, replace(TRACE, number=2))
    made = replace(generation(), rounds=rounds, timings=c.Timings(first_round_ms=50.0))
    write(journal, "r", c.Finished(made, c.AnswerSource.CACHE))
    record = journal.find("r", "t")
    assert [each.start_ms for each in record.rounds] == [10.0, 50.0]
    assert record.source is c.AnswerSource.CACHE and record.queued_at_ms is None


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.Overloaded("full"), "OVERLOADED"),
        (errors.RewardInvalid("nan"), "REWARD_INVALID"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (TimeoutError(), "DEADLINE_EXCEEDED"),
        (ZeroDivisionError("prompt"), "INTERNAL"),
    ],
)
def test_how_it_ended(journal: Journal, error: BaseException, outcome: str) -> None:
    with pytest.raises(type(error)), journal.writing("r", "t", CUT, 64, arrived=100.0):
        raise error
    assert journal.find("r", "t").outcome == outcome


@pytest.mark.parametrize(("passed_s", "outcome"), [(1.0, "CANCELLED"), (5.0, "DEADLINE_EXCEEDED")])
def test_a_late_call_was_not_cancelled(
    journal: Journal, clock: Clock, passed_s: float, outcome: str
) -> None:
    """The server ends a late call as a client's hanging up would: used to look the same."""
    with (
        pytest.raises(asyncio.CancelledError),
        journal.writing("r", "t", CUT, 64, arrived=100.0, time_left_s=5.0),
    ):
        clock.now += passed_s
        raise asyncio.CancelledError
    assert journal.find("r", "t").outcome == outcome


def test_what_comes_after_the_answer_changes_nothing(journal: Journal) -> None:
    """Guards against CANCELLED for a stream that is closed once its answer is there."""
    with pytest.raises(GeneratorExit), journal.writing("r", "t", CUT, 64, arrived=100.0) as entry:
        entry.saw(c.Finished(generation()))
        raise GeneratorExit
    assert journal.find("r", "t").outcome == "OK"


def test_the_oldest_is_forgotten(journal: Journal) -> None:
    for number in range(6):
        write(journal, f"r{number}", c.Finished(generation()))
    assert found(journal, "r0", "r1", "r2", "r5") == ["r2", "r5"]


def test_a_long_request_outlives_short_ones(journal: Journal) -> None:
    """Guards against a running request that nobody can look at, since others came and went."""
    with journal.writing("long", "t", CUT, 64, arrived=100.0):
        for number in range(9):
            write(journal, f"r{number}")
        assert found(journal, "long", "r5", "r6", "r8") == ["long", "r6", "r8"]


def test_running_ones_are_bounded_too(journal: Journal) -> None:
    """Guards against a journal that grows with the queue."""
    with ExitStack() as running:
        for number in range(9):
            running.enter_context(journal.writing(f"r{number}", "t", CUT, 64, arrived=100.0))
        assert found(journal, "r4", "r5", "r8") == ["r5", "r8"]
    assert found(journal, "r4", "r5", "r8") == ["r5", "r8"]


def test_none_are_kept_where_none_shall_be() -> None:
    journal = Journal(0)
    with journal.writing("r", "t", CUT, 64, arrived=0.0) as entry:
        entry.saw(c.Finished(generation()))
        assert found(journal, "r") == []
    assert found(journal, "r") == []


def test_size_is_bounded_whatever_n_is() -> None:
    """Guards against 256 records of a million candidates each."""
    journal = Journal(1000)
    for number in range(100):
        write(journal, f"r{number}", *[rounds_with(1024)] * 40)
    kept = [entry.record() for entry in journal._ended.values()]
    num_candidates = [sum(len(each.trace.candidates) for each in record.rounds) for record in kept]
    assert max(num_candidates) <= journals.MAX_RECORD_SIZE
    assert sum(num_candidates) <= journals.MAX_SIZE
    assert kept[-1].request_id == "r99" and len(kept[-1].rounds) == 40


def test_other_tenants_find_nothing_and_learn_nothing(journal: Journal) -> None:
    """Guards against a request's rewards, or the fact that it exists, told to somebody else."""
    write(journal, "r", tenant="a")
    texts = set()
    for request_id, tenant in (("r", "b"), ("r", ""), ("unknown", "b")):
        with pytest.raises(errors.NotFound) as caught:
            journal.find(request_id, tenant)
        texts.add(caught.value.message)
    assert len(texts) == 1


def found(journal: Journal, *request_ids: str) -> list[str]:
    """Those that are remembered."""

    known = []
    for request_id in request_ids:
        with suppress(errors.NotFound):
            known.append(journal.find(request_id, "t").request_id)
    return known


# Over the public port


@pytest.fixture
async def service() -> AsyncIterator[Whole]:
    async with whole() as everything:
        yield everything


async def record_of(service: Whole, request_id: str, tenant: str = "") -> c.RequestRecord:
    metadata = (("specrej-tenant", tenant),) if tenant else ()
    reply = await service.stub.GetRecord(
        pb.GetRecordRequest(request_id=request_id), metadata=metadata, timeout=BOUND_S
    )
    return wire.record_from_wire(reply.record)


async def test_the_record_is_that_of_the_answer(service: Whole) -> None:
    """Guards against rounds, fates or totals that are not those of the answer."""
    reply = await answer(service, ask())
    record, made = await record_of(service, reply.request_id), wire.generation_from_wire(reply)
    assert tuple(each.trace for each in record.rounds) == made.rounds
    assert (record.usage, record.answer_id, record.n) == (made.usage, made.best.id, made.n)
    times = [record.queued_at_ms, record.running_at_ms, record.opened_at_ms]
    times += [record.rounds[0].start_ms, record.elapsed_ms]
    assert None not in times and times == sorted(times)  # type: ignore[type-var]


async def test_candidates_have_their_fates(service: Whole) -> None:
    """Guards against fates of before the cut, or of other candidates than the scores'."""
    seen = await events(service, ask(selection={"n": 12, "return_candidates": 12}))
    ended = {ranked.candidate_id for ranked in seen[-1].finished.candidates}
    for event in seen[1:-1]:
        done = wire.trace_from_wire(event.round_completed.round)
        fates = {each.id: each.fate for each in done.candidates}
        assert tuple(each.score for each in done.candidates) == done.scores
        kept = {number for number, fate in fates.items() if fate is c.Fate.KEPT}
        assert kept == set(event.round_completed.survivors)
        assert list(fates.values()).count(c.Fate.REJECTED) == done.num_rejected
        assert {n for n, fate in fates.items() if fate is c.Fate.FINISHED} <= ended


async def test_vetoed_candidates_are_told_apart(service: Whole) -> None:
    """Guards against a veto that reads as a low rank."""
    veto = pb.WeightedReward(name="toy", veto_below=0.5)
    reply = await answer(service, ask(selection={"n": 12, "alpha": 0.0, "rewards": [veto]}))
    first = wire.trace_from_wire(reply.rounds[0])
    vetoed = [each for each in first.candidates if each.fate is c.Fate.VETOED]
    assert vetoed and all(each.score < 0.5 for each in vetoed)
    assert len(vetoed) == first.num_rejected


async def test_a_running_request_can_be_watched() -> None:
    """Guards against records that appear only when it is too late to look."""
    generator = HeldGenerator()
    async with whole(generator) as service:
        generator.gates["prune"].shut()
        call = service.stub.GenerateStream(pb.GenerateStreamRequest(request=ask()))
        request_id = (await call.read()).admitted.request_id
        await until(lambda: generator.gates["prune"].held == 1)
        before = await record_of(service, request_id)
        generator.gates["extend"].shut()
        generator.gates["prune"].open()
        await call.read()
        after = await record_of(service, request_id)
        assert (before.outcome, before.n, len(before.rounds)) == ("", 12, 0)
        assert (after.outcome, len(after.rounds)) == ("", 1)
        call.cancel()
        generator.gates["extend"].open()
        await until(lambda: service.is_idle)
        assert (await record_of(service, request_id)).outcome == "CANCELLED"


async def test_where_answers_came_from(redis_url: str) -> None:
    """Guards against a cached answer that looks as if it had been made."""
    async with whole(redis_url=redis_url) as service:
        asked = ask(prompt=common_pb2.Prompt(text="where from"))
        service.generator.gates["open"].shut()
        both = [asyncio.create_task(answer(service, asked)) for _ in range(2)]
        await until(lambda: service.generator.gates["open"].held == 1)
        await until(lambda: len(service.orchestrator._journal._running) == 2)
        service.generator.gates["open"].open()
        replies = [*await asyncio.gather(*both), await answer(service, asked)]
        records = [await record_of(service, reply.request_id) for reply in replies]
        sources = sorted(str(record.source and record.source.value) for record in records)
        assert sources == ["cache", "flight", "run"]
        assert len({len(record.rounds) for record in records}) == 1


async def test_other_tenants_get_not_found(service: Whole) -> None:
    """Guards against one tenant looking into another's requests."""
    reply = await answer(service, ask(), tenant="a")
    assert (await record_of(service, reply.request_id, "a")).outcome == "OK"
    theirs = await failure_of(record_of(service, reply.request_id, "b"))
    unknown = await failure_of(record_of(service, "unknown", "b"))
    assert theirs.code() is unknown.code() is grpc.StatusCode.NOT_FOUND
    assert theirs.details() == unknown.details()


async def test_a_record_holds_no_text(service: Whole) -> None:
    """Guards against prompts, answers or stop texts in what operators look at."""
    secret = "a prompt to keep"
    asked: Any = ask(sampling={"stop": ["stop-text"]})
    asked.prompt.text = secret
    reply = await answer(service, asked)
    got = await service.stub.GetRecord(
        pb.GetRecordRequest(request_id=reply.request_id), timeout=BOUND_S
    )
    shown = text_format.MessageToString(got)
    assert "candidate_id" in shown
    assert not [text for text in (secret, "stop-text", reply.text) if text in shown]
