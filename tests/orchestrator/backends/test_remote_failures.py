"""Remote backends that refuse connections, send nothing, or end in the middle of a session."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest

from generator_service.toy import ToyGenerator
from orchestrator.edge.planning import _LastDescription
from orchestrator.loop.scoring import LikelihoodScorer
from specrej import remote
from specrej.client.channel import open_channel
from specrej.contracts import Sampling, SessionSpec
from specrej.contracts.errors import InternalError, InvalidRequest, Unavailable
from specrej.contracts.status import DETAILS_TRAILER
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.threads import ended
from tests.orchestrator.runs import PROMPT, answer, request
from tests.world import BOUND_S, World, dead_port


async def test_a_refused_connection_is_unavailable() -> None:
    """Guards against a wait for the connection, and against grpc's own text, which has the
    backend's address."""
    with dead_port() as port:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            generator, rewards = RemoteGenerator(channel), RemoteRewards(channel)
            enter = AsyncExitStack().enter_async_context
            calls = (
                generator.describe,
                rewards.describe,
                lambda: enter(generator.open(SessionSpec(PROMPT, 4, Sampling(), 8))),
                lambda: enter(rewards.open("toy", PROMPT)),
            )
            for call in calls:
                with pytest.raises(Unavailable) as raised:
                    await asyncio.wait_for(call(), BOUND_S)
                assert raised.value.message == "a backend cannot be reached"


async def test_a_backend_that_sends_nothing_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_a_stream_that_stays_broken_is_unavailable(
    service: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against INTERNAL, which grpc reports for a stream that breaks inside a write."""
    monkeypatch.setattr(remote, "_RESTART_PAUSES_S", ())
    service.remote_generator._stub.Session = lambda **_: _BrokenCall()
    with pytest.raises(Unavailable, match="ended the stream"):
        async with service.remote_generator.open(SessionSpec(PROMPT, 4, Sampling(), 8)):
            pass


@pytest.mark.parametrize("num_dropped", [1, 2])
async def test_the_status_of_a_stream_refused_before_the_first_write(
    service: World, num_dropped: int
) -> None:
    """Guards against UNAVAILABLE in place of the peer's status, which grpc drops if the stream ends
    before a write: the stream is started again until the status arrives."""
    generator = service.remote_generator
    start = generator._stub.Session
    started: list[Any] = []

    def broken_first(**options: Any) -> Any:
        is_broken = len(started) < num_dropped
        started.append(_BrokenCall() if is_broken else start(**options))
        return started[-1]

    generator._stub.Session = broken_first
    spec = SessionSpec(PROMPT, 10**6, Sampling(), 8)
    with pytest.raises(InvalidRequest, match="n:"):
        await AsyncExitStack().enter_async_context(generator.open(spec))
    assert len(started) == num_dropped + 1


async def test_an_internal_error_of_the_peer_is_not_tried_again(service: World) -> None:
    """Guards against a defect of a backend that is met once per start of the stream."""
    started = []

    def broken(**_: Any) -> Any:
        started.append(_BrokenCall((DETAILS_TRAILER, b"")))
        return started[-1]

    service.remote_generator._stub.Session = broken
    with pytest.raises(InternalError):
        async with service.remote_generator.open(SessionSpec(PROMPT, 4, Sampling(), 8)):
            pass
    assert len(started) == 1


class _BrokenCall:
    """A call that is INTERNAL; without trailers it is one whose status grpc has dropped."""

    def __init__(self, *trailers: tuple[str, bytes]) -> None:
        self._trailers = grpc.aio.Metadata(*trailers)

    async def write(self, _: object) -> None:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), self._trailers, "from Core"
        )

    def cancel(self) -> None:
        pass


async def test_a_session_with_an_abandoned_command_is_unavailable(service: World) -> None:
    """Guards against CancelledError in a task that is not cancelled: the request had CANCELLED."""
    with pytest.raises(Unavailable, match="abandoned"):
        async with service.remote_generator.open(SessionSpec(PROMPT, 4, Sampling(), 8)) as session:
            await ended(await service.generator.gates["extend"].hold(session.extend(8)))
            await session.prune([0])


async def test_a_command_after_a_failed_one_has_its_status(service: World) -> None:
    """Guards against UNAVAILABLE in place of the status of a stride ahead of a cut."""
    with pytest.raises(InvalidRequest):
        async with service.remote_generator.open(SessionSpec(PROMPT, 4, Sampling(), 8)) as session:
            with pytest.raises(InvalidRequest):
                await session.extend(10**6)
            await session.prune([0])


async def test_a_generator_that_ends_while_it_closes_a_session_costs_no_answer(
    service: World,
) -> None:
    """Guards against an error in place of a complete answer."""
    answering = await service.generator.gates["close"].hold(
        answer(request(12), service.remote_generator, LikelihoodScorer())
    )
    await service.generator_server.kill()
    assert (await answering).candidates
