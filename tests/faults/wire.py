"""The largest message at a real port, and a message that no gRPC client can send."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc.aio

from specrej.backend.v1 import generator_pb2 as pb
from specrej.client.channel import open_channel
from specrej.contracts.validation import MAX_PUBLIC_MESSAGE_BYTES
from specrej.v1 import common_pb2
from tests import http2
from tests.faults.case import Case, case
from tests.faults.world import CALL_S, World, request
from tests.serving import part

_OPEN = pb.OpenSession(
    prompt=common_pb2.Prompt(text="a prompt of five words"),
    n=4,
    sampling=common_pb2.Sampling(max_tokens=20, ignore_eos=True),
    first_round_tokens=4,
)


async def sized(num_more: int, world: World) -> list[str]:
    """A valid request, made by a field of a later version so many bytes larger than allowed."""
    data = request().SerializeToString()
    num_bytes = MAX_PUBLIC_MESSAGE_BYTES + num_more - len(data)
    data += part(1000, bytes(2 * num_bytes - len(part(1000, bytes(num_bytes)))))
    address = world.addresses["orchestrator"]
    async with open_channel(address, max_message_bytes=2**31 - 1) as channel:
        call: Any = channel.unary_unary("/specrej.v1.OrchestratorService/Generate")
        try:
            await call(data, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return [error.code().name]
    return ["OK"]


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
    case("wire/largest-message", partial(sized, 0), "OK", fast=True),
    case("wire/too-large-message", partial(sized, 1), "RESOURCE_EXHAUSTED", fast=True),
    case("wire/after-half-close", after_half_close, "OK", fast=True),
)
