"""The public gRPC port: unpacks requests, calls the orchestrator, packs its events."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from orchestrator.background import converted, in_thread
from orchestrator.edge.service import Orchestrator
from orchestrator.loop.progress import WithinRounds
from specrej.contracts import Event, Finished, Progress, RoundCompleted, TextDelta, wire
from specrej.contracts.errors import Cancelled, Violation
from specrej.security import Role, current_caller
from specrej.server.serving import Context, Service, time_left_s
from specrej.threads import ended
from specrej.v1 import orchestrator_pb2 as pb
from specrej.v1 import orchestrator_pb2_grpc

# Events that may wait for a reader before progress and candidates' texts are left out.
_FEW_EVENTS = 16
_MAX_LISTED = 64  # records of one reply


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """`specrej.v1.OrchestratorService`."""

    def __init__(self, orchestrator: Orchestrator, *, unread_s: float = 30.0) -> None:
        """A stream whose client does not read for `unread_s` seconds ends once its run is over."""
        self._orchestrator = orchestrator
        self._unread_s = unread_s

    def service(self) -> Service:
        return Service(
            pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
            partial(orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, self),
        )

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        last: deque[Event] = deque(maxlen=1)
        await self._run(request, last.append)
        return await converted(_answer_reply, last[0])

    # A coroutine, although the stubs declare an async generator; serving.py has the reason.
    async def GenerateStream(  # type: ignore[override] # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        # Not bounded, so the run never waits for a reader: two events, one per round, and within
        # rounds at most some 40 a second.
        events: asyncio.Queue[Event | None] = asyncio.Queue()

        def emit(event: Event) -> None:
            if events.qsize() > _FEW_EVENTS:
                if isinstance(event, Progress):
                    return
                if isinstance(event, RoundCompleted):
                    event = replace(event, texts=())
            events.put_nowait(event)

        wanted = request.progress, request.text_deltas, request.texts
        within = WithinRounds(emit, *wanted) if any(wanted) else None
        run = asyncio.create_task(self._run(request.request, emit, within))
        run.add_done_callback(lambda _: events.put_nowait(None))
        try:
            is_first, sent = True, ""
            while event := await events.get():
                if isinstance(event, TextDelta):
                    sent += event.text
                elif isinstance(event, Finished) and sent == event.generation.best.text:
                    event = Finished(event.generation.with_text(""))
                message = await converted(wire.event_to_message, event)
                if is_first:
                    is_first = False
                    await context.send_initial_metadata(())
                try:
                    async with asyncio.timeout(self._unread_s):
                        await context.write(message)
                except TimeoutError:
                    await asyncio.wait({run})  # equal requests may wait for its answer
                    raise Cancelled(f"the client did not read for {self._unread_s:g} s") from None
            await run
        finally:
            await ended(run)

    async def Describe(  # noqa: N802
        self, request: pb.OrchestratorServiceDescribeRequest, context: Context
    ) -> pb.OrchestratorServiceDescribeResponse:
        roles = current_caller().roles  # none: there are no tokens
        description = await self._orchestrator.describe(
            with_backends=not roles or Role.ADMIN in roles
        )
        return wire.to_message(description, pb.OrchestratorServiceDescribeResponse)

    async def GetRecord(  # noqa: N802
        self, request: pb.GetRecordRequest, context: Context
    ) -> pb.GetRecordResponse:
        record = self._orchestrator.records.find(request.request_id, current_caller().tenant)
        return await converted(
            lambda r: pb.GetRecordResponse(record=wire.to_message(r, pb.RequestRecord)), record
        )

    async def ListRecords(  # noqa: N802
        self, request: pb.ListRecordsRequest, context: Context
    ) -> pb.ListRecordsResponse:
        records = self._orchestrator.records.latest(current_caller().tenant, _MAX_LISTED)
        messages = await in_thread(
            lambda rs: [wire.to_message(r, pb.RequestRecord) for r in rs], records
        )
        return pb.ListRecordsResponse(records=messages)

    async def _run(
        self,
        message: pb.GenerateRequest,
        emit: Callable[[Event], None],
        within: WithinRounds | None = None,
    ) -> None:
        violations: list[Violation] = []
        request = wire.request_from_message(message, violations)
        caller, left_s = current_caller(), time_left_s()
        await self._orchestrator.generate(
            request,
            emit,
            tenant=caller.tenant,
            share=caller.share,
            violations=violations,
            time_left_s=math.inf if left_s is None else left_s,
            within=within,
        )


def _answer_reply(event: Event) -> pb.GenerateResponse:
    assert isinstance(event, Finished), "the last event of every run"
    return wire.generation_to_message(event.generation)
