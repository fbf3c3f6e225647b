"""Order on the session stream of a real process: a lease that expires, a message too late."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from specrej.channel import open_channel
from specrej.v1 import common_pb2, generator_pb2_grpc
from specrej.v1 import generator_pb2 as pb
from tests.faults.case import Case, here
from tests.faults.world import World

_OPEN = pb.SessionRequest(
    sequence=1,
    open=pb.OpenSession(
        prompt=common_pb2.Prompt(text="a prompt of five words"),
        n=4,
        sampling=common_pb2.Sampling(max_tokens=20, ignore_eos=True),
        first_round_tokens=4,
    ),
)
# HTTP/2: types and flags of frames.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4


Send = Callable[..., Awaitable[pb.SessionResponse]]


@asynccontextmanager
async def _opened(world: World) -> AsyncIterator[tuple[Any, Send]]:
    """Open a session; yield its stream, and a function that sends a command."""
    async with open_channel(world.stack.generator_address, retries=False) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        call, numbers = stub.Session(timeout=15), count(2)

        async def send(**command: Any) -> pb.SessionResponse:
            await call.write(pb.SessionRequest(sequence=next(numbers), **command))
            reply: pb.SessionResponse = await call.read()
            return reply

        await call.write(_OPEN)
        await call.read()
        yield call, send


async def idle_past_the_lease(world: World) -> list[str]:
    """The lease of a silent client expires."""
    async with _opened(world) as (call, _):
        return [(await call.code()).name]


async def prune_any_ids(world: World) -> list[str]:
    """Only live ids count: of all, unknown, repeated, rejected and finished ones.

    A half-close ends the session.
    """
    async with _opened(world) as (call, send):
        await send(extend=pb.ExtendSession(until_tokens=4))
        for keep, num_freed in (([0, 1, 2, 3], 0), ([1, 1, 2, 99, -5], 2), ([0, 1, 2], 0)):
            pruned = (await send(prune=pb.PruneSession(keep=keep))).pruned
            assert pruned.freed_slots == 4 * num_freed, keep
        grown = (await send(extend=pb.ExtendSession(until_tokens=20))).prefix_batch
        assert [prefix.candidate_id for prefix in grown.prefixes] == [1, 2]
        assert (await send(prune=pb.PruneSession(keep=[2]))).pruned.freed_slots == 0
        await call.done_writing()
        return [(await call.code()).name]


async def keep_none(world: World) -> list[str]:
    """A session without live candidates ends its rounds at once."""
    async with _opened(world) as (call, send):
        await send(extend=pb.ExtendSession(until_tokens=4))
        assert (await send(prune=pb.PruneSession())).pruned.freed_slots == 4 * 4
        grown = (await send(extend=pb.ExtendSession(until_tokens=8))).prefix_batch
        assert grown.ended_by == pb.ROUND_END_ALL_FINISHED
        await call.done_writing()
        return [(await call.code()).name]


async def after_half_close(world: World) -> list[str]:
    """Send a message after the half-close by HTTP/2 frames, as no gRPC client can."""
    host, port = world.stack.generator_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = _OPEN.SerializeToString()
    message = b"\0" + struct.pack(">I", len(data)) + data
    writer.write(
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, _header_block(f"{host}:{port}"))
        + _frame(_DATA, _END_STREAM, 1, message)
        + _frame(_DATA, 0, 1, message)
    )
    try:
        return [await asyncio.wait_for(_end_of_stream(reader), 10)]
    finally:
        writer.transport.abort()


async def _end_of_stream(reader: asyncio.StreamReader) -> str:
    """Return RST_STREAM, GOAWAY, or OK if the server ends the stream normally."""
    while True:
        try:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
        except asyncio.IncompleteReadError:  # the connection was closed
            return "GOAWAY"
        kind, flags = head[3], head[4]
        if kind in (_RST_STREAM, _GOAWAY):
            return "RST_STREAM" if kind == _RST_STREAM else "GOAWAY"
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return "OK"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header_block(authority: str) -> bytes:
    """Encode headers by HPACK as uncompressed literals without indexing."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/specrej.v1.GeneratorService/Session",
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


_OUT_OF_ORDER = "test_commands_out_of_order"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("extend-before-open", "prune-before-open", "open-twice"), _OUT_OF_ORDER),
    "older-sequence-number": "test_repeated_and_old_numbers_change_nothing",
}

CASES: tuple[Case, ...] = (
    here("order/idle-past-lease", idle_past_the_lease, "FAILED_PRECONDITION"),
    here("order/prune-any-ids", prune_any_ids, "OK", fast=True),
    here("order/empty-keep", keep_none, "OK", fast=True),
    here("order/after-half-close", after_half_close, "RST_STREAM", "GOAWAY", "OK", fast=True),
    *(
        Case(f"order/{name}", elsewhere=f"tests/generator_service/test_servicer.py::{test}")
        for name, test in _ELSEWHERE.items()
    ),
    Case(
        "order/another-sessions-id",
        not_here="cannot happen: a session is its stream, no message names one",
    ),
)
