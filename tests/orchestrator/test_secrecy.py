"""Log lines, spans and keys of Redis contain no text of prompts and answers."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
import redis
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from reward_service.kinds.toy import ToyReward
from specrej import telemetry
from specrej.contracts import Candidate, Prompt, Scores, SessionSpec
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.serving import failure_of
from tests.world import HeldGenerator, World, world

MARK = "quokka-7f3a-zanzibar"


@pytest.fixture
def traces(spans: InMemorySpanExporter) -> Iterator[Callable[[], str]]:
    """Returns the text of all log lines, of any level, and of all spans."""
    handler, root = logging.StreamHandler(log := io.StringIO()), logging.getLogger()
    handler.setFormatter(telemetry.log_formatter("test"))
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.DEBUG)
    yield lambda: "\n".join(
        [log.getvalue(), *(span.to_json() for span in spans.get_finished_spans())]
    )
    root.setLevel(level)
    root.removeHandler(handler)


def marked_request(**sampling: Any) -> pb.GenerateRequest:
    turn = common_pb2.Message(role="user", content=f"Where does the {MARK} live?")
    return pb.GenerateRequest(
        prompt=common_pb2.Prompt(messages=[turn]),
        sampling=common_pb2.Sampling(**{"max_tokens": 16, "stop": [MARK], **sampling}),
        selection=pb.Selection(n=4),
    )


class QuotingGenerator(HeldGenerator):
    """Raises an error that quotes the prompt."""

    def open(self, spec: SessionSpec) -> Any:
        raise ValueError(f"bad prompt: {spec.prompt}") from KeyError(spec.prompt)


def quote(self: ToyReward, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
    raise ValueError(f"cannot score {prompt}")


async def test_valid_requests_leave_no_text(
    traces: Callable[[], str], redis_url: str, admin: redis.Redis
) -> None:
    """Guards keys, spans of rounds, and the DEBUG logs of libraries."""
    async with world(redis_url=redis_url) as service:
        for _ in range(2):
            await service.stub.Generate(marked_request(), metadata=[("specrej-tenant", MARK)])
    keys = list(admin.scan_iter())
    assert keys
    assert MARK.encode() not in b"\n".join(keys)
    assert "specrej.v1.OrchestratorService/Generate" in traces()
    assert MARK not in traces()


async def test_invalid_requests_leave_no_text(traces: Callable[[], str], service: World) -> None:
    """Guards against violations that are logged with the offending text."""
    prompt = marked_request().prompt
    unknown_reward = pb.Selection(rewards=[pb.WeightedReward(name=MARK)])
    for request in (
        marked_request(top_p=7),
        marked_request(stop=[""]),
        marked_request(stop=[MARK * 1000]),
        pb.GenerateRequest(model=MARK, prompt=prompt),
        pb.GenerateRequest(prompt=prompt, selection=unknown_reward),
    ):
        await failure_of(service.stub.Generate(request))
    malformed_call: Any = service.channel.unary_unary("/specrej.v1.OrchestratorService/Generate")
    await failure_of(malformed_call(b"\xff" + MARK.encode()))
    assert "INVALID_ARGUMENT" in traces()
    assert MARK not in traces()


@pytest.mark.parametrize("broken", ["generator", "reward"])
async def test_bugs_that_quote_prompts_leave_no_text(
    traces: Callable[[], str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Tracebacks are logged without the messages of their exceptions."""
    generator = QuotingGenerator() if broken == "generator" else HeldGenerator()
    async with world(generator) as service:
        if broken == "reward":
            monkeypatch.setattr(ToyReward, "score", quote)
        failure = await failure_of(service.stub.Generate(marked_request()))
    assert failure.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert MARK not in repr(failure)
    assert "ValueError" in traces()
    assert MARK not in traces()
