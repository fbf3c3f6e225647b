"""Log lines, spans and keys of Redis contain no text of prompts and answers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import redis
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.loop.scoring import fingerprint_of
from reward_service.kinds.toy import ToyReward
from specrej import telemetry
from specrej.client import Client
from specrej.contracts import Candidate, Options, Prompt, Scores, SessionSpec, WeightedReward
from specrej.contracts.errors import InvalidRequest, SpecrejError, Violation
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.gateway.gateways import BODY, CHAT, get, post, whole_reply
from tests.programs import outcome_of
from tests.serving import failure_of, until
from tests.world import ENDS, HeldGenerator, small_request, world

MARK = "quokka-7f3a-zanzibar"
_MAC_BYTES = 32  # before the stream of a stored answer


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
        sampling=common_pb2.Sampling(**dict[str, Any](max_tokens=16, stop=[MARK]) | sampling),
        selection=pb.Selection(n=4),
    )


class QuotingGenerator(HeldGenerator):
    """Raises an error that quotes the prompt."""

    def open(self, spec: SessionSpec) -> Any:
        raise ValueError(f"bad prompt: {spec.prompt}") from KeyError(spec.prompt)


async def test_requests_leave_no_text(
    traces: Callable[[], str], redis_url: str, admin: redis.Redis
) -> None:
    """Guards keys, spans of rounds, DEBUG logs of libraries, and violations: logs have no
    offending text."""
    prompt = marked_request().prompt
    unknown_reward = pb.Selection(rewards=[pb.WeightedReward(name=MARK)])
    async with world(redis_url=redis_url) as service:
        for _ in range(2):
            await service.stub.Generate(marked_request(), metadata=[("specrej-tenant", MARK)])
        for request in (
            marked_request(top_p=7),
            marked_request(stop=[""]),
            marked_request(stop=[MARK * 1000]),
            pb.GenerateRequest(model=MARK, prompt=prompt),
            pb.GenerateRequest(prompt=prompt, selection=unknown_reward),
        ):
            await failure_of(service.stub.Generate(request))
        malformed: Any = service.channel.unary_unary("/specrej.v1.OrchestratorService/Generate")
        await failure_of(malformed(b"\xff" + MARK.encode()))
    keys = list(admin.scan_iter())
    assert keys and MARK.encode() not in b"\n".join(keys)
    assert "specrej.v1.OrchestratorService/Generate" in traces() and "INVALID_ARGUMENT" in traces()
    assert MARK not in traces()


async def test_bugs_that_quote_prompts_leave_no_text(traces: Callable[[], str]) -> None:
    """Tracebacks are logged without the messages of their exceptions."""
    async with world(QuotingGenerator()) as service:
        failure = await failure_of(service.stub.Generate(marked_request()))
    assert failure.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert MARK not in repr(failure)
    assert "ValueError" in traces()
    assert MARK not in traces()


def test_the_fingerprint_of_rewards_has_no_data() -> None:
    """Guards a short reference against a caller who tries all and compares digests, and memory
    against the data of requests that have ended."""
    given = [(WeightedReward("toy", data=data),) for data in ("", '"204"')]
    num_held = sys.getrefcount(given[1])
    without, with_data, other = (
        fingerprint_of(given[number], (own,)) for number, own in ((0, "a"), (1, "a"), (0, "b"))
    )
    num_held -= sys.getrefcount(given[1])  # not in an assertion, which holds what it compares
    assert without == with_data != other and not num_held


def test_the_fingerprint_of_rewards_has_no_order() -> None:
    """Guards stored answers against a request with the same rewards, named in another order."""
    one, other = WeightedReward("one", 2.0), WeightedReward("other")
    ordered = fingerprint_of((one, other), ("a", "b"))
    assert ordered == fingerprint_of((other, one), ("b", "a"))
    assert ordered != fingerprint_of((one, other), ("b", "a"))


@pytest.fixture
def with_data(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The toy takes data, a list, and scores 1 the texts with a letter of it; what it received."""
    received: list[str] = []

    def score(self: ToyReward, session: Any, candidates: Sequence[Candidate]) -> Scores:
        _, data = session if isinstance(session, tuple) else (session, "")
        received.append(data)
        wanted = set(json.loads(data)) if data else set()
        return Scores(tuple(float(bool(wanted & {*one.text})) for one in candidates))

    monkeypatch.setattr(ToyReward, "takes_data", True)
    monkeypatch.setattr(ToyReward, "open_with", lambda _, prompt, data: (prompt, data))
    monkeypatch.setattr(ToyReward, "score", score)
    return received


def refusing(self: ToyReward, prompt: Prompt, data: str) -> Any:
    """An error of a reward, which names the field and does not quote it."""
    if MARK in data:
        raise InvalidRequest([Violation("data", "must have answer")])
    return prompt, data


def quoting(self: ToyReward, session: Any, candidates: Sequence[Candidate]) -> Scores:
    raise ValueError(f"bad prompt and data: {session}")


async def tried(call: Awaitable[Any]) -> Any:
    """The result, or the error with all that it has."""
    try:
        return await call
    except SpecrejError as error:
        return error, vars(error)


@pytest.mark.parametrize("broken", [{}, {"open_with": refusing}, {"score": quoting}])
async def test_data_of_rewards_is_nowhere(
    traces: Callable[[], str],
    redis_url: str,
    admin: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    with_data: list[str],
    broken: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Guards hidden tests and references: they reach the reward, and no reply, event, page,
    log, trace, metric, error, key or value."""
    seen: list[Any] = []
    for name in ("_counter", "_histogram"):  # of metrics, with their labels
        instrument = Mock(add=lambda *given: seen.append(given), record=lambda *g: seen.append(g))
        monkeypatch.setattr(telemetry.metrics, name, lambda _, made=instrument: made)
    valid: dict[str, Any] = {"name": "toy", "data": [MARK], "veto_below": 0.0}
    long = {**valid, "data": [MARK] * 9000}
    wrong: list[Any] = [[long], [{**valid, "data": MARK}], {"data": MARK}, [{"x": MARK}]]
    options = Options(n=4, max_tokens=16, stop_at=1.0, waves=2)
    async with (
        world(redis_url=redis_url, gateway=True) as service,
        Client(service.address) as client,
    ):
        for name, function in broken.items():
            monkeypatch.setattr(ToyReward, name, function)
        port = int(service.gateway_url.rpartition(":")[2])
        for rewards in ([valid], [valid], *wrong):
            plain = {"rewards": rewards, "n": 4}
            body = {**BODY, "max_tokens": 16, "seed": 3, "specrej": plain}
            seen += [
                await tried(client.generate("why?", rewards=rewards, **options)),
                await tried(collected(client.stream("why?", texts=True, rewards=rewards, n=4))),
                await post(port, CHAT, body),
                await whole_reply(port, "/v1/specrej/stream", body),
            ]
        for data in ([MARK], f"[{MARK}", long["data"]):
            scored = {"text_1": "a", "text_2": "b", "model": "toy", "data": data}
            seen.append(await post(port, "/v1/score", scored))
            seen.append(await tried(client.score("why?", ["a"], reward="toy", data=data)))
            (file := tmp_path / "data").write_text(
                data if isinstance(data, str) else json.dumps(data)
            )
            flags = ("--max-tokens", "16", "--reward", "toy", "--reward-data", str(file))
            if not broken and data == [MARK]:
                program = (sys.executable, "-m", "specrej.client.cli", "generate", "why?")
                seen.append(await outcome_of(*program, "--address", service.address, *flags))
        seen.append(await get(port, "/v1/specrej/describe"))
    assert MARK not in "\n".join(map(repr, [*seen, traces()]))
    for key in admin.scan_iter():
        value: Any = admin.get(key) if admin.type(key) == b"string" else b""
        assert MARK.encode() not in key + (zlib.decompress(value[_MAC_BYTES:]) if value else b"")
    if not broken:
        assert any(MARK in data for data in with_data) and [*admin.scan_iter()]


async def collected(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def test_requests_of_other_data_share_nothing(with_data: list[str], redis_url: str) -> None:
    """Guards against the answer to another reference, stored or of a request in progress."""

    def request(data: str) -> pb.GenerateRequest:
        return small_request(selection={"rewards": [pb.WeightedReward(name="toy", data=data)]})

    async with world(HeldGenerator(end_every=next(ENDS)), redis_url=redis_url) as service:
        gate = service.generator.gates["extend"]
        gate.shut()
        texts = ('["a"]', '["b"]', "", '[ "a" ]')  # two are one JSON
        tasks = [asyncio.create_task(service.answer(request(data))) for data in texts]
        await until(lambda: gate.held == 3)
        gate.open()
        await asyncio.gather(*tasks)
        assert service.generator.num_opened == 3
        assert (await service.answer(request('["a"]'))).cached
        assert not (await service.answer(request('["c"]'))).cached
