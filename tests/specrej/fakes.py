"""Fake servers with fixed answers that record their requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from specrej import contracts as c
from specrej.contracts import Options, wire
from specrej.security import current_caller
from specrej.server.serving import Context, Service
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc


def trace(number: int, **changes: Any) -> c.RoundTrace:
    """A round of the request that the fake answers: 8 candidates, half of them cut."""
    values: dict[str, Any] = {
        "number": number,
        "decision_token": 16 * number,
        "ended_by": c.RoundEnd.DECISION_TOKEN,
        "num_started": 8,
        "num_finished": 0,
        "num_rejected": 4,
        "num_live": 4,
        "best_score": 0.412,
        "session_slots": 1544,
        "freed_slots": 512,
        "capacity_slots": 4096,
        "generated_tokens": 361,
        "extend_ms": 1000.0,
        "score_ms": 20.0,
        "prune_ms": 1.0,
    }
    return c.RoundTrace(**{**values, **changes})


def candidate(number: int, text: str, score: float) -> c.RankedCandidate:
    token_ids, logprobs, tokens = (3, 1, 2), (-0.5, -0.25, -0.75), (b"th", b"e\xc3", b"\xa9")
    top = tuple(
        c.TopLogprobs((c.TokenLogprob(*one), c.TokenLogprob(7, b"x", -3.0)))
        for one in zip(token_ids, tokens, logprobs, strict=True)
    )
    return c.RankedCandidate(
        *(number, text, score, c.FinishReason.STOP, 3, -0.5, token_ids, logprobs),
        rewards=(score,),
        tokens=tokens,
        top_logprobs=top,
    )


GENERATION = c.Generation(
    candidates=(candidate(3, "the best", 0.5), candidate(1, "the next", 0.25)),
    rounds=(trace(1), trace(2, num_started=4, num_finished=1, num_rejected=1, num_live=2)),
    usage=c.Usage(9, 1000, 3, 70, 1024, 2500),
    timings=c.Timings(2000.0, 1.0, 2.0, 1900.0, 50.0, 3.0, 800.0),
    n=8,
    request_id="r1",
    generator_fingerprint="g",
    reward_fingerprint="f",
)
ONE = replace(GENERATION, candidates=GENERATION.candidates[:1])
EVENTS: tuple[c.Event, ...] = (
    c.Admitted(8, 9, "r1"),
    c.Progress(4, 8, 41, 4096),
    *(c.RoundCompleted(done, (0, 3), "so far") for done in GENERATION.rounds),
    c.TextDelta(
        3, "the best", c.PartsDelta("the", "why", (c.ToolCallDelta(1, "call_1", "f", "{"),))
    ),
    c.Finished(GENERATION),
)
SERVICE = c.ServiceDescription(
    generator=c.GeneratorDescription(
        "tiny", "abc", 2048, 64, 49152, 1024, "cpu float32", c.SlotGauge(4096, 12, 0, 1024)
    ),
    rewards=("relevance", "likelihood"),
    cache_available=True,
    running=1,
    queued=0,
    default_schedule=c.Schedule("tokens", tokens=(16, 64)),
)


# Every option of the client.
OPTIONS = Options(
    n=8,
    alpha=0.25,
    schedule=c.Schedule("tokens", tokens=(8, 32)),
    algorithm=c.Algorithm.BEST_OF_N,
    rewards={"relevance": 1.0, "likelihood": 0.5},
    return_candidates=2,
    prefer_complete=True,
    branching=c.Branching(8, 2, 0.5),
    stop_at=0.5,
    waves=2,
    first=3,
    vote=c.Vote("regex", "a(b)", "confidence", 0.75),
    confidence_cut=c.ConfidenceCut(0.25, 16),
    min_answers=2,
    max_tokens=64,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    stop=["\n\n"],
    seed=7,
    ignore_eos=True,
    min_tokens=5,
    logprobs=True,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={7: -100.0, 8: 1.5},
    max_thinking_tokens=32,
    score_thinking=True,
    stop_token_ids=[3, 4],
    top_logprobs=2,
    structured_output={"a": 1},
    model="tiny",
    cache=c.CacheControl.REFRESH,
    allow_degraded=True,
)


class FakeOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Raises `failures` first, one per call. With `hangs`, a call waits for `released` after its
    first event; with `holds`, before it, and so does Describe. A stream raises `after_events` at
    its end."""

    def __init__(self) -> None:
        self.requests: list[orchestrator_pb2.GenerateRequest] = []
        self.streams: list[orchestrator_pb2.GenerateStreamRequest] = []
        self.scored: list[orchestrator_pb2.OrchestratorServiceScoreRequest] = []
        self.tenants: list[str] = []  # of the requests
        self.times_left: list[float] = []
        self.failures: list[Exception] = []
        self.events = EVENTS  # of streams
        self.answer = GENERATION  # of unary calls
        self.after_events: Exception | None = None
        self.hangs = False
        self.holds = False
        self.received = asyncio.Event()
        self.released = asyncio.Event()
        self.cancelled = asyncio.Event()

    def service(self) -> Service:
        """What a server serves."""
        register = partial(orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, self)
        return Service("specrej.v1.OrchestratorService", register)

    async def Score(  # noqa: N802 - the name of the rpc
        self, request: orchestrator_pb2.OrchestratorServiceScoreRequest, context: Context
    ) -> orchestrator_pb2.OrchestratorServiceScoreResponse:
        self.scored.append(request)
        if self.failures:
            raise self.failures.pop(0)
        scores = [float(len(response)) for response in request.responses]
        return orchestrator_pb2.OrchestratorServiceScoreResponse(
            scores=scores, computed_tokens=7, reward=request.reward or "length"
        )

    async def Generate(  # noqa: N802 - the name of the rpc
        self, request: orchestrator_pb2.GenerateRequest, context: Context
    ) -> orchestrator_pb2.GenerateResponse:
        await self._take(request, context)
        return wire.generation_to_message(self.answer)

    async def GenerateStream(  # type: ignore[override]  # noqa: N802 - the name of the rpc
        self, request: orchestrator_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        self.streams.append(request)
        if self.hangs and not self.failures:
            await context.write(wire.event_to_message(self.events[0]))
        await self._take(request.request, context)
        for event in self.events:
            await context.write(wire.event_to_message(event))
        if self.after_events:
            raise self.after_events

    async def Describe(  # noqa: N802 - the name of the rpc
        self, request: orchestrator_pb2.OrchestratorServiceDescribeRequest, context: Context
    ) -> orchestrator_pb2.OrchestratorServiceDescribeResponse:
        if self.holds:
            self.received.set()
            await self._wait()
        return wire.to_message(SERVICE, orchestrator_pb2.OrchestratorServiceDescribeResponse)

    async def _take(self, request: orchestrator_pb2.GenerateRequest, context: Context) -> None:
        self.requests.append(request)
        self.tenants.append(current_caller().tenant)
        self.times_left.append(context.time_remaining() or float("inf"))
        self.received.set()
        if self.failures:
            raise self.failures.pop(0)
        if self.hangs or self.holds:
            await self._wait()

    async def _wait(self) -> None:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
