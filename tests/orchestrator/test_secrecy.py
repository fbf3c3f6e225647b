"""What people ask stays between them and the models: no log, span or key holds it."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import redis.asyncio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reward_service.toy import ToyReward
from specrej import telemetry
from specrej.contracts import Candidate, Prompt, Sampling, Scores, Session
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import HeldGenerator, Whole, whole
from tests.serving import failure_of

MARK = "quokka-7f3a-zanzibar"


@dataclass(slots=True)
class Traces:
    """Everything that was logged, at any level, and every span."""

    log: io.StringIO
    spans: InMemorySpanExporter

    def text(self) -> str:
        spans = (span.to_json() for span in self.spans.get_finished_spans())
        return "\n".join([self.log.getvalue(), *spans])


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    found = Traces(io.StringIO(), InMemorySpanExporter())
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found.spans))
    monkeypatch.setattr("specrej.telemetry.traces._tracer", provider.get_tracer("test"))
    handler, root = logging.StreamHandler(found.log), logging.getLogger()
    handler.setFormatter(telemetry.log_formatter("test"))
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.DEBUG)
    yield found
    root.setLevel(level)
    root.removeHandler(handler)
    provider.shutdown()


def asked(**sampling: Any) -> pb.GenerateRequest:
    turn = common_pb2.Message(role="user", content=f"Where does the {MARK} live?")
    return pb.GenerateRequest(
        prompt=common_pb2.Prompt(messages=[turn]),
        sampling=common_pb2.Sampling(**{"max_tokens": 16, "stop": [MARK], **sampling}),
        selection=pb.Selection(n=4),
    )


class QuotingGenerator(HeldGenerator):
    """Has a bug, and quotes the prompt when it strikes."""

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[Session]:
        try:
            raise KeyError(prompt)
        except KeyError as error:
            raise ValueError(f"bad prompt: {prompt}") from error
        yield  # makes it a generator


def quote(self: ToyReward, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
    raise ValueError(f"cannot score {prompt}")


async def keys_of(url: str) -> str:
    async with redis.asyncio.Redis.from_url(url) as client:
        return "\n".join([key.decode("ascii") async for key in client.scan_iter()])


async def test_valid_requests_leave_no_text(traces: Traces, redis_url: str) -> None:
    """Guards keys, spans of rounds, and what libraries log at DEBUG."""
    async with whole(redis_url=redis_url) as services:
        for _ in range(2):
            await services.stub.Generate(asked(), metadata=[("specrej-tenant", MARK)])
        keys = await keys_of(redis_url)
    assert keys
    assert MARK not in keys
    assert "specrej.v1.OrchestratorService/Generate" in traces.text()
    assert MARK not in traces.text()


async def test_invalid_requests_leave_no_text(traces: Traces) -> None:
    """Guards against violations that are logged with what they are about."""
    async with whole() as services:
        for request in (
            asked(top_p=7),
            asked(stop=[""]),
            asked(stop=[MARK * 1000]),
            pb.GenerateRequest(model=MARK, prompt=asked().prompt),
            pb.GenerateRequest(
                prompt=asked().prompt,
                selection=pb.Selection(rewards=[pb.WeightedReward(name=MARK)]),
            ),
        ):
            await failure_of(services.stub.Generate(request))
        await failure_of(_unreadable(services))
    assert "INVALID_ARGUMENT" in traces.text()
    assert MARK not in traces.text()


async def _unreadable(services: Whole) -> object:
    call: Any = services.channel.unary_unary("/specrej.v1.OrchestratorService/Generate")
    return await call(b"\xff" + MARK.encode())


@pytest.mark.parametrize("broken", ["generator", "reward"])
async def test_bugs_that_quote_prompts_leave_no_text(
    traces: Traces, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Guards against tracebacks: where a bug is may be logged, what it choked on may not."""
    generator = QuotingGenerator() if broken == "generator" else HeldGenerator()
    async with whole(generator) as services:
        if broken == "reward":
            monkeypatch.setattr(ToyReward, "score", quote)
        failure = await failure_of(services.stub.Generate(asked()))
    assert failure.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert MARK not in repr(failure)
    assert "ValueError" in traces.text()
    assert MARK not in traces.text()


def test_the_text_of_errors_is_there_for_who_asks() -> None:
    """Guards the setting that turns this off, and what is told without it: kinds and places."""
    try:
        try:
            raise KeyError(MARK)
        except KeyError as error:
            raise ValueError(MARK) from error
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "bug", None, (ValueError, error, error.__traceback__)
        )
    # In this order: a formatter leaves its text on the record for the next.
    loud = telemetry.log_formatter("test", error_text=True).format(record)
    quiet = telemetry.log_formatter("test").format(record)
    assert MARK not in quiet
    assert all(part in quiet for part in ("ValueError", "KeyError", __file__))
    assert MARK in loud
