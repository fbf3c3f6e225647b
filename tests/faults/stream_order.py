"""Order on the session stream: commands that come too early, twice, late or for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc.aio

from specrej.channel import open_channel
from specrej.v1 import common_pb2, generator_pb2_grpc
from specrej.v1 import generator_pb2 as pb
from tests.faults.case import Case, here, not_here
from tests.faults.http2 import data_after_the_end
from tests.faults.world import World

_OPEN = pb.OpenSession(
    prompt=common_pb2.Prompt(text="a prompt of five words"),
    n=4,
    sampling=common_pb2.Sampling(max_tokens=20, seed=1, ignore_eos=True),
    first_round_tokens=4,
)
_EXTEND = pb.ExtendSession(until_tokens=4)


class Talk(Protocol):
    """Commands and what must come of them; gives back the stream's code."""

    def __call__(self, session: Session, /) -> Awaitable[None]: ...


class Session:
    """A session stream, command by command."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        self.call = stub.Session(timeout=15)
        self._sequence = 0

    async def ask(self, *, sequence: int = 0, **command: Any) -> pb.SessionResponse:
        """Send a command, give back its answer; raises AioRpcError."""
        self._sequence += 1
        await self.call.write(pb.SessionRequest(sequence=sequence or self._sequence, **command))
        answer: pb.SessionResponse = await self.call.read()
        return answer

    async def end(self) -> None:
        """Half-close, and wait for the end."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


async def talk(commands: Talk, world: World) -> list[str]:
    """A conversation with the generator, straight at its port."""
    async with open_channel(world.stack.generator_address, retries=False) as channel:
        session = Session(channel)
        try:
            await commands(session)
        except grpc.aio.AioRpcError as error:
            return [str(error.code().name)]
        return [str((await session.call.code()).name)]


async def extend_first(session: Session) -> None:
    await session.ask(extend=_EXTEND)


async def prune_first(session: Session) -> None:
    await session.ask(prune=pb.PruneSession(keep=[0]))


async def open_twice(session: Session) -> None:
    await session.ask(open=_OPEN)
    await session.ask(open=_OPEN)


async def prune_odd_ids(session: Session) -> None:
    """Ids that were never issued, that come twice, that are gone: only those that live count."""
    await session.ask(open=_OPEN)
    await session.ask(extend=_EXTEND)
    pruned = (await session.ask(prune=pb.PruneSession(keep=[1, 1, 2, 99, -5]))).pruned
    assert pruned.freed_slots == 2 * 4, pruned
    again = (await session.ask(prune=pb.PruneSession(keep=[0, 1, 2]))).pruned
    assert again.freed_slots == 0, again
    grown = (await session.ask(extend=pb.ExtendSession(until_tokens=8))).prefix_batch
    assert [prefix.candidate_id for prefix in grown.prefixes] == [1, 2]
    await session.end()


async def prune_finished(session: Session) -> None:
    await session.ask(open=_OPEN)
    await session.ask(extend=pb.ExtendSession(until_tokens=20))
    assert (await session.ask(prune=pb.PruneSession(keep=[0]))).pruned.freed_slots == 0
    await session.end()


async def keep_none(session: Session) -> None:
    await session.ask(open=_OPEN)
    await session.ask(extend=_EXTEND)
    assert (await session.ask(prune=pb.PruneSession())).pruned.freed_slots == 4 * 4
    grown = (await session.ask(extend=pb.ExtendSession(until_tokens=8))).prefix_batch
    assert grown.ended_by == pb.ROUND_END_ALL_FINISHED
    await session.end()


async def keep_all(session: Session) -> None:
    await session.ask(open=_OPEN)
    await session.ask(extend=_EXTEND)
    assert (await session.ask(prune=pb.PruneSession(keep=range(4)))).pruned.freed_slots == 0
    await session.end()


async def old_number(session: Session) -> None:
    """Repeated: the same answer again; older: stale; neither does anything."""
    await session.ask(open=_OPEN)
    grown = await session.ask(extend=_EXTEND)
    assert await session.ask(extend=_EXTEND, sequence=2) == grown
    assert (await session.ask(open=_OPEN, sequence=1)).WhichOneof("result") == "stale"
    await session.end()


async def end_without_close(session: Session) -> None:
    await session.ask(open=_OPEN)
    await session.ask(extend=_EXTEND)
    await session.end()


async def idle_past_the_lease(session: Session) -> None:
    """The slots are free before the late message comes."""
    await session.ask(open=_OPEN)
    await session.call.code()
    with_lease = await session.call.code()
    assert with_lease is grpc.StatusCode.FAILED_PRECONDITION
    await session.call.read()


async def after_half_close(world: World) -> list[str]:
    """No client library sends this, so it is made of bytes."""
    host, port = world.stack.generator_address.split(":")
    message = pb.SessionRequest(sequence=1, open=_OPEN).SerializeToString()
    path = "/specrej.v1.GeneratorService/Session"
    return [await asyncio.wait_for(data_after_the_end(host, int(port), path, message), 10)]


_TALKS: dict[str, tuple[Callable[[Session], Awaitable[None]], str]] = {
    "extend-before-open": (extend_first, "FAILED_PRECONDITION"),
    "prune-before-open": (prune_first, "FAILED_PRECONDITION"),
    "open-twice": (open_twice, "FAILED_PRECONDITION"),
    "prune-unknown-duplicate-never-issued": (prune_odd_ids, "OK"),
    "prune-finished": (prune_finished, "OK"),
    "empty-keep": (keep_none, "OK"),
    "keep-all": (keep_all, "OK"),
    "older-sequence-number": (old_number, "OK"),
    "half-close-without-close": (end_without_close, "OK"),
    "idle-past-lease": (idle_past_the_lease, "FAILED_PRECONDITION"),
}

CASES: tuple[Case, ...] = (
    *(
        here(f"order/{name}", partial(talk, commands), code, fast=name != "idle-past-lease")
        for name, (commands, code) in _TALKS.items()
    ),
    here("order/after-half-close", after_half_close, "RST_STREAM", "GOAWAY", "OK", fast=True),
    not_here(
        "order/another-sessions-id",
        "cannot happen: a session is its stream, no message names one",
    ),
)
