"""Generator and rewards over the wire: the same events and errors as local ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc.aio
import pytest

from generator_service.toy import ToyGenerator
from orchestrator.edge.planning import _LastDescription
from orchestrator.loop.scoring import LikelihoodScorer, fingerprint_of
from reward_service.kinds.toy import ToyReward
from reward_service.worker import Worker
from specrej import contracts as c
from specrej import remote
from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1 import reward_pb2_grpc
from specrej.client.channel import open_channel
from specrej.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfOrder,
    SessionExpired,
    SpecrejError,
    Unavailable,
)
from specrej.contracts.status import DETAILS_TRAILER
from specrej.contracts.validation import MAX_BATCH
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.server.serving import Context, Service
from specrej.threads import ended
from tests import world
from tests.orchestrator.runs import PROMPT, answer, events_of, request
from tests.serving import serving, until


@asynccontextmanager
async def remote_generator(generator: Any) -> AsyncIterator[RemoteGenerator]:
    async with world.generator_backend(generator) as backend, world.channel_to(backend) as channel:
        yield RemoteGenerator(channel)


@pytest.mark.parametrize(
    ("capacity", "end_every", "generation_request"),
    [
        (100_000, 40, request()),
        (100_000, 12, request(schedule=c.Schedule("tokens", tokens=(3, 9, 10)), alpha=0.75)),
        (300, 10**9, request(schedule=c.Schedule("memory"))),
        (100_000, 40, request(algorithm=c.Algorithm.BEST_OF_N)),
        (100_000, 5, request(n=0)),
        (100_000, 10**9, request(n=1, max_tokens=1)),
        (100_000, 4, request(sampling={"min_tokens": 20, "logprobs": True})),
    ],
)
async def test_remote_backends_give_the_same_events_as_local_ones(
    capacity: int, end_every: int, generation_request: c.GenerationRequest
) -> None:
    """Guards against fields that are lost, rounded or reordered on the wire."""
    worker = await Worker.start(ToyReward)
    toy = ToyGenerator(capacity, end_every=end_every)
    local = await events_of(generation_request, toy, worker.open)
    worker.close()
    async with world.world(world.HeldGenerator(capacity, end_every=end_every)) as service:
        scorer = partial(service.remote_rewards.open, "toy")
        calls = events_of(generation_request, service.remote_generator, scorer)
        remote = await asyncio.wait_for(calls, world.BOUND_S)
    assert isinstance(remote[-1], c.Finished) and isinstance(local[-1], c.Finished)
    # Only remote backends have fingerprints.
    with_fingerprints = replace(
        local[-1].generation,
        generator_fingerprint=f"toy-{end_every}",
        reward_fingerprint=fingerprint_of((c.WeightedReward(""),), (ToyReward().fingerprint,)),
    )
    local[-1] = c.Finished(with_fingerprints)
    assert [world.timeless(event) for event in remote] == [world.timeless(event) for event in local]
    if generation_request.selection.schedule.kind == "memory":
        ends = [event.trace.ended_by for event in remote if isinstance(event, c.RoundCompleted)]
        assert c.RoundEnd.SLOTS_FULL in ends, "the case did not occur"


async def test_a_call_that_ends_within_a_round_frees_its_slots() -> None:
    """Guards against an extend that goes on at the generator, with a part to send, after its
    caller has gone."""
    parts: list[c.Round] = []
    generator, sampling = ToyGenerator(step_s=0.005, end_every=10**9), c.Sampling(4000)
    async with remote_generator(generator) as remote:
        async with remote.open(c.SessionSpec(PROMPT, 1, sampling, 8)) as session:
            growing = asyncio.create_task(session.extend(4000, parts.append))
            await until(lambda: len(parts) > 2)
            await ended(growing)
        await until(lambda: not generator.ledger.owned)
    (first, second) = (part.candidates[0] for part in parts[:2])
    assert first.num_tokens == 1 and second.text.startswith(f"{first.text} ")


SPEC = c.SessionSpec(PROMPT, 4, c.Sampling(), 8)


async def error_of_open(generator: RemoteGenerator, n: int = 4) -> SpecrejError:
    """The error of a session that cannot be opened."""
    with pytest.raises(SpecrejError) as raised:
        async with generator.open(replace(SPEC, n=n)):
            pass
    return raised.value


@pytest.mark.parametrize(
    "error",
    [Cancelled("here"), DeadlineExceeded("here"), SessionExpired("lease"), OutOfOrder("not now")],
    ids=lambda error: type(error).__name__,
)
async def test_errors_that_concern_only_the_backend_are_unavailable(error: SpecrejError) -> None:
    """Guards against CANCELLED for a caller that did not cancel, or FAILED_PRECONDITION for one
    without a session: a client retries neither."""
    refusing = world.HeldGenerator()
    refusing.open = Mock(side_effect=error)  # type: ignore[method-assign]
    async with remote_generator(refusing) as generator:
        assert type(await error_of_open(generator)) is Unavailable


@pytest.mark.parametrize(("requested", "opened"), [(4, 2), (4, 5), (0, MAX_BATCH + 1)])
async def test_another_number_of_candidates_is_an_error(requested: int, opened: int) -> None:
    """Guards against an answer from fewer candidates under the key of all, and against memory."""
    miscounting, toy = world.HeldGenerator(), ToyGenerator(10**6)
    miscounting.open = lambda spec: toy.open(replace(spec, n=opened))  # type: ignore[method-assign]
    async with remote_generator(miscounting) as generator:
        error = await error_of_open(generator, requested)
    assert isinstance(error, InternalError) and f"opened {opened} candidates" in error.message


async def test_reports_are_empty_unless_they_differ(service: world.World) -> None:
    """Guards against a cost per report that is the description's, and one that does not follow."""
    generator, rewards = service.remote_generator, service.remote_rewards
    of_generator, of_rewards = generator.watch(0.001), rewards.watch(0.001)
    assert await anext(of_generator) == await generator.describe()
    assert await anext(of_rewards) == await rewards.describe()
    assert (await anext(of_generator), await anext(of_rewards)) == (None, None)
    service.generator.described["max_candidates"], service.reward.fingerprint = 7, "new"
    assert (await anext(one async for one in of_generator if one)).max_candidates == 7
    assert (await anext(one async for one in of_rewards if one))[0].fingerprint == "new"
    with pytest.raises(InvalidRequest, match="interval_s"):
        await anext(generator.watch(0))


# By fault: how the answer's number differs from that of its batch, and the answer's fields.
FAULTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "wrong_ids": (-1, {"scores": pb.BatchScores(scores=[0.0] * 2)}),
    "no_scores": (0, {}),
    "stale": (0, {"stale": pb.StaleScoring()}),
}


class Rogue(reward_pb2_grpc.RewardServiceServicer):
    """A foreign service: its answers to batches of two have the fault."""

    def __init__(self, fault: str) -> None:
        self._offset, self._fields = FAULTS[fault]

    def service(self) -> Service:
        register = partial(reward_pb2_grpc.add_RewardServiceServicer_to_server, self)
        return Service("specrej.backend.v1.RewardService", register)

    async def ScoreSession(  # type: ignore[override]  # noqa: N802
        self, requests: Any, context: Context
    ) -> None:
        number = (await anext(requests)).sequence
        opened = pb.ScoringOpened(fingerprint="f")
        await context.write(pb.ScoreSessionResponse(sequence=number, opened=opened))
        number = (await anext(requests)).sequence + self._offset
        await context.write(pb.ScoreSessionResponse(sequence=number, **self._fields))
        await anext(requests, None)

    Score: Any = ScoreSession
    Watch: Any = ScoreSession
    Describe: Any = ScoreSession


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_answer_to_another_command_is_an_internal_error(fault: str) -> None:
    """Guards against candidates ranked by the scores of another batch."""
    batch = [c.Candidate(0, "one", 1, -1.0), c.Candidate(1, "two", 1, -1.0)]
    async with (
        serving(Rogue(fault).service()) as channel,
        RemoteRewards(channel).open("toy", PROMPT) as session,
    ):
        with pytest.raises(InternalError, match="another command"):
            await session.score(batch)


# Remote backends that refuse connections, send nothing, or end in the middle of a session


async def test_a_refused_connection_is_unavailable() -> None:
    """Guards against a wait for the connection, and against grpc's own text, which has the
    backend's address."""
    with world.dead_port() as port:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            generator, rewards = RemoteGenerator(channel), RemoteRewards(channel)
            enter = AsyncExitStack().enter_async_context
            calls = (
                generator.describe,
                rewards.describe,
                lambda: enter(generator.open(SPEC)),
                lambda: enter(rewards.open("toy", PROMPT)),
            )
            for call in calls:
                with pytest.raises(Unavailable) as raised:
                    await asyncio.wait_for(call(), world.BOUND_S)
                assert raised.value.message == "a backend cannot be reached"


async def test_a_backend_that_sends_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against DEADLINE_EXCEEDED for a caller with time left; the planner uses the last
    description instead. A stopped process accepts connections and sends nothing."""
    monkeypatch.setattr(remote, "_DESCRIBE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(address) as channel:
            for describe in (RemoteGenerator(channel).describe, RemoteRewards(channel).describe):
                with pytest.raises(Unavailable):
                    await describe()
            last = _LastDescription(RemoteGenerator(channel).describe)
            last._last = description = await ToyGenerator().describe()
            assert await last.get() is description


def broken_call(*trailers: tuple[str, bytes]) -> Any:
    """A call that is INTERNAL; without trailers it is one whose status grpc has dropped."""
    metadata = grpc.aio.Metadata(), grpc.aio.Metadata(*trailers)
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, *metadata, "from Core")
    return SimpleNamespace(write=AsyncMock(side_effect=error), cancel=lambda: None)


@pytest.mark.parametrize(
    ("trailers", "num_broken", "num_started", "error", "message"),
    [
        ((), 1, 2, InvalidRequest, "n:"),
        ((), 2, 3, InvalidRequest, "n:"),
        # INTERNAL is what grpc reports for a stream that breaks inside a write.
        ((), 9, 1, Unavailable, "ended the stream"),
        # A defect of the peer is not met once per start of the stream.
        (((DETAILS_TRAILER, b""),), 9, 1, InternalError, ""),
    ],
)
async def test_the_status_of_a_stream_that_breaks_before_the_first_write(
    service: world.World,
    monkeypatch: pytest.MonkeyPatch,
    trailers: Sequence[tuple[str, bytes]],
    num_broken: int,
    num_started: int,
    error: type[SpecrejError],
    message: str,
) -> None:
    """Guards against UNAVAILABLE in place of the peer's status, which grpc drops if the stream ends
    before a write: the stream is started again until the status arrives."""
    if error is Unavailable:
        monkeypatch.setattr(remote, "_RESTART_PAUSES_S", ())
    generator, started = service.remote_generator, list[Any]()
    start = generator._stub.Session

    def broken_first(**options: Any) -> Any:
        is_broken = len(started) < num_broken
        started.append(broken_call(*trailers) if is_broken else start(**options))
        return started[-1]

    generator._stub.Session = broken_first
    raised = await error_of_open(generator, 10**6)
    assert type(raised) is error and message in str(raised)
    assert len(started) == num_started


async def test_a_session_with_an_abandoned_command_is_unavailable(service: world.World) -> None:
    """Guards against CancelledError in a task that is not cancelled: the request had CANCELLED."""
    with pytest.raises(Unavailable, match="abandoned"):
        async with service.remote_generator.open(SPEC) as session:
            await ended(await service.generator.gates["extend"].hold(session.extend(8)))
            await session.prune([0])


async def test_a_command_after_a_failed_one_has_its_status(service: world.World) -> None:
    """Guards against UNAVAILABLE in place of the status of a stride ahead of a cut."""
    with pytest.raises(InvalidRequest):
        async with service.remote_generator.open(SPEC) as session:
            with pytest.raises(InvalidRequest):
                await session.extend(10**6)
            await session.prune([0])


async def test_a_generator_that_ends_while_it_closes_costs_no_answer(service: world.World) -> None:
    """Guards against an error in place of a complete answer."""
    answering = await service.generator.gates["close"].hold(
        answer(request(12), service.remote_generator, LikelihoodScorer())
    )
    await service.generator_server.kill()
    assert (await answering).candidates
