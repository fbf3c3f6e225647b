"""Requests to the public port, and their answers and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from specrej.contracts import Generation, wire
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import BOUND_S, Whole, timeless_answer
from tests.serving import failure_of

Code = grpc.StatusCode
SERVICE = "specrej.v1.OrchestratorService"
PROMPT = common_pb2.Prompt(text="four words of prompt")


def small_request(
    *,
    prompt: common_pb2.Prompt = PROMPT,
    sampling: dict[str, Any] | None = None,
    selection: dict[str, Any] | None = None,
    **changes: Any,
) -> pb.GenerateRequest:
    """A small request; arguments replace some of its fields."""
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.Sampling(**{"max_tokens": 40, "seed": 7} | (sampling or {})),
        selection=pb.Selection(**{"n": 12} | (selection or {})),
        **changes,
    )


def seeded(seed: int) -> pb.GenerateRequest:
    return small_request(sampling={"seed": seed})


async def answer(
    service: Whole, message: pb.GenerateRequest, *, stream: bool = False, tenant: str = ""
) -> pb.GenerateResponse:
    """The answer to a request, by Generate or GenerateStream."""
    if stream:
        return (await events(service, message))[-1].finished
    metadata = (("specrej-tenant", tenant),) if tenant else ()
    reply: pb.GenerateResponse = await service.stub.Generate(
        message, metadata=metadata, timeout=BOUND_S
    )
    return reply


async def events(service: Whole, message: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
    call = service.stub.GenerateStream(pb.GenerateStreamRequest(request=message), timeout=BOUND_S)
    return [event async for event in call]


async def refusal(
    service: Whole, message: pb.GenerateRequest, *, stream: bool = False
) -> grpc.aio.AioRpcError:
    return await failure_of(answer(service, message, stream=stream))


def generation(reply: pb.GenerateResponse) -> Generation:
    """An answer without durations and the request's id."""
    return timeless_answer(wire.generation_from_message(reply))


# `end_every` of a generator, and so its fingerprint, per test: tests share no cached answers.
ENDS = iter(range(30, 10**6))
BATCH = pb.Normalization(kind=pb.NORMALIZATION_KIND_BATCH)
ALL = {"algorithm": pb.ALGORITHM_BEST_OF_N, "return_candidates": 64}


async def answer_when_available(service: Whole, message: pb.GenerateRequest) -> pb.GenerateResponse:
    """The answer, once the backends are available again."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await answer(service, message)
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.UNAVAILABLE


def rewards(*parts: tuple[str, float]) -> dict[str, Any]:
    return {"rewards": [pb.WeightedReward(name=name, weight=weight) for name, weight in parts]}


async def held(service: Whole, message: pb.GenerateRequest) -> asyncio.Task[pb.GenerateResponse]:
    """A request that stays in its first round until the gate opens."""
    return await service.generator.gates["extend"].hold(answer(service, message))
