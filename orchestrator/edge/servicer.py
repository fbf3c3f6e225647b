"""The public gRPC port: unpacks requests, calls the orchestrator, packs its events."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from orchestrator.background import converted
from orchestrator.edge.service import Orchestrator
from orchestrator.loop.progress import WithinRounds
from specrej import contracts as c
from specrej.contracts import wire
from specrej.contracts.errors import Cancelled, Violation
from specrej.security import current_caller
from specrej.server.serving import Context, Service, time_left_s
from specrej.threads import ended
from specrej.v1 import orchestrator_pb2 as pb
from specrej.v1 import orchestrator_pb2_grpc

# What may wait for a reader: events before progress is left out, and characters and ids of rounds
# before all of those but the newest lose theirs.
_FEW_EVENTS = 16
_MAX_SIZE = 131_072
_UNREAD_S = 30.0  # that a reader may wait, besides the time of its bytes


class _Unread:
    """Events that wait for the reader of a stream. Adding one never waits.

    The traces of rounds are those of the run, which bounds them.
    """

    def __init__(self) -> None:
        self._events: deque[c.Event] = deque()
        self._size = 0
        self._is_over = False
        self._changed = asyncio.Event()

    def add(self, event: c.Event) -> None:
        if (isinstance(event, c.Progress) and len(self._events) > _FEW_EVENTS) or self._is_over:
            return
        if isinstance(event, c.RoundCompleted):
            self._size += _size(event)
            if self._size > _MAX_SIZE:
                self._events = deque(map(_shortened, self._events))
                self._size = _size(event)
        self._events.append(event)
        self._changed.set()

    def end(self) -> None:
        """No event follows."""
        self._is_over = True
        self._changed.set()

    def clear(self) -> None:
        """Drop what waits, and all that follows."""
        self._events.clear()
        self._is_over = True

    async def next(self) -> c.Event | None:
        """The next event, once there is one; None: there will be none."""
        while not self._events:
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        self._size -= _size(event)
        return event


def _size(event: c.Event) -> int:
    if not isinstance(event, c.RoundCompleted):
        return 0
    texts = sum(len(item.text) for item in event.texts)
    return texts + len(event.best_text) + len(event.survivors)


def _shortened(event: c.Event) -> c.Event:
    """A round in numbers only."""
    return c.RoundCompleted(event.trace, (), "") if isinstance(event, c.RoundCompleted) else event


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """`specrej.v1.OrchestratorService`."""

    def __init__(self, orchestrator: Orchestrator, *, least_bytes_s: int = 1024) -> None:
        """A stream whose client reads less than `least_bytes_s` bytes a second (0: any) ends once
        its run is over."""
        self._orchestrator = orchestrator
        self._least_bytes_s = least_bytes_s

    def service(self) -> Service:
        return Service(
            pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
            partial(orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, self),
        )

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        last: deque[c.Event] = deque(maxlen=1)
        await self._run(request, last.append)
        assert isinstance(last[0], c.Finished), "the last event of every run"
        return await converted(wire.generation_to_message, last[0].generation)

    # A coroutine, although the stubs declare an async generator; serving.py has the reason.
    async def GenerateStream(  # type: ignore[override] # noqa: N802
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> None:
        unread = _Unread()
        wanted = request.progress, request.text_deltas, request.texts
        within = WithinRounds(unread.add, *wanted) if any(wanted) else None
        run = asyncio.create_task(self._run(request.request, unread.add, within))
        run.add_done_callback(lambda _: unread.end())
        try:
            is_first = True
            left_s = _UNREAD_S if self._least_bytes_s else math.inf
            while event := await unread.next():
                message = await converted(wire.event_to_message, event)
                if is_first:
                    is_first = False
                    await context.send_initial_metadata(())
                began_s = time.monotonic()
                left_s += message.ByteSize() / max(1, self._least_bytes_s)
                try:
                    async with asyncio.timeout(left_s):
                        await context.write(message)
                except TimeoutError:
                    unread.clear()
                    await asyncio.wait({run})  # equal requests may wait for its answer
                    less = f"the client read less than {self._least_bytes_s} bytes a second"
                    raise Cancelled(less) from None
                left_s -= time.monotonic() - began_s
            await run
        finally:
            await ended(run)

    async def Score(  # noqa: N802
        self, request: pb.OrchestratorServiceScoreRequest, context: Context
    ) -> pb.OrchestratorServiceScoreResponse:
        reward, scores = await self._orchestrator.score(
            wire.from_message(request.prompt, c.Prompt),
            request.responses,
            reward=request.reward,
            unfinished=request.unfinished,
            data=request.data,
            **_of_call(),
        )
        return pb.OrchestratorServiceScoreResponse(
            scores=scores.values, computed_tokens=scores.computed_tokens, reward=reward
        )

    async def Describe(  # noqa: N802
        self, request: pb.OrchestratorServiceDescribeRequest, context: Context
    ) -> pb.OrchestratorServiceDescribeResponse:
        description = await self._orchestrator.describe()
        return wire.to_message(description, pb.OrchestratorServiceDescribeResponse)

    async def _run(
        self,
        message: pb.GenerateRequest,
        emit: Callable[[c.Event], None],
        within: WithinRounds | None = None,
    ) -> None:
        violations: list[Violation] = []
        request = wire.request_from_message(message, violations)
        await self._orchestrator.generate(
            request, emit, violations=violations, within=within, **_of_call()
        )


def _of_call() -> dict[str, Any]:
    """Who calls, and the seconds left to the deadline."""
    caller, left_s = current_caller(), time_left_s()
    left_s = math.inf if left_s is None else left_s
    return {"tenant": caller.tenant, "weight": caller.weight, "time_left_s": left_s}
