"""The public gRPC port: unpacks requests, calls the orchestrator, packs its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from orchestrator.background import packed
from orchestrator.edge.service import Orchestrator
from specrej import wire
from specrej.contracts import Event, Finished, RequestRecord
from specrej.errors import InternalError, Violation
from specrej.security import current_caller
from specrej.serving import Context, Service, time_left_s
from specrej.v1 import orchestrator_pb2 as pb
from specrej.v1 import orchestrator_pb2_grpc


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """`specrej.v1.OrchestratorService`."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def service(self) -> Service:
        """This servicer, for `specrej.serving.Server`."""
        return Service(
            pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
                self, server
            ),
        )

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        async with aclosing(self._events(request, context)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return await packed(_answer_reply, event)
        raise InternalError("a run ended without an answer")

    # A coroutine, although the stubs declare an async generator; specrej/serving.py has the reason.
    async def GenerateStream(  # type: ignore[override] # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        async with aclosing(self._events(request.request, context)) as events:
            async for event in events:
                await context.write(await packed(wire.event_to_message, event))

    async def Describe(  # noqa: N802
        self, request: pb.OrchestratorServiceDescribeRequest, context: Context
    ) -> pb.OrchestratorServiceDescribeResponse:
        return wire.to_message(
            await self._orchestrator.describe(), pb.OrchestratorServiceDescribeResponse
        )

    async def GetRecord(  # noqa: N802
        self, request: pb.GetRecordRequest, context: Context
    ) -> pb.GetRecordResponse:
        record = self._orchestrator.record(request.request_id, tenant=current_caller().tenant)
        return await packed(_record_reply, record)

    def _events(self, message: pb.GenerateRequest, context: Context) -> AsyncGenerator[Event, None]:
        violations: list[Violation] = []
        request = wire.request_from_message(
            message, self._orchestrator.default_schedule, violations
        )
        caller = current_caller()
        return self._orchestrator.generate(
            request,
            tenant=caller.tenant,
            share=caller.share,
            violations=violations,
            time_left_s=time_left_s(),
        )


def _answer_reply(event: Finished) -> pb.GenerateResponse:
    return wire.generation_to_message(event.generation)


def _record_reply(record: RequestRecord) -> pb.GetRecordResponse:
    return pb.GetRecordResponse(record=wire.to_message(record, pb.RequestRecord))
