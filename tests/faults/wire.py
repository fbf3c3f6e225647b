"""The largest message at a real port."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc.aio

from specrej.client.channel import open_channel
from specrej.contracts.validation import MAX_PUBLIC_MESSAGE_BYTES
from tests.faults.case import Case, case
from tests.faults.world import CALL_S, World, request
from tests.serving import part


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


CASES: tuple[Case, ...] = (
    case("wire/largest-message", partial(sized, 0), "OK", fast=True),
    case("wire/too-large-message", partial(sized, 1), "RESOURCE_EXHAUSTED", fast=True),
)
