"""A foreign reward service that violates the protocol over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1 import reward_pb2_grpc
from tests.faults.proxy import HOST

# By fault: how the answer's number differs from that of its batch, and the answer's fields.
_FAULTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "wrong_ids": (-1, {"scores": pb.BatchScores(scores=[0.0] * 2)}),
    "no_scores": (0, {}),
    "stale": (0, {"stale": pb.StaleScoring()}),
}


class _Rogue(reward_pb2_grpc.RewardServiceServicer):
    def __init__(self, fault: str) -> None:
        self._offset, self._fields = _FAULTS[fault]

    async def Describe(  # noqa: N802
        self, request: pb.RewardServiceDescribeRequest, context: Any
    ) -> pb.RewardServiceDescribeResponse:
        toy = pb.RewardDescription(name="toy", fingerprint="f", max_batch=1024)
        return pb.RewardServiceDescribeResponse(rewards=[toy])

    # A coroutine handler, like specrej's servicers.
    async def ScoreSession(  # type: ignore[override]  # noqa: N802
        self, _: AsyncIterator[pb.ScoreSessionRequest], context: Any
    ) -> None:
        number = (await context.read()).sequence
        opened = pb.ScoringOpened(fingerprint="f")
        await context.write(pb.ScoreSessionResponse(sequence=number, opened=opened))
        number = (await context.read()).sequence + self._offset
        await context.write(pb.ScoreSessionResponse(sequence=number, **self._fields))
        await context.read()


@asynccontextmanager
async def grpc_rogue(fault: str) -> AsyncIterator[int]:
    """Serve the reward "toy", whose answers to batches of two have the fault; yield the port."""
    server = grpc.aio.server()
    rogue = _Rogue(fault)  # type: ignore[abstract]
    reward_pb2_grpc.add_RewardServiceServicer_to_server(rogue, server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
