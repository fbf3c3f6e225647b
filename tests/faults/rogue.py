"""Other people's reward services, which talk rubbish over the real wire: one of gRPC, one of HTTP.

All answer the warm-up of a worker as they should. What they do to other batches goes by the name of
the reward that is asked for. Knows no service but its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio

from specrej.v1 import reward_pb2 as pb
from specrej.v1 import reward_pb2_grpc
from tests.faults.proxy import HOST

_WARM_UP = ["Hello."]
_LENGTH = b"content-length:"


def _raise() -> pb.ScoreSessionResponse:
    """Grpc makes UNKNOWN of it, with this text."""
    raise RuntimeError("secret: /srv/rogue.py")


def _scores(values: Sequence[float]) -> pb.ScoreSessionResponse:
    return pb.ScoreSessionResponse(scores=pb.BatchScores(scores=values))


def _numbered(answer: pb.ScoreSessionResponse, sequence: int) -> pb.ScoreSessionResponse:
    answer.sequence = sequence
    return answer


# To the batch with a number and so many texts.
OVER_GRPC: Mapping[str, Callable[[int, int], pb.ScoreSessionResponse]] = {
    "too_few": lambda sequence, n: _numbered(_scores([1.0] * (n - 1)), sequence),
    "too_many": lambda sequence, n: _numbered(_scores([1.0] * (n + 1)), sequence),
    # Scores go by the place of their texts in a batch, and by the batch's number.
    "wrong_ids": lambda sequence, n: _numbered(_scores([1.0] * n), sequence - 1),
    "no_scores": lambda sequence, _: pb.ScoreSessionResponse(sequence=sequence),
    "stale": lambda sequence, _: pb.ScoreSessionResponse(
        sequence=sequence, stale=pb.StaleScoring()
    ),
    "raising": lambda *_: _raise(),
}
OVER_HTTP: Mapping[str, Callable[[int], str]] = {
    "too_few": lambda n: json.dumps({"scores": [1.0] * (n - 1)}),
    "too_many": lambda n: json.dumps({"scores": [1.0] * (n + 1)}),
    # By an id of their own: numbers, but not the scores.
    "wrong_ids": lambda n: json.dumps({"scores": {str(number): 0.5 for number in range(n)}}),
    "no_scores": lambda n: json.dumps({"scores": "1" * n}),
    "deep": lambda _: "[" * 100_000,
    "huge": lambda n: json.dumps({"scores": [10**400] * n}),
}


class _Rogue(reward_pb2_grpc.RewardServiceServicer):
    """`only`: does this, whatever reward is asked for."""

    def __init__(self, only: str = "") -> None:
        self._only = only

    async def Describe(  # noqa: N802
        self, request: pb.RewardServiceDescribeRequest, context: Any
    ) -> pb.RewardServiceDescribeResponse:
        names = ["toy"] if self._only else OVER_GRPC
        return pb.RewardServiceDescribeResponse(
            rewards=[pb.RewardDescription(name=n, fingerprint="f", max_batch=1024) for n in names]
        )

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:  # noqa: N802
        raise NotImplementedError  # nobody of ours calls it

    # As our own servicers: a coroutine.
    async def ScoreSession(  # type: ignore[override]  # noqa: N802
        self, _: AsyncIterator[pb.ScoreSessionRequest], context: Any
    ) -> None:
        name = ""
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.WhichOneof("command") == "open":
                name = self._only or request.open.reward
                opened = pb.ScoringOpened(fingerprint="f")
                answer = pb.ScoreSessionResponse(sequence=request.sequence, opened=opened)
            else:
                answer = _answer(name, request)
            await context.write(answer)


def _answer(name: str, request: pb.ScoreSessionRequest) -> pb.ScoreSessionResponse:
    texts = [candidate.text for candidate in request.batch.candidates]
    if texts == _WARM_UP:
        return _numbered(_scores([0.0]), request.sequence)
    return OVER_GRPC[name](request.sequence, len(texts))


@asynccontextmanager
async def grpc_rogue(only: str = "") -> AsyncIterator[int]:
    """A port where rewards of all these names are served, or one "toy" that does `only` this."""
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(_Rogue(only), server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def http_rogue() -> AsyncIterator[int]:
    """A port where each of these names is a path."""
    async with await asyncio.start_server(_serve, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one answer: all that a client needs who is told that there will be no more."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        name = head.split(b" ")[1].strip(b"/").decode()
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(_LENGTH)]
        asked = json.loads(await reader.readexactly(int(lengths[0].removeprefix(_LENGTH))))
        texts = asked["responses"]
        body = '{"scores": [0]}' if texts == _WARM_UP else OVER_HTTP[name](len(texts))
        told = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        writer.write(told.encode())
        await writer.drain()
    writer.close()
