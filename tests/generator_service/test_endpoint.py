"""The generator of whole answers, against an endpoint on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from generator_service.__main__ import open_generator
from generator_service.engine.commands import Step
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.stock import endpoint as endpoint_module
from generator_service.stock.endpoint import EndpointGenerator
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
from tests.orchestrator.runs import LetterScorer
from tests.reward_service.endpoint import Endpoint, Replies, Reply, served
from tests.serving import serving, turns, until

SPEC = c.SessionSpec(c.Prompt.from_user("why?"), 4, c.Sampling(max_tokens=9, seed=5), 16)
REFUSED: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 2,
    "structured_output": c.JsonObject(),
}
# Sent in another form, or refused.
CONVERTED = {"stop", "logit_bias", "seed", *REFUSED}
Body = Mapping[str, Any]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_FIRST_DELAY_S", 0.001)


@asynccontextmanager
async def generator(
    reply: Replies, steps: list[Step] | None = None, **settings: Any
) -> AsyncIterator[tuple[EndpointGenerator, Endpoint]]:
    async with served(reply) as endpoint:
        options = {"model": "m", "remote_url": f"{endpoint.url}/", **settings}
        made = EndpointGenerator(
            GeneratorSettings(engine="remote", **options),
            steps.append if steps is not None else None,
        )
        try:
            yield made, endpoint
        finally:
            await made.close()
            assert made.load().slots.owned == made.load().sessions == 0


def answered(text: str, finish: str = "stop") -> Reply:
    """A complete answer to a conversation of 7 tokens, of 3 tokens of log-probability -0.5."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
        "logprobs": {"content": [{"token": "t", "logprob": -0.5}] * 3},
    }
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return Reply({"choices": [choice], "usage": usage})


def with_choice(changes: Body, **counts: float) -> Reply:
    """An answer of one token without log-probabilities, with these changes."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, **counts}
    choice = {"text": "t", "finish_reason": "stop", **changes}
    return Reply({"choices": [choice], "usage": usage})


def by_seed(body: Body, _: int) -> Reply:
    """Candidate 2, of seed 7, is cut off."""
    return answered(f"seed {body['seed']}", finish="length" if body["seed"] == 7 else "stop")


async def test_candidates_are_whole_answers() -> None:
    """Guards against equal candidates, tokens that are not the endpoint's, and a prompt that is
    charged once per candidate but counted once."""
    steps: list[Step] = []
    async with generator(by_seed, steps) as (made, endpoint), made.open(SPEC) as session:
        assert session.n == 4 and made.load().slots.owned == 4 * 9
        ended = await session.extend(3)
        assert (ended.ended_by, ended.num_tokens) == (c.RoundEnd.ALL_FINISHED, 3)
        assert (session.prompt_tokens, ended.prompt_tokens) == (0, 7)
        assert [(one.id, one.text) for one in ended.candidates] == [
            (number, f"seed {5 + number}") for number in range(4)
        ]
        cut = [one.id for one in ended.candidates if one.finish is c.FinishReason.LENGTH]
        assert cut == [2]
        assert {(one.num_tokens, one.logprob) for one in ended.candidates} == {(3, -1.5)}
        assert (await session.extend(9)).candidates == ()
    assert sum(step.generated for step in steps) == 4 * 3
    assert sum(step.prefilled for step in steps) == 4 * 7
    request = endpoint.requests[0]
    assert (request.path, request.body["messages"]) == (
        "/v1/chat/completions",
        [{"role": "user", "content": "why?"}],
    )
    sent = [request.body[name] for name in ("model", "max_tokens", "logprobs")]
    assert sent == ["m", 9, True]
    assert "authorization" not in request.headers and "top_k" not in request.body


async def test_raw_text_and_every_sampling_field_reach_the_endpoint(tmp_path: Path) -> None:
    """Guards against options that are accepted and dropped."""

    def reply(body: Body, _: int) -> Reply:
        choice = {"text": "t", "finish_reason": "stop", "logprobs": {"token_logprobs": [None, -2]}}
        return Reply({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})

    sampling = c.Sampling(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.5, stop=("END",), min_p=0.1, min_tokens=2,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, ignore_eos=True,
        logit_bias=(c.TokenBias(7, -1.0),), bad_words=("x",), stop_token_ids=(4,),
    )  # fmt: skip
    key = tmp_path / "key"
    key.write_text("secret\n")
    spec = replace(SPEC, prompt=c.Prompt(text="once"), sampling=sampling, n=1)
    async with (
        generator(reply, remote_key_file=key) as (made, endpoint),
        made.open(spec) as session,
    ):
        (candidate,) = (await session.extend(9)).candidates
    assert (candidate.text, candidate.num_tokens, candidate.logprob) == ("t", 2, -2.0)
    request, body = endpoint.requests[0], endpoint.requests[0].body
    assert (request.path, body["prompt"], request.headers["authorization"]) == (
        "/v1/completions", "once", "Bearer secret",
    )  # fmt: skip
    for name in {field.name for field in fields(c.Sampling)} - CONVERTED:
        value = getattr(sampling, name)
        assert body[name] == (list(value) if isinstance(value, tuple) else value)
    assert (body["stop"], body["logit_bias"]) == (["END"], {"7": -1.0})


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_endpoint_is_called_again(status: int) -> None:
    """Guards against a request that fails for one refusal, and a storm without delays."""

    def reply(body: Body, number: int) -> Reply:
        busy = Reply({}, status, {"Retry-After": "0.01"})
        return busy if number < 2 else by_seed(body, number)

    spec = replace(SPEC, n=1)
    async with generator(reply) as (made, endpoint), made.open(spec) as session:
        began = asyncio.get_running_loop().time()
        assert len((await session.extend(9)).candidates) == 1
        assert asyncio.get_running_loop().time() - began >= 0.02
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("reply", "kind", "text", "most"),
    [
        (Reply({}, 429), Overloaded, "the endpoint limits requests", 4),
        (Reply({}, 502), Unavailable, "answers with status 502", 4),
        (Reply({"error": {"message": "max_tokens is too large"}}, 400), InvalidRequest,
         "max_tokens is too large", 1),
        (Reply({}, 401), InternalError, "refuses the key", 1),
        (Reply({"choices": []}), InternalError, "answer cannot be read: IndexError", 1),
        (with_choice({}), InternalError, "reports no logprobs: set remote_logprobs", 1),
        (with_choice({"logprobs": {"token_logprobs": [-1.0, float("nan")]}}), InternalError,
         "answer cannot be read: ValueError log-probabilities must be finite", 1),
        (with_choice({"logprobs": {"token_logprobs": [9.0, -1.0]}}), InternalError,
         "answer cannot be read: ValueError log-probabilities must be finite and at most 0", 1),
        *((with_choice({}, prompt_tokens=wrong), InternalError,
           "answer cannot be read: ValueError counts of tokens must be from 0", 1)
          for wrong in (-1, 1 << 31)),
        (with_choice({"logprobs": {"token_logprobs": [-9.0]}}, completion_tokens=0), InternalError,
         "answer cannot be read: ValueError log-probabilities of no tokens", 1),
        (Reply({"error": {"message": "cut \ud83d"}}, 400), InvalidRequest, "cut \ufffd", 1),
        (Reply(b"[" * 100_000), InternalError, "cannot be read: RecursionError", 1),
    ],
)  # fmt: skip
async def test_failures_are_those_of_the_status_table(
    reply: Reply, kind: type[SpecrejError], text: str, most: int
) -> None:
    """Guards against retries of what fails for good, an error without its cause or with a text
    that no status can hold, and counts or log-probabilities that make a candidate the best."""
    spec = replace(SPEC, n=1)
    async with generator(lambda *_: reply) as (made, endpoint), made.open(spec) as session:
        with pytest.raises(kind, match=text) as failure:
            await session.extend(9)
    assert len(endpoint.requests) == most
    assert to_status(failure.value)[1] == failure.value.message


async def test_half_a_surrogate_pair_is_one_replacement_character() -> None:
    """Guards against N answers that are lost since one ends within an emoji."""
    reply = with_choice({"text": "\U0001f600 cut \ud83d"})
    async with (
        generator(lambda *_: reply, remote_logprobs=False) as (made, _),
        made.open(SPEC) as session,
    ):
        (text,) = {one.text for one in (await session.extend(9)).candidates}
    assert text == "\U0001f600 cut \ufffd"


@pytest.mark.parametrize("left_s", [5.0, 100.0, None])
async def test_a_delay_beyond_the_time_left_is_returned(
    monkeypatch: pytest.MonkeyPatch, left_s: float | None
) -> None:
    """Guards against a caller that waits for an answer that cannot be in time, and one that
    returns before the endpoint takes requests again."""
    monkeypatch.setattr(endpoint_module, "time_left_s", lambda: left_s)
    busy = Reply({}, 429, {"Retry-After": "120"})
    async with (
        generator(lambda *_: busy) as (made, endpoint),
        made.open(replace(SPEC, n=1)) as session,
    ):
        with pytest.raises(Overloaded) as refused:
            await session.extend(9)
    assert refused.value.retry_after_s == 120 and len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [("120", 120), ("inf", 86_400), ("nan", 0), ("-1", 0), ("", 0), ("soon", 0)],
)
def test_delays_of_an_endpoint(text: str, delay_s: float) -> None:
    """Guards against a delay that no Duration holds."""
    assert endpoint_module._retry_after_s(text) == delay_s


async def test_an_endpoint_that_is_down_is_unavailable() -> None:
    async with generator(by_seed) as (made, _):
        made._url = "http://127.0.0.1:9/v1"
        async with made.open(replace(SPEC, n=1)) as session:
            with pytest.raises(Unavailable, match="does not answer: ConnectError"):
                await session.extend(9)


async def test_cancelling_closes_every_request() -> None:
    """Guards against an endpoint that makes, and charges, answers without a reader."""
    async with (
        generator(lambda *_: Reply(is_held=True)) as (made, endpoint),
        made.open(SPEC) as session,
    ):
        extending = asyncio.create_task(session.extend(9))
        await until(lambda: endpoint.running == 4)
        extending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await extending
        await until(lambda: endpoint.num_gone == 4)


async def test_a_small_session_does_not_wait_for_all_of_a_large_one() -> None:
    """Guards a request for one candidate against minutes behind a thousand of another one, and an
    endpoint against hundreds of connections for one large N."""

    def reply(body: Body, number: int) -> Reply:
        return replace(by_seed(body, number), is_held=number < 2)

    single = replace(SPEC, n=1, sampling=replace(SPEC.sampling, seed=99))
    async with (
        generator(reply, remote_requests=2) as (made, endpoint),
        made.open(replace(SPEC, n=20)) as large,
        made.open(single) as small,
    ):
        growing = asyncio.create_task(large.extend(9))
        await until(lambda: endpoint.running == 2)
        waiting = [asyncio.create_task(small.extend(9)) for _ in range(2)]
        await turns(3)
        waiting[0].cancel()
        endpoint.release.set()
        assert len((await asyncio.wait_for(waiting[1], 20)).candidates) == 1
        assert len((await asyncio.wait_for(growing, 20)).candidates) == 20
        assert 99 in [request.body["seed"] for request in endpoint.requests[2:4]]
        assert endpoint.most_running == 2
        async with asyncio.timeout(10), made._place(large), made._place(small):
            assert made._places.locked()  # both were free, and there are no more


async def test_sessions_are_bounded() -> None:
    async with generator(by_seed, max_waiting=0) as (made, _), made.open(SPEC):
        with pytest.raises(Overloaded, match="sessions are open"):
            async with made.open(SPEC):
                pass


async def test_parts_that_an_endpoint_lacks_are_refused() -> None:
    sampling, prompt = (
        replace(SPEC.sampling, **REFUSED),
        c.Prompt(text="t", allow_special_tokens=True),
    )
    async with generator(by_seed) as (made, endpoint):
        with pytest.raises(InvalidRequest) as refused:
            async with made.open(replace(SPEC, prompt=prompt, sampling=sampling)):
                pass
    fields = {violation.field for violation in refused.value.violations}
    assert fields == {*(f"sampling.{name}" for name in REFUSED), "prompt.allow_special_tokens"}
    assert not endpoint.requests


async def test_the_service_of_an_endpoint() -> None:
    """Guards against settings that begin another engine, and a usage without the prompt's tokens,
    which are known once the first answer is there."""
    request = c.GenerationRequest(SPEC.prompt, SPEC.sampling, c.Selection(n=2))
    servicer = GeneratorServicer(lease_s=5)
    async with served(by_seed) as endpoint, AsyncExitStack() as resources:
        settings = GeneratorSettings(engine="remote", model="toy:m", remote_url=endpoint.url)
        made, heartbeat = await open_generator(settings, resources)
        assert isinstance(made, EndpointGenerator) and heartbeat() == 0
        servicer.load(made)
        channel = await resources.enter_async_context(serving(servicer.service()))
        client = RemoteGenerator(channel)
        assert (await client.describe()).whole_answers
        events = [event async for event in run(request, client, LetterScorer("a"))]
    assert isinstance(events[-1], c.Finished)
    assert events[-1].generation.usage.prompt_tokens == 7
