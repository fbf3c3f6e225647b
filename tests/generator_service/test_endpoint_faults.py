"""The stock engine before a server on loopback that fails, is slow, or is left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from generator_service.__main__ import open_generator
from generator_service.servicer import GeneratorServicer
from generator_service.stock import server as server_module
from generator_service.stock.endpoint import open_endpoint
from generator_service.stock.generator import StockGenerator
from orchestrator.loop.run import run
from specrej import contracts as c
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    SpecrejError,
    Unavailable,
)
from specrej.contracts.status import to_status
from specrej.remote import RemoteGenerator
from tests.generator_service.completions import Completions, Servers, settings_of
from tests.orchestrator.runs import LetterScorer
from tests.reward_service.endpoint import Reply, served
from tests.serving import serving, turns, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAMPLING = c.Sampling(max_tokens=24, seed=5, ignore_eos=True)
SPEC = c.SessionSpec(c.Prompt.from_user("why?"), 4, SAMPLING, 8)
IN_STREAMS = replace(SAMPLING, presence_penalty=0.5)
FORMS = pytest.mark.parametrize("sampling", [SAMPLING, IN_STREAMS], ids=["rounds", "streams"])
HELD = Reply(is_held=True)


@pytest.mark.parametrize(
    ("kind", "sampling", "phase"),
    [
        ("vllm", SAMPLING, "extend"),
        ("llamacpp", SAMPLING, "extend"),
        *itertools.product(["vllm", "chat"], [IN_STREAMS], ["extend", "between", "prune"]),
    ],
)
async def test_cancelling_closes_every_connection(
    servers: Servers, kind: str, sampling: c.Sampling, phase: str
) -> None:
    """Guards against a server that makes, and charges, answers without a reader."""
    server = await servers.get(kind)
    server.model.behave(hold_after=8)
    async with server.generator.open(replace(SPEC, sampling=sampling)) as session:
        if kind == "vllm" and sampling is SAMPLING:  # one message
            server.model.behave(script=lambda *_: HELD)
        else:
            await session.extend(5)
        if phase == "extend":
            extending = asyncio.create_task(session.extend(24))
            await until(lambda: server.endpoint.running == 4)
            await turns()
            extending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await extending
        if phase == "prune":
            pruning = asyncio.create_task(session.prune([0]))
            await turns(1)
            pruning.cancel()
            await asyncio.gather(pruning, return_exceptions=True)
            await until(lambda: server.endpoint.running == 1, bound_s=2)
    await until(lambda: not server.endpoint.running, bound_s=2)
    assert server.endpoint.num_gone == 4


async def test_sessions_share_the_places_by_turns(servers: Servers) -> None:
    """Guards a request for one candidate against minutes behind a thousand of another one, and a
    server against a connection for each of them."""
    server = await servers.get(remote_requests=2)
    failed = Reply({}, 500, is_held=True)
    server.model.behave(script=lambda _, number: failed if number < 2 else None)
    async with (
        server.generator.open(replace(SPEC, n=20)) as large,
        server.generator.open(replace(SPEC, n=1)) as small,
    ):
        growing = asyncio.create_task(large.extend(24))
        await until(lambda: server.endpoint.running == 2)
        waiting = asyncio.create_task(small.extend(2))
        await turns()
        server.endpoint.release.set()
        await asyncio.wait_for(asyncio.gather(growing, waiting), 20)
    assert 2 in [request.body["max_tokens"] for request in server.endpoint.requests[2:5]]
    assert server.endpoint.most_running == 2


def events(*parts: bytes, **more: Any) -> Reply:
    return Reply(stream=parts, headers={"Content-Type": "text/event-stream"}, **more)


@FORMS
@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=0),
        Reply({}, 429, {"Retry-After": "0.01"}),
        Reply({}, 500),
        Reply({}, 503),
        events(is_cut=True),
        events(b'data: {"error": {"code": 500}}\n\n'),
    ],
    ids=["drop", "429", "500", "503", "drop of a stream", "error in a stream"],
)
async def test_a_request_is_repeated(servers: Servers, reply: Reply, sampling: c.Sampling) -> None:
    """Guards against a session that fails for one refusal, and a storm without delays."""
    server = await servers.get()
    server.model.behave(script=lambda _, number: reply if number < 3 else None)
    began_s = asyncio.get_running_loop().time()
    async with server.generator.open(replace(SPEC, n=1, sampling=sampling)) as session:
        (candidate,) = (await session.extend(24)).candidates
    took_s = asyncio.get_running_loop().time() - began_s
    assert candidate.num_tokens == 24 and len(server.endpoint.requests) == 4
    assert took_s >= (0.03 if reply.status == 429 else 0.006)


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
async def test_connections_are_kept_and_replaced_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """llama.cpp's server closes connections after streams, without saying so."""
    server = await servers.get(kind)
    async with asyncio.timeout(20), server.generator.open(replace(SPEC, n=1)) as session:
        await session.extend(5)
        monkeypatch.setattr(server_module, "_FIRST_DELAY_S", 60.0)
        server.endpoint.num_connections = 0
        server.model.behave(script=lambda _, number: Reply(status=0) if number == 2 else None)
        for until_tokens in (7, 9, 11, 24):
            await session.extend(until_tokens)
    assert len(server.endpoint.requests) == 6 and server.endpoint.num_connections <= 1


@FORMS
async def test_a_server_that_is_killed_and_starts_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, sampling: c.Sampling
) -> None:
    """Requests are repeated; a stream that has begun ends its session."""
    model = Completions(servers.directory)
    async with AsyncExitStack() as resources:
        async with served(model.reply) as endpoint:
            generator = await open_endpoint(settings_of(endpoint.url))
            resources.push_async_callback(generator.close)
            spec = replace(SPEC, sampling=sampling)
            session = await resources.enter_async_context(generator.open(spec))
            model.behave(hold_after=8)
            await session.extend(5)
            if sampling is SAMPLING:
                model.behave(script=lambda *_: HELD)
            extending = asyncio.create_task(session.extend(24))
            await until(lambda: endpoint.running == 4)
            await turns()
            monkeypatch.setattr(server_module, "_FIRST_DELAY_S", 0.1)
        model.behave()
        async with served(model.reply, endpoint.port):
            if sampling is SAMPLING:
                assert {one.num_tokens for one in (await extending).candidates} == {24}
            else:
                with pytest.raises(Unavailable, match="broke off a stream"):
                    await extending


async def test_a_failure_that_no_round_has_received_is_retrieved(servers: Servers) -> None:
    """Guards against a log of exceptions of tasks; `servers` checks it."""
    server = await servers.get()
    server.model.behave(script=lambda *_: events(line_of(message((70,) * 8)), is_cut=True))
    async with server.generator.open(replace(SPEC, sampling=IN_STREAMS)) as session:
        await session.extend(5)
        await until(lambda: not server.endpoint.running)
        await turns()
        await session.prune([0, 1])
    gc.collect()


def message(
    ids: Any = (70,), logprobs: Any = None, top: Any = None, **usage: int
) -> dict[str, Any]:
    """One of these tokens, if nothing else is given with log-probabilities that are correct."""
    given = {
        "token_logprobs": [-1.0] * len(ids) if logprobs is None else logprobs,
        "top_logprobs": [{"token_id:5": -0.5}] * len(ids) if top is None else top,
    }
    choice = {"text": "t", "token_ids": ids, "logprobs": given}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1} | usage}


def line_of(content: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(content).encode()


UNREADABLE = "answer cannot be read: "
EQUALLY = f"{UNREADABLE}ValueError tokens and log-probabilities must be equally many"
FINITE = f"{UNREADABLE}ValueError log-probabilities must be finite and at most 0"
RANGE = f"{UNREADABLE}ValueError counts and ids of tokens must be from 0"
ENDLESS = itertools.repeat(b"x" * 65_536)
BEGUN = line_of(message())


@pytest.mark.parametrize(
    ("reply", "kind", "text", "num_requests"),
    [
        (Reply(status=0), Unavailable, "does not answer: RemoteProtocolError", 4),
        (Reply({}, 429), Overloaded, "the endpoint limits requests", 4),
        (Reply({}, 502), Unavailable, "answers with status 502", 4),
        (Reply({}, 401), InternalError, "refuses the key", 1),
        (Reply({"error": {"message": "too long"}}, 400), InvalidRequest, "400: too long", 1),
        (Reply({"error": {"message": "cut \ud83d"}}, 400), InvalidRequest, "cut \ufffd", 1),
        (Reply({"error": "no"}, 422), InvalidRequest, "422: without a reason", 1),
        (Reply(b"<html>"), InternalError, f"{UNREADABLE}JSONDecodeError", 1),
        (Reply(b"[" * 100_000), InternalError, f"{UNREADABLE}RecursionError", 1),
        (Reply([]), InternalError, f"{UNREADABLE}TypeError", 1),
        (Reply({"choices": ["x"]}), InternalError, f"{UNREADABLE}AttributeError", 1),
        (Reply(message((70,) * 25)), InternalError, "more tokens than requested", 1),
        (Reply(message(logprobs=())), InternalError, EQUALLY, 1),
        (Reply(message(top=())), InternalError, EQUALLY, 1),
        (Reply(message(top=({},))), InternalError, "there must be 1 most probable", 1),
        (Reply(message(top=({"5": float("nan")},))), InternalError, FINITE, 1),
        (Reply(message(logprobs=(float("nan"),))), InternalError, FINITE, 1),
        (Reply(message(logprobs=(9.0,))), InternalError, FINITE, 1),
        (Reply(message((-1,))), InternalError, RANGE, 1),
        (Reply(message((1 << 31,))), InternalError, RANGE, 1),
        (Reply(message(prompt_tokens=-1)), InternalError, RANGE, 1),
        (Reply(stream=ENDLESS), InternalError, "has more than 1048576 bytes", 1),
        (events(BEGUN, b"data: {\n\n"), InternalError, f"{UNREADABLE}JSONDecodeError", 1),
        (events(line_of({"error": {"code": 400}})), InvalidRequest, "status 400: without", 1),
        (events(BEGUN, line_of({"error": "full"})), Unavailable, "broke off a stream", 1),
        (events(BEGUN, is_cut=True), Unavailable, "broke off a stream", 1),
        (events(BEGUN), Unavailable, "broke off a stream", 1),
        (replace(events(), stream=ENDLESS), InternalError, "has more than 1048576 bytes", 1),
    ],
)
async def test_failures_are_those_of_the_status_table(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    kind: type[SpecrejError],
    text: str,
    num_requests: int,
) -> None:
    """Guards against retries of what fails for good, an error without its cause or with a text
    that no status can hold, and numbers that make a candidate the best."""
    monkeypatch.setattr(server_module, "_MOST_BYTES", 1 << 20)
    server = await servers.get()
    server.model.behave(script=lambda *_: reply)
    sampling = replace(IN_STREAMS, logprobs=True, top_logprobs=1)
    async with server.generator.open(replace(SPEC, n=1, sampling=sampling)) as session:
        with pytest.raises(kind, match=text) as failure:
            await session.extend(24)
    assert to_status(failure.value)[1] == failure.value.message
    assert len(server.endpoint.requests) == num_requests


@pytest.mark.parametrize("left_s", [5.0, 100.0, None])
async def test_a_delay_beyond_the_time_left_is_returned(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, left_s: float | None
) -> None:
    """Guards against a caller that waits for an answer that cannot be in time, and one that
    returns before the server takes requests again."""
    monkeypatch.setattr(server_module, "time_left_s", lambda: left_s)
    server = await servers.get()
    server.model.behave(script=lambda *_: Reply({}, 429, {"Retry-After": "120"}))
    async with server.generator.open(replace(SPEC, n=1)) as session:
        with pytest.raises(Overloaded) as refused:
            await session.extend(9)
    assert refused.value.retry_after_s == 120 and len(server.endpoint.requests) == 1


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [("120", 120), ("inf", 86_400), ("nan", 0), ("-1", 0), ("", 0), ("soon", 0)],
)
async def test_delays_of_a_server(text: str, delay_s: float) -> None:
    """Guards against a delay that no Duration holds."""
    assert server_module._retry_after_s(text) == delay_s


async def test_a_deadline_ends_what_hangs_and_what_waits(servers: Servers) -> None:
    """One request hangs, the other one waits for its place."""
    server = await servers.get(remote_requests=1)
    server.model.behave(script=lambda *_: HELD)
    servicer = GeneratorServicer(lease_s=60)
    servicer.load(server.generator)
    async with (
        serving(servicer.service(), default_deadline_s=1.0) as channel,
        RemoteGenerator(channel).open(replace(SPEC, n=2)) as session,
    ):
        with pytest.raises(Unavailable, match="deadline exceeded"):
            await session.extend(9)
        await until(server.is_idle, bound_s=2)


@pytest.mark.parametrize(
    ("kind", "settings", "form"),
    [
        ("vllm", {}, c.CandidateForm.ROUNDS),
        ("chat", {}, c.CandidateForm.STREAMS),
        ("whole", {"streams": False}, c.CandidateForm.WHOLE_ANSWERS),
    ],
)
async def test_the_loop_rejects_early_where_the_server_allows_it(
    servers: Servers, kind: str, settings: Any, form: c.CandidateForm
) -> None:
    """As the service starts it. Guards against settings that begin another engine, and against a
    usage without the prompt's tokens, which only the server knows."""
    request = c.GenerationRequest(SPEC.prompt, replace(SAMPLING, max_tokens=64), c.Selection(n=8))
    model = Completions(servers.directory, "chat" if kind == "whole" else kind, **settings)
    servicer = GeneratorServicer(lease_s=60)
    async with served(model.reply) as endpoint, AsyncExitStack() as resources:
        made, heartbeat = await open_generator(settings_of(endpoint.url), resources)
        assert isinstance(made, StockGenerator) and heartbeat() == 0
        servicer.load(made)
        endpoint.requests.clear()
        async with serving(servicer.service()) as channel:
            client = RemoteGenerator(channel)
            assert (await client.describe()).form is form
            *_, last = [event async for event in run(request, client, LetterScorer("a"))]
        assert isinstance(last, c.Finished)
        usage, rounds = last.generation.usage, last.generation.rounds
        assert usage.prompt_tokens == 12
        rejected = [trace.num_rejected for trace in rounds]
        assert rejected == ([0] if form is c.CandidateForm.WHOLE_ANSWERS else [4, 2, 0])
        assert usage.generated_tokens == (8 * 64 if len(rounds) == 1 else 8 * 16 + 4 * 16 + 2 * 32)
        if form is c.CandidateForm.ROUNDS:
            asked = [body.body["max_tokens"] for body in endpoint.requests]
            assert sum(asked) == usage.generated_tokens
