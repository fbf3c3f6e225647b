"""The client against a real server: values, errors, deadline, retries, cancellation, metadata."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from specrej import Client, Retries
from specrej import contracts as c
from specrej.client.client import build_request
from specrej.contracts import Options, errors, wire
from specrej.security import new_token
from tests.serving import listening
from tests.specrej.fakes import EVENTS, GENERATION, OPTIONS, SERVICE, FakeOrchestrator
from tests.specrej.test_wire import REQUESTS

HALF = c.WeightedReward("a", 0.5)
BATCH = c.WeightedReward("b", normalization=c.Normalization("batch"))
MISSPELT: Any = "bath"
MISSPELT_REWARD = c.WeightedReward("a", normalization=c.Normalization(MISSPELT))
VIOLATION = errors.Violation("selection.n", "too many")


def test_omitted_options_are_absent_on_the_wire() -> None:
    """Guards against the client's defaults shadowing the server's."""
    message = build_request("why?")
    assert not message.sampling.ListFields() and not message.selection.ListFields()
    assert [field.name for field, _ in message.ListFields()] == ["prompt", "sampling", "selection"]


@given(REQUESTS)
def test_every_option_reaches_its_field(request: c.GenerationRequest) -> None:
    """Guards against an option that is accepted and dropped, or lands in the wrong field, such as
    a normalisation or a veto."""
    parts = (request.selection, request.sampling, request)
    options: Any = {
        name: next(getattr(part, name) for part in parts if hasattr(part, name))
        for name in c.declared_options()
    }
    message = build_request(request.prompt, **options)
    assert wire.from_message(message, c.GenerationRequest) == request


def test_prompts_have_several_forms() -> None:
    """Guards against a string taken for a sequence of messages, and raw text wrapped in a turn."""
    turn: dict[str, Any] = {"role": "user", "content": "why?"}
    for prompt in (c.Prompt.from_user("why?"), [c.Message(**turn)], [turn]):
        assert build_request(prompt) == build_request("why?")
    assert build_request(c.Prompt(text="once")).prompt.text == "once"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Options(n=2**31), "selection.n"),
        (Options(alpha=0.5, seed=2**63), "sampling.seed"),
        (Options(stop=["\ud800"]), "sampling.stop"),
        (Options(rewards=[MISSPELT_REWARD]), "selection.rewards"),
        (Options(model="\ud800"), "model"),
        (Options(n="most"), "selection.n"),
        (Options(stop=3), "sampling.stop"),
        (Options(schedule={"kind": "memory", "last": 3}), "selection.schedule"),
        (Options(algorithm="best"), "selection.algorithm"),
    ],
)
def test_value_beyond_the_message_is_an_invalid_request(bad: Options, field: str) -> None:
    """Guards against protobuf's ValueError reaching callers, and an error that names no field."""
    with pytest.raises(errors.InvalidRequest) as refused:
        build_request("why?", **bad)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("algorithm", "best-of-n", c.Algorithm.BEST_OF_N),
        ("n", "auto", 0),
        ("cache", "bypass", c.CacheControl.BYPASS),
        ("rewards", "relevance", {"relevance": 1.0}),
        ("rewards", "relevance", [c.WeightedReward("relevance")]),
        ("rewards", {"a": 2.0}, [c.WeightedReward("a", 2.0)]),
        ("rewards", ["a=0.5", {"name": "b", "normalization": {"kind": "batch"}}], [HALF, BATCH]),
        ("rewards", "a=-2,veto=-1", [c.WeightedReward("a", -2.0, veto_below=-1.0)]),
        ("rewards", "b,batch", [BATCH]),
        ("rewards", "b=3,batch,veto=0", [replace(BATCH, weight=3.0, veto_below=0)]),
        ("rewards", "a,stage=end", [c.WeightedReward("a", stage="end")]),
        ("stop", "END", ["END"]),
        ("stop_token_ids", 7, [7]),
        ("logit_bias", {7: -100.0}, [c.TokenBias(7, -100.0)]),
        ("logit_bias", "7=-1", {7: -1.0}),
        ("structured_output", {"a": 1}, c.JsonSchema('{"a":1}')),
        ("structured_output", "regex:a:b", c.Regex("a:b")),
        ("schedule", "memory", c.Schedule("memory")),
        ("schedule", "memory:128", c.Schedule("memory", first=128)),
        ("schedule", "geometric", c.Schedule()),
        ("schedule", "geometric:8", c.Schedule(first=8)),
        ("schedule", "geometric:16,1.5", c.Schedule(first=16, factor=1.5)),
        ("schedule", "tokens:16,32,64", c.Schedule("tokens", tokens=(16, 32, 64))),
        ("schedule", {"kind": "tokens", "tokens": [3]}, c.Schedule("tokens", tokens=(3,))),
        ("branching", "16,4", c.Branching(16, 4)),
        ("vote", "json:/a:b", c.Vote("json", "/a:b")),
        ("confidence_cut", "0.5,16", c.ConfidenceCut(0.5, 16)),
    ],
)
def test_options_take_what_flags_and_the_gateway_take(name: Any, text: Any, value: Any) -> None:
    """Guards against a weight, a normalisation or a veto that is dropped."""
    expected: Any = {name: value}
    assert build_request("why?", **{name: text}) == build_request("why?", **expected)


def test_a_wrong_text_is_answered_with_the_texts_to_use() -> None:
    for option, text, use in (
        ("cache", "on", "one of use, bypass, refresh"),
        ("temperature", "hot", "must be a number, is 'hot'"),
        ("cache", True, "must be one of use, bypass, refresh, is True"),
        ("rewards", "a,batch=2", "use NAME"),
    ):
        with pytest.raises(errors.InvalidRequest, match=use):
            build_request("why?", **{option: text})


@pytest.mark.parametrize("prompt", [None, 3, ["why?"], [{"role": "user", "text": "why?"}]])
def test_what_is_no_prompt_is_named(prompt: Any) -> None:
    """Guards against "must be called with a dataclass type or instance"."""
    with pytest.raises(errors.InvalidRequest, match="prompt: must be a text, a Prompt, or mess"):
        build_request(prompt)


async def test_an_address_of_http_is_refused() -> None:
    """Guards against four attempts to resolve a "misformatted domain name"."""
    with pytest.raises(errors.InvalidRequest, match="address: 'http://localhost:8000': use HOST"):
        Client("http://localhost:8000")


def test_an_unknown_option_is_a_type_error() -> None:
    """Guards against a misspelt option that is silently ignored."""
    with pytest.raises(TypeError, match="temprature; did you mean temperature"):
        build_request("why?", temprature=1.0)


async def test_values_survive_the_wire(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against options that a method drops, fields lost between the wire and the value, and
    events out of order."""
    assert OPTIONS.keys() == c.declared_options().keys()
    async with Client(address) as client:
        assert await client.generate("why?", **OPTIONS) == GENERATION
        assert tuple([event async for event in client.stream("why?", **OPTIONS)]) == EVENTS
        assert await client.describe() == SERVICE
    assert orchestrator.requests == [build_request("why?", **OPTIONS)] * 2


async def test_a_stream_without_an_answer_is_an_error(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against a loop that ends as if it had been answered."""
    orchestrator.events = EVENTS[:-1]
    async with Client(address) as client:
        with pytest.raises(errors.InternalError, match="without an answer"):
            _ = [event async for event in client.stream("why?")]


async def answer_of(client: Client, streamed: bool, **options: Any) -> c.Generation:
    """The answer to a request, by either method."""
    if not streamed:
        return await client.generate("why?", **options)
    last = [event async for event in client.stream("why?", **options)][-1]
    assert isinstance(last, c.Finished)
    return last.generation


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest([VIOLATION] * 2, reason="CONTEXT_EXCEEDED", metadata={"a": "1"}),
        errors.Overloaded("full", retry_after_s=0.25),
    ],
)
async def test_errors_arrive_whole_and_are_not_retried(
    address: str, orchestrator: FakeOrchestrator, error: errors.SpecrejError, streamed: bool
) -> None:
    """Guards against an exception with only the status text, and load added to a full server."""
    orchestrator.failures = [error]
    async with Client(address) as client:
        with pytest.raises(type(error)) as raised:
            await answer_of(client, streamed)
    assert raised.value.__dict__ == error.__dict__
    assert len(orchestrator.requests) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_unavailable_is_retried(
    address: str, orchestrator: FakeOrchestrator, streamed: bool
) -> None:
    """Guards against a restart that fails every call."""
    orchestrator.failures = [errors.Unavailable("loading", retry_after_s=0.01)] * 2
    async with Client(address) as client:
        assert await answer_of(client, streamed) == GENERATION
    assert len(orchestrator.requests) == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("retries", "delay_s", "timeout_s", "num_sent"),
    [
        (Retries(), 0.02, 20, 3),
        (Retries(attempts=2), 0.02, 20, 2),
        (Retries(attempts=1), 0.02, 20, 1),
        (Retries(max_wait_s=0.5), 1.0, 20, 1),
        (Retries(), 5.0, 3, 1),
        (Retries(on=(errors.Overloaded,)), 0.02, 20, 2),
    ],
    ids=["all", "attempts", "one", "long wait", "deadline", "other error"],
)
async def test_retries_wait_as_the_server_demands(
    address: str,
    orchestrator: FakeOrchestrator,
    retries: Retries,
    delay_s: float,
    timeout_s: float,
    num_sent: int,
    streamed: bool,
) -> None:
    """Guards against more or fewer attempts, and waits that are shorter than demanded."""
    failures: list[Exception] = [
        errors.Overloaded("full", retry_after_s=delay_s),
        errors.Unavailable("loading", retry_after_s=delay_s),
    ]
    orchestrator.failures = [*failures]
    began = time.monotonic()
    async with Client(address, retries=retries) as client:
        answering = answer_of(client, streamed, timeout_s=timeout_s)
        if num_sent == 3:
            assert await answering == GENERATION
        else:
            with pytest.raises(type(failures[num_sent - 1])):
                await answering
    assert time.monotonic() - began >= (num_sent - 1) * delay_s
    assert len(orchestrator.requests) == num_sent


async def test_a_stream_with_an_event_is_not_retried(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against events of two runs in one stream."""
    orchestrator.hangs = True
    async with (
        Client(address, retries=Retries()) as client,
        aclosing(client.stream("why?", timeout_s=20)) as events,
    ):
        assert await anext(events) == EVENTS[0]
        await asyncio.wait_for(orchestrator.received.wait(), 10)
        orchestrator.events = ()
        orchestrator.after_events = errors.Unavailable("draining", retry_after_s=0.01)
        orchestrator.released.set()
        with pytest.raises(errors.Unavailable):
            await anext(events)
    assert len(orchestrator.requests) == 1


async def test_every_call_has_a_deadline(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against calls without deadlines, and a call's own deadline being ignored."""
    async with Client(address, timeout_s=50) as client:
        await client.generate("why?")
        await client.generate("why?", timeout_s=20)
        _ = [event async for event in client.stream("why?")]
        await client.generate("why?", timeout_s=math.inf)  # grpc overflows from 9e9 on
    first, second, third, _ = orchestrator.times_left
    # A little slack: grpc rounds deadlines up on their way.
    assert 30 < first < 51 and second < 21 and 30 < third < 51


async def test_leaving_a_stream_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against candidates that grow after the end of their call."""
    orchestrator.hangs = True
    async with Client(address) as client, aclosing(client.stream("why?")) as events:
        async for event in events:
            assert event == EVENTS[0]
            await asyncio.wait_for(orchestrator.received.wait(), 10)
            break
        await events.aclose()
        # The channel is still open: the call itself was cancelled.
        await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_scores_keep_their_order(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against scores that belong to other responses, and fields that are dropped."""
    requests = orchestrator.scored
    async with Client(address) as client:
        scores = await client.score("why?", ["a", "abc", "ab"], reward="length", data={"a": "é"})
        await client.score("why?", "a", unfinished=True, data="[1]")
        with pytest.raises(errors.InvalidRequest, match="data: must be JSON"):
            await client.score("why?", "a", data=math.nan)
    assert scores == c.Scores((1.0, 3.0, 2.0), 7, reward="length")
    assert [request.unfinished for request in requests] == [False, True]
    assert [request.data for request in requests] == ['{"a":"é"}', "[1]"]
    assert requests[0].reward == "length"
    assert wire.from_message(requests[0].prompt, c.Prompt) == c.Prompt.from_user("why?")


def test_data_is_any_json_and_in_no_error() -> None:
    """Guards against data that is sent as Python's text of it, and secrets in errors."""
    rewards = [{"name": "a", "data": {"answer": ["4", None]}}, {"name": "b", "data": "[1]"}]
    sent = build_request("why?", rewards=rewards).selection.rewards
    assert [reward.data for reward in sent] == ['{"answer":["4",null]}', "[1]"]
    for value in (
        [{"name": "a", "data": {"quokka": {1}}}],
        [{"name": "a", "dada": "quokka"}],
        {"name": "a", "data": {"answer": "quokka"}},
        [{"name": 3, "data": "quokka"}],
    ):
        with pytest.raises(errors.InvalidRequest) as refused:
            build_request("why?", rewards=value)
        assert "quokka" not in str(refused.value)


async def test_an_answer_counts_whose_status_is_lost(
    orchestrator: FakeOrchestrator, address: str
) -> None:
    """Guards against an answer that a broken connection or a deadline after it takes away."""
    orchestrator.after_events = errors.Unavailable("draining", retry_after_s=0.01)
    async with Client(address) as client:
        assert [event async for event in client.stream("why?")] == list(EVENTS)
    assert len(orchestrator.requests) == 1


async def test_what_is_for_this_machine_is_sent_to_no_proxy(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards tokens, which may be in plaintext here, and a service that a proxy cannot reach."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with Client(address, token="secret") as client:
        assert (await client.describe()) == SERVICE


# The token and the metadata of one call


async def test_a_calls_own_token_replaces_the_clients(
    orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    """Guards against two tokens in one call, and a gateway's callers that all are one tenant."""
    lines = [new_token(tenant) for tenant in ("own", "other")]
    tokens = tmp_path / "tokens"
    tokens.write_text("\n".join(line for _, line in lines))
    (own, _), (other, _) = lines
    async with (
        listening(orchestrator.service(), tokens_file=str(tokens)) as address,
        Client(address, token=own) as client,
    ):
        await client.generate("why?")
        await client.generate("why?", token=other, metadata=(("x-any", "a"),))
        async with aclosing(client.stream("why?", token=other)) as events:
            assert [event async for event in events]
        assert orchestrator.tenants == ["own", "other", "other"]
        assert await client.describe(token=other) == SERVICE
        for bad, text in (("unknown", "unknown token"), ("a b", "one bearer token")):
            with pytest.raises(errors.Unauthenticated, match=text):
                await client.generate("why?", token=bad)
    async with Client("example.com:1") as client:
        with pytest.raises(errors.Unauthenticated, match="plaintext"):
            await client.generate("why?", token=other)


@pytest.mark.parametrize(
    "bad",
    [
        ("specrej-tenant", "M\xfcller"),
        ("a", "1\n2"),
        ("A", "1"),
        ("a-bin", "text"),
        ("authorization", "Bearer secret"),
    ],
)
async def test_metadata_that_is_not_sent(address: str, bad: tuple[str, str]) -> None:
    """Guards against an error of grpc's C code, which is none of ours, and against a token in
    plaintext."""
    async with Client(address) as client:
        for call in (client.describe(metadata=[bad]), anext(client.stream("?", metadata=[bad]))):
            with pytest.raises(errors.InvalidRequest, match=r"printable ASCII|pass token instead"):
                await call
