"""Order on the session stream of a real process: cuts of any ids, a message too late."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any

from specrej.backend.v1 import generator_pb2 as pb
from specrej.backend.v1 import generator_pb2_grpc
from specrej.client.channel import open_channel
from specrej.v1 import common_pb2
from tests import http2
from tests.faults.case import Case, here
from tests.faults.world import World

_OPEN = pb.OpenSession(
    prompt=common_pb2.Prompt(text="a prompt of five words"),
    n=4,
    sampling=common_pb2.Sampling(max_tokens=20, ignore_eos=True),
    first_round_tokens=4,
)


async def prune_any_ids(world: World) -> list[str]:
    """Only live ids count: of all, unknown, repeated, rejected and finished ones.

    A half-close ends the session.
    """
    async with open_channel(world.stack.generator_address, retries=False) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        call, numbers = stub.Session(timeout=15), count(1)

        async def send(**command: Any) -> pb.SessionResponse:
            await call.write(pb.SessionRequest(sequence=next(numbers), **command))
            reply: pb.SessionResponse = await call.read()
            return reply

        await send(open=_OPEN)
        await send(extend=pb.ExtendSession(until_tokens=4))
        for keep, num_freed in (([0, 1, 2, 3], 0), ([1, 1, 2, 99, -5], 2), ([0, 1, 2], 0)):
            pruned = (await send(prune=pb.PruneSession(keep=keep))).pruned
            assert pruned.freed_slots == 4 * num_freed, keep
        grown = (await send(extend=pb.ExtendSession(until_tokens=20))).prefix_batch
        assert [prefix.candidate_id for prefix in grown.prefixes] == [1, 2]
        assert (await send(prune=pb.PruneSession(keep=[2]))).pruned.freed_slots == 0
        await call.done_writing()
        return [(await call.code()).name]


async def after_half_close(world: World) -> list[str]:
    """Send a message after the half-close by HTTP/2 frames, as no gRPC client can."""
    host, port = world.stack.generator_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    message = http2.message(pb.SessionRequest(sequence=1, open=_OPEN).SerializeToString())
    head = http2.headers("/specrej.backend.v1.GeneratorService/Session", f"{host}:{port}")
    writer.write(
        http2.PREFACE
        + http2.frame(http2.SETTINGS, 0, 0, b"")
        + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, head)
        + http2.frame(http2.DATA, http2.END_STREAM, 1, message)
        + http2.frame(http2.DATA, 0, 1, message)
    )
    try:
        return [await asyncio.wait_for(_end_of_stream(reader), 10)]
    finally:
        writer.transport.abort()


async def _end_of_stream(reader: asyncio.StreamReader) -> str:
    """Return OK if the server replies and ends the stream normally."""
    kinds, is_over = [], False
    while not is_over:
        kind, flags, stream = await http2.read_frame(reader)
        if stream == 1:
            kinds.append(kind)
            is_over = kind == http2.RST_STREAM or bool(flags & http2.END_STREAM)
    assert kinds == [http2.HEADERS, http2.DATA, http2.HEADERS], f"frames {kinds}"
    return "OK"


_SERVICER = "generator_service/test_servicer.py"
_OUT_OF_ORDER = f"{_SERVICER}::test_commands_out_of_order"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("extend-before-open", "prune-before-open", "open-twice"), _OUT_OF_ORDER),
    "older-sequence-number": f"{_SERVICER}::test_repeated_and_old_numbers_change_nothing",
    "idle-past-lease": f"{_SERVICER}::test_a_session_without_commands_ends_with_its_lease",
    "empty-keep": "conformance/test_generators.py::test_rounds_without_live_candidates_are_empty",
}

CASES: tuple[Case, ...] = (
    here("order/prune-any-ids", prune_any_ids, "OK", fast=True),
    here("order/after-half-close", after_half_close, "OK", fast=True),
    *(Case(f"order/{name}", elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
    Case(
        "order/another-sessions-id",
        not_here="cannot happen: a session is its stream, no message names one",
    ),
)
