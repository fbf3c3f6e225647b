"""Bad and unusual input at real ports, once; each port's own tests have all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

import grpc.aio

from specrej.backend.v1 import generator_pb2 as pb
from specrej.backend.v1 import generator_pb2_grpc
from specrej.client.channel import open_channel
from specrej.contracts import Prompt
from specrej.contracts.validation import MAX_PUBLIC_MESSAGE_BYTES
from specrej.v1 import common_pb2
from tests import http2
from tests.faults.case import Case, case
from tests.faults.world import CALL_S, World, request
from tests.serving import part

# Options of requests, and the codes with which these end.
_REQUESTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "megabyte": ({"prompt": Prompt(text="x" * 1_000_000), "max_tokens": 2}, "OK"),
    "more-than-a-megabyte": ({"prompt": Prompt(text="x" * 1_000_001)}, "INVALID_ARGUMENT"),
    "most-candidates": ({"n": 1024, "max_tokens": 2}, "OK"),
    "unusual": ({"prompt": Prompt(text="a\0 \u202e \U0001f468\u200d\U0001f469 e\u0301</s>")}, "OK"),
    "no-deadline": ({"timeout_s": None}, "OK"),
    "past-deadline": ({"timeout_s": 0}, "DEADLINE_EXCEEDED"),
}
_OPEN = pb.OpenSession(
    prompt=common_pb2.Prompt(text="a prompt of five words"),
    n=4,
    sampling=common_pb2.Sampling(max_tokens=20, ignore_eos=True),
    first_round_tokens=4,
)


async def send(options: Mapping[str, Any], world: World) -> list[str]:
    """Send a request with these options."""
    return [(await world.generate(**options)).code]


async def sized(num_more: int, world: World) -> list[str]:
    """A valid request, made by a field of a later version so many bytes larger than allowed."""
    data = request().SerializeToString()
    num_bytes = MAX_PUBLIC_MESSAGE_BYTES + num_more - len(data)
    data += part(1000, bytes(2 * num_bytes - len(part(1000, bytes(num_bytes)))))
    address = world.addresses["orchestrator"]
    async with open_channel(address, retries=False, max_message_bytes=2**31 - 1) as channel:
        call: Any = channel.unary_unary("/specrej.v1.OrchestratorService/Generate")
        try:
            await call(data, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return [error.code().name]
    return ["OK"]


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
    """Send a message after the half-close by HTTP/2 frames, as no gRPC client can: the server
    replies and ends the stream normally."""
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
    kinds, is_over = [], False
    try:
        async with asyncio.timeout(10):
            while not is_over:
                kind, flags, stream = await http2.read_frame(reader)
                if stream == 1:
                    kinds.append(kind)
                    is_over = kind == http2.RST_STREAM or bool(flags & http2.END_STREAM)
    finally:
        writer.transport.abort()
    assert kinds == [http2.HEADERS, http2.DATA, http2.HEADERS], f"frames {kinds}"
    return ["OK"]


CASES: tuple[Case, ...] = (
    *(
        case(f"wire/{name}", partial(send, options), code, fast=True)
        for name, (options, code) in _REQUESTS.items()
    ),
    case("wire/largest-message", partial(sized, 0), "OK", fast=True),
    case("wire/too-large-message", partial(sized, 1), "RESOURCE_EXHAUSTED", fast=True),
    case("wire/prune-any-ids", prune_any_ids, "OK", fast=True),
    case("wire/after-half-close", after_half_close, "OK", fast=True),
)
