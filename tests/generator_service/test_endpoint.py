"""The stock engine before a scripted server of OpenAI's API on loopback, correct and faulty."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from generator_service.__main__ import open_generator
from generator_service.servicer import GeneratorServicer
from generator_service.stock import server as server_module
from generator_service.stock.api import Abilities
from generator_service.stock.endpoint import TextFrontend, open_endpoint
from generator_service.stock.generator import StockGenerator
from orchestrator.loop.run import run
from specrej import contracts as c
from specrej.answer_form import parts_of
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    SpecrejError,
    Unavailable,
)
from specrej.contracts.status import to_status
from specrej.remote import RemoteGenerator
from tests.generator_service.completions import (
    EOS_ID,
    Completions,
    Servers,
    Started,
    ids_of,
    logprob_of,
    save_tokenizer,
    settings_of,
    started,
    text_of,
    top_of,
)
from tests.images import image
from tests.orchestrator.runs import LetterScorer
from tests.reward_service.endpoint import Reply, served
from tests.serving import serving, turns, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT_IDS = [1, *ids_of("<user>why?"), EOS_ID]
SAMPLING = c.Sampling(max_tokens=24, seed=5, ignore_eos=True)
SPEC = c.SessionSpec(c.Prompt.from_user("why?"), 4, SAMPLING, 8)
IN_STREAMS = replace(SAMPLING, presence_penalty=0.5)
KINDS = pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
# Tokens beyond a round's that are requested, for the end of its last character.
MORE = {"vllm": 0, "llamacpp": 3, "chat": 0}
ALL_KINDS = pytest.mark.parametrize("kind", ["vllm", "llamacpp", "chat"])
FORMS = pytest.mark.parametrize("sampling", [SAMPLING, IN_STREAMS], ids=["rounds", "streams"])
HELD = Reply(is_held=True)
OPENAI = {"streams", "seeds", "log-probabilities"}
CHAT = OPENAI | {"structured outputs (response_format)"}
VLLM = OPENAI | {"token ids", "structured outputs (structured_outputs)", "grammars"}
LLAMA = (OPENAI | {"token ids", "structured outputs (json_schema)"}) - {"seeds"}
ROUNDS, STREAMS, WHOLE = [*c.CandidateForm][1:]


@pytest.mark.parametrize(
    ("changes", "form", "abilities"),
    [
        ({}, ROUNDS, VLLM),
        ({"kind": "llamacpp"}, ROUNDS, LLAMA),
        ({"streams": False}, ROUNDS, VLLM - {"streams"}),
        ({"seeds": "ignored"}, ROUNDS, VLLM - {"seeds"}),
        ({"seeds": "constant"}, ROUNDS, VLLM - {"seeds"}),
        ({"directory": Path("none")}, STREAMS, VLLM - {"token ids", "grammars"}),
        ({"directory": "other"}, STREAMS, VLLM - {"token ids", "grammars"}),
        ({"ids": False}, STREAMS, VLLM - {"token ids", "grammars"}),
        ({"kind": "chat"}, STREAMS, CHAT),
        ({"kind": "chat", "logprobs": False}, STREAMS, CHAT - {"log-probabilities"}),
        ({"kind": "chat", "streams": False}, WHOLE, CHAT - {"streams"}),
        ({"kind": "chat", "tools": True}, STREAMS, CHAT | {"tools"}),
    ],
)
async def test_the_form_is_found_by_what_the_server_does(
    servers: Servers, tmp_path: Path, changes: Any, form: c.CandidateForm, abilities: set[str]
) -> None:
    """Guards against ids of another tokenizer, rounds that a server cannot continue, and equal
    answers promised where seeds are not honoured."""
    model = replace(Completions(servers.directory), **changes)
    if changes.get("directory") == "other":
        model.directory = save_tokenizer(tmp_path, reverses=True)
    async with started(model) as server:
        card = await server.generator.describe()
        assert (card.form, {*card.abilities}) == (form, abilities)
        assert card.ignores_seeds == ("seeds" not in abilities)
        assert card.can_fork == (form is ROUNDS)
        if model.kind != "llamacpp":  # whose seeds are not tried
            assert server.endpoint.num_connections >= 5  # seeds are tried at once
        assert card.context_tokens == (131_072 if model.kind == "chat" else 250)
        for sampling in (SAMPLING, IN_STREAMS):
            spec = replace(SPEC, sampling=sampling, n=1)
            async with server.generator.open(spec) as session:
                (candidate,) = (await session.extend(24)).candidates
            assert (candidate.num_tokens, len(candidate.text)) == (24, 24)


@pytest.mark.parametrize(
    ("reply", "settings", "kind", "text"),
    [
        (None, {"model": "x"}, ValueError, "has no model x; it has: m"),
        (None, {"remote_tokenizer": "/none"}, OSError, "/none: no model directory"),
        (Reply({}, 401), {}, InternalError, "refuses the key: status 401"),
        (Reply([]), {}, InternalError, "read: TypeError"),
        (Reply({"choices": ["x"], "data": [{"id": "m"}]}), {}, InternalError, "read: Attribute"),
        (Reply({"choices": [], "data": [{"id": "m"}]}), {}, InternalError, "read: IndexError"),
        (Reply({"data": [{"id": "m", "meta": [1]}]}), {}, InternalError, "read: Attribute"),
    ],
)
async def test_a_server_that_cannot_be_used_ends_the_start(
    servers: Servers, reply: Reply | None, settings: Any, kind: type[Exception], text: str
) -> None:
    """Guards against a service that waits for what never comes."""
    model = Completions(servers.directory)
    async with served(lambda *request: reply or model.reply(*request)) as endpoint:
        with pytest.raises(kind, match=text):
            await open_endpoint(settings_of(endpoint.url, **settings))


async def test_a_server_that_starts_later_is_waited_for(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not listen yet, and then loads its model."""
    model, loading = Completions(servers.directory), Reply({}, 503)
    async with served() as gone:
        pass
    opening = asyncio.create_task(open_endpoint(settings_of(gone.url)))
    await until(lambda: "does not answer: ConnectError" in caplog.text)
    async with served(lambda b, n: loading if n < 2 else model.reply(b, n), gone.port):
        generator = await opening
        assert (await generator.describe()).form is ROUNDS
        await generator.close()
    assert "answers with status 503" in caplog.text


async def test_the_key_is_a_line_of_a_file_that_may_change(
    servers: Servers, tmp_path: Path
) -> None:
    """Guards against a key that ends the headers, and one that needs a restart."""
    path = tmp_path / "key"
    for bad in ("two\nlines", "", None):
        path.unlink(missing_ok=True) if bad is None else path.write_text(bad)
        with pytest.raises((ValueError, OSError)):
            await open_endpoint(settings_of("http://127.0.0.1:9/v1", remote_key_file=path))
    path.write_text("first")
    server = await servers.get(remote_key_file=path)
    for written in ("next\n", "two\nlines"):
        path.write_text(written)
        async with server.generator.open(replace(SPEC, n=1)) as session:
            await session.extend(2)
    headers = [request.headers for request in server.endpoint.requests]
    assert [header["authorization"] for header in headers] == ["Bearer next"] * 2


@pytest.mark.parametrize("kind", ["vllm", "chat"])
async def test_images_are_sent_in_messages(servers: Servers, kind: str) -> None:
    """In their order, in one request per candidate, whose prompt the server counts."""
    first, second = image(), image(kind="jpeg")
    parts = (c.TextPart("is "), first, c.TextPart(" or "), second)
    prompt = c.Prompt((c.Message("user", "Hm."), c.Message("user", parts=parts)))
    sampling = replace(SAMPLING, logprobs=kind == "vllm", top_logprobs=2 if kind == "vllm" else 0)
    async with started(Completions(servers.directory, kind, images=True)) as server:
        card = await server.generator.describe()
        assert card.takes_images
        spec = c.SessionSpec(prompt, 3, sampling, 8)
        async with server.generator.open(spec) as session:
            made = await session.extend(8)
            assert (await session.prune([0, 1], {3: 0})).refused == (3,)
            ended = await session.extend(24)
            assert session.prompt_tokens == server.model.usages[-1]["prompt_tokens"]
        assert [len(one.text) for one in ended.candidates] == [24, 24]
        if kind == "vllm":
            assert ended.candidates[0].new_token_ids
            assert [len(one.new_top_logprobs) for one in ended.candidates] == [32, 32]
        one, other = ({"url": file.data_uri} for file in (first, second))
        pieces = ("text", "is "), ("image_url", one), ("text", " or "), ("image_url", other)
        content = [{"type": kind, kind: piece} for kind, piece in pieces]
        turns = [{"role": "user", "content": "Hm."}, {"role": "user", "content": content}]
        assert [body["messages"] for body in server.sent] == [turns] * 3
        assert len({one.text for one in made.candidates}) == 3
        with pytest.raises(InvalidRequest, match="at most 16 images"):
            many = c.Prompt((c.Message("user", parts=(first,) * 17),))
            await server.generator.check(replace(spec, prompt=many))


SEVEN = '{"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}'
TOOLS = (c.Tool("count", "Counts.", SEVEN),)
CALL = c.ToolCall("call_0_0", "count", '{"a": 7}')
TURNS = (
    c.Message("user", "why?"),
    c.Message("assistant", "", (CALL,)),
    c.Message("tool", "seven", tool_call_id="call_0_0"),
)


async def answered(server: Started, prompt: c.Prompt) -> tuple[c.AnswerParts | None, list[Any]]:
    """The parts of a candidate's answer, and the bodies of what was sent."""
    server.endpoint.requests.clear()
    spec = replace(SPEC, prompt=prompt, n=1, sampling=c.Sampling(max_tokens=24))
    async with server.generator.open(spec) as session:
        (candidate,) = (await session.extend(24)).candidates
    parts = parts_of(candidate.text, session.answer_form, complete=True)
    return parts, [request.body for request in server.endpoint.requests]


@pytest.mark.parametrize("streams", [True, False])
async def test_chats_have_tools_as_the_server_takes_them(servers: Servers, streams: bool) -> None:
    """Guards calls that are lost, arguments of another call, and fields that do not arrive."""
    model = Completions(servers.directory, "chat", streams, tools=True)
    async with started(model) as server:
        assert (await server.generator.describe()).tool_format == "hermes"
        prompt = c.Prompt(TURNS, tools=TOOLS, parallel_tool_calls=False)
        parts, (body,) = await answered(server, prompt)
        content = "Let" if streams else ""
        calls = (CALL, replace(CALL, id="call_0_1"))
        assert parts == c.AnswerParts(content, "", calls)
        assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
        assert body["tools"][0]["function"]["parameters"] == json.loads(SEVEN)
        made = {"id": CALL.id, "type": "function"}
        function = {"name": "count", "arguments": CALL.arguments}
        (call,) = body["messages"][1]["tool_calls"]
        assert call == {**made, "function": function}
        assert body["messages"][2]["tool_call_id"] == CALL.id
        named = replace(prompt, tool_choice="required", tool_name="count")
        parts, (body,) = await answered(server, named)
        assert parts and parts.tool_calls == (CALL,)
        assert body["tool_choice"] == {"type": "function", "function": {"name": "count"}}
        if not streams:  # a count that memory does not hold
            usage = {"prompt_tokens": 9, "completion_tokens": 2**31 - 1}
            counted = Reply({"choices": [{"message": {"content": "x"}}], "usage": usage})
            model.behave(script=lambda *_: counted)
            with pytest.raises(InternalError, match="more tokens than requested"):
                await answered(server, prompt)
        else:  # of a call that is cut off the end, which is written here, is no token
            pieces: list[Any] = [{"name": "count", "arguments": '{"a": "'}]
            pieces += [{"arguments": "x"}] * 23
            whole: list[Any] = [{"name": "count", "arguments": CALL.arguments}]
            for functions, content, finish in ((pieces, "", "length"), (whole, "Done.", "stop")):
                deltas = [{"tool_calls": [{"index": 0, "function": one}]} for one in functions]
                choices: list[Any] = [{"delta": one} for one in (*deltas, {"content": content})]
                choices[-1]["finish_reason"] = finish
                lines = [line_of({"choices": [choice]}) for choice in choices]
                reply = replace(events(*lines, b"data: [DONE]\n\n"), keeps=True)
                model.behave(script=lambda *_, reply=reply: reply)
                parts, _ = await answered(server, prompt)
                if functions == whole:
                    assert parts == c.AnswerParts("Done.", "", (CALL,))
                else:
                    assert parts and not parts.tool_calls and parts.content.count("x") == 23


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("finish", ["stop", "length"])
async def test_reasoning_that_a_chat_has_parsed_is_a_part_of_the_answer(
    servers: Servers, name: str, streams: bool, finish: str
) -> None:
    """Guards reasoning that is lost, or scored as the answer; one that is cut has no answer."""
    said = {"content": "Four"} if finish == "stop" else {}
    deltas = [{name: "Two"}, {name: " times"}, said]
    choices: list[Any] = [*({"delta": delta} for delta in deltas), {"delta": {}}]
    if not streams:
        choices = [{"message": {name: "Two times", **said}}]
    choices[-1]["finish_reason"] = finish
    messages: list[Any] = [{"choices": [choice]} for choice in choices]
    messages[-1]["usage"] = {"prompt_tokens": 9, "completion_tokens": 24}
    reply = events(*map(line_of, messages), b"data: [DONE]\n\n") if streams else Reply(messages[0])
    model = Completions(servers.directory, "chat", streams)
    async with started(model) as server:
        model.behave(script=lambda *_: replace(reply, keeps=True))
        parts, _ = await answered(server, c.Prompt.from_user("why?"))
        assert parts == c.AnswerParts(said.get("content", ""), "Two times", ())


async def test_a_chat_without_tools_is_asked_for_json(servers: Servers) -> None:
    server = await servers.get("chat")
    assert (await server.generator.describe()).tool_format == "json"
    _, (body,) = await answered(server, c.Prompt(TURNS, tools=TOOLS))
    first, *turns = body["messages"]
    assert "tools" not in body and '"count"' in first["content"]
    assert first["content"].endswith("why?")
    assert [turn["content"] for turn in turns] == [
        '{"name": "count", "arguments": {"a": 7}}',
        "Result of count: seven",
    ]


@KINDS
async def test_calls_are_constrained_where_the_server_has_grammars(
    servers: Servers, kind: str
) -> None:
    server = await servers.get(kind, context_tokens=2000)
    _, bodies = await answered(server, c.Prompt(TURNS, tools=TOOLS))
    grammars = [body.get("structured_outputs", {}).get("grammar", "") for body in bodies]
    assert all(("count" in one) is (kind == "vllm") for one in grammars)
    bounded = replace(SPEC, sampling=c.Sampling(max_tokens=24, max_thinking_tokens=3))
    with pytest.raises(InvalidRequest, match="max_thinking_tokens: must be absent"):
        await server.generator.check(bounded)


@KINDS
async def test_rounds_continue_with_the_candidates_own_tokens(servers: Servers, kind: str) -> None:
    """Guards against a fork, or a survivor, that goes on with another one's tokens, and against
    draws of one candidate in another; equal sessions send equal requests."""
    server, sent = await servers.get(kind), []
    for _ in range(2):
        async with server.generator.open(SPEC) as session:
            first = await session.extend(5)
            pruned = await session.prune([0, 2], {4: 2, 5: 3})
            last = await session.extend(24)
        assert not pruned.refused and session.prompt_tokens == len(PROMPT_IDS)
        sent.append(server.sent)
        server.endpoint.requests.clear()
    assert sent[0] == sent[1] and len({body["seed"] for body in sent[0]}) == 8
    own = {one.id: [*one.new_token_ids] for one in first.candidates}
    parents = {0: 0, 2: 2, 4: 2, 5: 3}
    assert [one.id for one in last.candidates] == [*parents]
    prompts = [body["prompt"] for body in sent[0]]
    assert prompts[:4] == [PROMPT_IDS] * 4
    assert sorted(prompts[4:]) == sorted([*PROMPT_IDS, *own[n]] for n in parents.values())
    whole = [[*own[parents[one.id]], *one.new_token_ids] for one in last.candidates]
    assert sorted([*PROMPT_IDS, *ids] for ids in [*own.values(), *whole]) == sorted(
        [*ids, *server.model.tokens(ids, body["seed"], body["max_tokens"] - MORE[kind], 24)]
        for ids, body in zip(prompts, sent[0], strict=True)
    )
    assert [one.text for one in last.candidates] == [text_of(ids) for ids in whole]
    assert [one.logprob for one in last.candidates] == [sum(map(logprob_of, w)) for w in whole]
    assert sum(step.generated for step in server.steps) == 2 * (4 * 5 + 4 * 19)


@pytest.mark.parametrize(
    ("name", "value", "num_tokens"),
    [
        ("presence_penalty", 0.5, 24),
        ("frequency_penalty", -0.5, 24),
        ("structured_output", c.JsonObject(), 9),
    ],
)
async def test_what_a_continued_prompt_would_change_goes_by_streams(
    servers: Servers, name: str, value: Any, num_tokens: int
) -> None:
    server = await servers.get()
    spec = replace(SPEC, sampling=replace(SAMPLING, **{name: value}))
    async with server.generator.open(spec) as session:
        assert {one.num_tokens for one in (await session.extend(5)).candidates} == {5}
        assert (await session.prune([0, 2], {4: 0})).refused == (4,)
        ended = await session.extend(24)
    assert {one.id: one.num_tokens for one in ended.candidates} == {0: num_tokens, 2: num_tokens}
    assert [body["max_tokens"] for body in server.sent] == [24] * 4
    field = "structured_outputs" if name == "structured_output" else name
    assert all(body[field] for body in server.sent)


@FORMS
@pytest.mark.parametrize(
    ("rounds", "discarded"), [((24,), 2), ((5, 24), 1), ((9, 24), 2), ((10,), 0)]
)
async def test_a_stop_text_may_lie_over_a_border(
    servers: Servers, sampling: c.Sampling, rounds: tuple[int, ...], discarded: int
) -> None:
    """Also within a character, whose first bytes are not shown. The server's messages have three
    tokens: those after the stop are discarded."""
    server = await servers.get()
    server.model.behave("né 面 END.", chunk=3)
    spec = replace(SPEC, sampling=replace(sampling, stop=("面 EN",)))
    async with server.generator.open(spec) as session:
        for until_tokens in rounds:
            ended = await session.extend(until_tokens)
            if until_tokens == 5:
                assert {one.text for one in ended.candidates} == {"né "}
        pruned = await session.prune([])
    assert {(one.text, one.num_tokens, one.finish) for one in ended.candidates} == {
        ("né ", 10, c.FinishReason.STOP)
    }
    if sampling is SAMPLING:
        assert pruned.discarded_tokens == 4 * discarded


@FORMS
@KINDS
async def test_log_probabilities_are_those_of_each_round(
    servers: Servers, kind: str, sampling: c.Sampling
) -> None:
    """Guards against vLLM's drawn token, which it lists before the most probable ones."""
    server = await servers.get(kind)
    spec = replace(SPEC, sampling=replace(sampling, logprobs=True, top_logprobs=2))
    async with server.generator.open(spec) as session:
        for before, until_tokens in itertools.pairwise((0, 3, 24)):
            ended, count = await session.extend(until_tokens), until_tokens - before
            for one in ended.candidates:
                assert len(one.new_token_ids) == count
                assert [*one.new_logprobs] == [logprob_of(drawn) for drawn in one.new_token_ids]
                assert one.new_top_token_ids == (*top_of(2),) * count
                assert one.new_top_logprobs == (*top_of(2).values(),) * count
            named = {*top_of(2)}.union(*(one.new_token_ids for one in ended.candidates))
            assert {one.token_id for one in ended.token_texts} == named


@KINDS
@pytest.mark.parametrize("is_read", [True, False])
async def test_prompt_tokens_computed_anew_are_the_servers(
    servers: Servers, kind: str, is_read: bool
) -> None:
    """Also of candidates that end by themselves, whose usage follows their last tokens, and before
    that is a count so far."""
    server, all_anew = await servers.get(kind), 0
    early = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    server.model.behave(ends=True, spoil=lambda message: early | message)
    spec = replace(SPEC, n=8, sampling=replace(SAMPLING, ignore_eos=False))
    async with server.generator.open(spec) as session:
        for until_tokens in (5, 24):
            ended = await session.extend(until_tokens, (lambda _: None) if is_read else None)
            usages = server.model.usages
            cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
            anew = sum(usage["prompt_tokens"] for usage in usages) - sum(cached)
            assert ended.prefilled_tokens == anew > 0
            usages.clear()
            all_anew += anew
        assert {one.finish for one in ended.candidates} >= {c.FinishReason.STOP}
    assert sum(step.prefilled for step in server.steps) == all_anew


async def test_the_server_counts_the_prompts_of_texts(servers: Servers) -> None:
    """Tokens that were read ahead, and belong to no candidate, are counted."""
    server = await servers.get("chat")
    server.model.behave(hold_after=12)
    async with server.generator.open(SPEC) as session:
        ended = await session.extend(5)
        assert session.prompt_tokens == ended.prompt_tokens == 0
        await turns(200)  # until the tokens before the hold have come
        assert (await session.prune([0, 2])).discarded_tokens == 2 * (12 - 5)
        await until(lambda: server.endpoint.running == 2, bound_s=2)
        server.endpoint.release.set()
        ended = await session.extend(24)
        assert ended.prompt_tokens == session.prompt_tokens == len(PROMPT_IDS)
        assert {(one.num_tokens, len(one.text)) for one in ended.candidates} == {(24, 24)}
        assert (await session.extend(24)).candidates == ()


async def test_a_stream_may_have_parts_of_characters_and_other_line_ends(servers: Servers) -> None:
    """Guards against answers that are lost since one ends within an emoji, or has a character at
    which Python, but not JSON, ends lines."""
    server, said = await servers.get("chat"), "\u2028\x85 \U0001f600 cut".encode()
    choice = b'{"delta": {"content": "%s\\ud83d \xf0\x9f"}, "finish_reason": "stop"}' % said
    line = b'data: {"choices": [%s]}\r\n\r\n' % choice
    reply = Reply(
        stream=[b": ping\n\n", line[:70], line[70:], b"data: [DONE]\n\n"],
        headers={"Content-Type": "text/event-stream; charset=utf-8"},
    )
    server.model.behave(script=lambda *_: reply)
    async with server.generator.open(SPEC) as session:
        ended = await session.extend(24)
    assert {one.text for one in ended.candidates} == {f"{said.decode()}\ufffd \ufffd"}


@FORMS
@ALL_KINDS
async def test_a_server_that_stops_early_and_counts_nothing(
    servers: Servers, kind: str, sampling: c.Sampling
) -> None:
    """By a limit of its own: its answers are cut off, also if that is known after a round only.
    Without a usage nothing is known of prompts."""
    server = await servers.get(kind)
    server.model.behave(most=7, spoil=lambda message: message | {"usage": None})
    async with server.generator.open(replace(SPEC, sampling=sampling)) as session:
        ended = await session.extend(7 if sampling is IN_STREAMS else 24)
        assert {one.num_tokens for one in ended.candidates} == {7}
        if any(one.finish is None for one in ended.candidates):
            ended = await session.extend(24)
        assert {(one.num_tokens, one.finish) for one in ended.candidates} == {
            (7, c.FinishReason.LENGTH)
        }
        assert ended.prefilled_tokens == 0 and (await session.extend(24)).candidates == ()


@pytest.mark.parametrize("settings", [{}, {"remote_affinity_header": "X-Key"}])
async def test_requests_of_a_session_have_one_key(servers: Servers, settings: Any) -> None:
    server, keys = await servers.get(**settings), []
    name = settings.get("remote_affinity_header", "x-session-id").lower()
    for sampling in (SAMPLING, IN_STREAMS):
        async with server.generator.open(replace(SPEC, sampling=sampling)) as session:
            await session.extend(2)
            await session.extend(4)
        headers = [request.headers for request in server.endpoint.requests]
        assert {header["accept-encoding"] for header in headers} == {"identity"}
        keys.append({header[name] for header in headers})
        server.endpoint.requests.clear()
    assert [len(one) for one in keys] == [1, 1] and keys[0] != keys[1]


@ALL_KINDS
async def test_every_field_of_the_sampling_reaches_the_server(servers: Servers, kind: str) -> None:
    """Guards against options that are accepted and dropped, and defaults of a model's files."""
    server, is_llama = await servers.get(kind), kind == "llamacpp"
    sampling = c.Sampling(
        max_tokens=9, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, ignore_eos=True, stop=("END",),
        min_tokens=0 if is_llama else 2,
        logit_bias=(c.TokenBias(7, -1.0),), stop_token_ids=() if kind == "chat" else (4,),
    )  # fmt: skip
    for sent in (sampling, c.Sampling(max_tokens=9)):
        spec = replace(SPEC, n=1, sampling=sent, cache_salt="salt")
        async with server.generator.open(spec) as session:
            await session.extend(9)
    body, plain = (request.body for request in server.endpoint.requests)
    assert ("cache_salt" in body, "repeat_last_n" in body) == (kind == "vllm", is_llama)
    ours = {"stop", "seed", "logprobs", "top_logprobs", "structured_output"}
    ours |= {"stop_token_ids"} if is_llama else set()
    names = {field.name for field in fields(c.Sampling)} - ours
    unset = {name for name in names if not getattr(sampling, name)}
    # A new field is sent, or refused: see below.
    assert unset <= {"max_thinking_tokens", "min_tokens", "stop_token_ids"}
    for name in names:
        value = getattr(sampling, name)
        value = list(value) if isinstance(value, tuple) else value
        value = {"7": -1.0} if name == "logit_bias" else value
        value = 9 + MORE[kind] if name == "max_tokens" else value
        theirs = "repeat_penalty" if is_llama and name == "repetition_penalty" else name
        assert body.get(theirs, 0) == value or not value
    assert ("stop" in body) == (kind == "chat") and body["model"] == "m"
    assert plain.get("top_k") == {"vllm": -1, "llamacpp": 0, "chat": None}[kind]
    assert plain["temperature"] == plain["top_p"] == 1


@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 2, "stop_token_ids": (4,)},
         {"logprobs", "top_logprobs", "stop_token_ids"}),
        ("chat", {"structured_output": c.Regex("a")}, {"structured_output"}),
        ("llamacpp", {"min_tokens": 2}, {"min_tokens"}),
    ],
)  # fmt: skip
async def test_what_a_server_lacks_is_refused(
    servers: Servers, kind: str, changes: Any, names: set[str]
) -> None:
    server = await servers.get(kind)
    spec = replace(SPEC, sampling=replace(SAMPLING, **changes))
    with pytest.raises(InvalidRequest) as refused:
        async with server.generator.open(spec):
            pass
    fields = {violation.field for violation in refused.value.violations}
    assert fields == {f"sampling.{name}" for name in names} and not server.endpoint.requests


@pytest.mark.parametrize("name", ["structured_outputs", "json_schema"])
async def test_a_schema_that_would_be_misread_is_refused_without_a_tokenizer(name: str) -> None:
    """Guards against an internal error when the candidates are requested."""
    output = c.JsonSchema('{"type": "integer", "minimum": -9, "multipleOf": 3}')
    spec = replace(SPEC, sampling=replace(SAMPLING, structured_output=output))
    card = c.GeneratorDescription("m", "", 256, 8, 97, 8, "", c.SlotGauge(0, 0, 0))
    with pytest.raises(InvalidRequest, match="negative multiples"):
        await TextFrontend(card, Abilities(structured=name)).command(spec)


async def test_slots_bound_the_tokens_that_are_sent(servers: Servers) -> None:
    """A stream needs the slots of its whole answer."""
    server = await servers.get(kv_slots=(len(PROMPT_IDS) - 1) + 4 * 12)
    with pytest.raises(InvalidRequest, match="KV slots"):
        async with server.generator.open(replace(SPEC, sampling=IN_STREAMS)):
            pass
    async with server.generator.open(SPEC) as session:
        assert (await session.extend(24)).num_tokens == 12
        assert sum(body["max_tokens"] for body in server.sent) == 4 * 12


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


@ALL_KINDS
async def test_cancelling_at_any_time_loses_no_place(servers: Servers, kind: str) -> None:
    server = await servers.get(kind, remote_requests=2)
    for count in range(0, 60, 3):
        async with server.generator.open(SPEC) as session:
            extending = asyncio.create_task(session.extend(12))
            await turns(count)
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)
    async with asyncio.timeout(20), server.generator.open(SPEC) as session:
        assert len((await session.extend(24)).candidates) == 4


@pytest.mark.parametrize(("sessions", "n"), [(1, 20), (8, 3)])
async def test_sessions_and_tenants_share_the_places_by_turns(
    servers: Servers, sessions: int, n: int
) -> None:
    """Guards a request for one candidate against minutes behind a thousand of another one, or of
    another tenant, and a server against a connection for each of them."""
    server = await servers.get(remote_requests=2)
    failed = Reply({}, 500, is_held=True)
    server.model.behave(script=lambda _, number: failed if number < 2 else None)
    async with AsyncExitStack() as stack:
        spec, other = replace(SPEC, n=n, cache_salt="one"), replace(SPEC, n=1, cache_salt="other")
        opening = [server.generator.open(spec) for _ in range(sessions)]
        large = [await stack.enter_async_context(one) for one in opening]
        small = await stack.enter_async_context(server.generator.open(other))
        growing = asyncio.gather(*(one.extend(24) for one in large))
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


@KINDS
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
    [("vllm", {}, ROUNDS), ("chat", {}, STREAMS), ("chat", {"streams": False}, WHOLE)],
)
async def test_the_loop_rejects_early_where_the_server_allows_it(
    servers: Servers, kind: str, settings: Any, form: c.CandidateForm
) -> None:
    """As the service starts it. Guards against settings that begin another engine, and against a
    usage without the prompt's tokens, which only the server knows."""
    request = c.GenerationRequest(SPEC.prompt, replace(SAMPLING, max_tokens=64), c.Selection(n=8))
    model = Completions(servers.directory, kind, **settings)
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
        assert rejected == ([0] if form is WHOLE else [4, 2, 0])
        # In rounds one token behind a block of the cache: the prompt has 12.
        ends = {WHOLE: [64], STREAMS: [16, 32, 64], ROUNDS: [21, 37, 64]}[form]
        assert [trace.decision_token for trace in rounds] == ends
        rounds_of = zip((8, 4, 2), ends, [0, *ends], strict=False)
        assert usage.generated_tokens == sum(n * (end - begin) for n, end, begin in rounds_of)
        if form is ROUNDS:
            asked = [body.body["max_tokens"] for body in endpoint.requests]
            assert sum(asked) == usage.generated_tokens
