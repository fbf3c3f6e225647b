"""The page in a real browser, against all services on toys: one smoke test per use of it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf import json_format

from deploy.local.stack import Stack
from gateway.completions import ChatRequest, call_of, parsed
from gateway.settings import GatewaySettings
from specrej.client import Client
from specrej.client.client import build_request
from specrej.contracts import Fate, GenerationRequest, RequestRecord, wire
from specrej.v1 import orchestrator_pb2 as pb
from tests.gateway.gateways import gateway_at
from tests.gateway.page.window import END, PROMPT, SEEDED, UP, Window, fates_of, record_of
from tests.serving import describe_generator, until_slots_are_free

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUOTED = 'It\'s "quoted", with a \\ and\na second line.'
# Fields of requests whose code is compared with what Run sends.
REQUESTS: Mapping[str, Mapping[str, object]] = {
    "full slots": {"schedule": "memory", "first": 12},
    "a list": {"schedule": "tokens", "tokens": "5, 9 12", "alpha": 0.25},
    "branching": {"algorithm": "branching", "width": 6, "keep": 2, "taper": 0.5},
    "Best-of-N": {"algorithm": "best-of-n", "cache": True},
}


async def test_lanes_are_those_of_the_response(fresh: Window, client: Client) -> None:
    """Guards against lanes that show another cut than the service's, and another answer."""
    await fresh.run(**SEEDED)
    assert await fresh.ended() == "finished"
    record = await record_of(fresh, client)
    assert await fresh.fates() == fates_of(record)
    assert {Fate.REJECTED.value, "winner"} <= set(fates_of(record).values())
    options = {**SEEDED, "temperature": 0.7}
    same = await client.generate(PROMPT, **options)  # type: ignore[arg-type]
    assert await fresh.text("#answer") == same.best.text.strip()
    usage = record.usage
    assert usage and await fresh.text("#live .made") == f"{usage.generated_tokens:,}"
    saved = 1 - usage.generated_tokens / usage.best_of_n_tokens_estimate
    assert await fresh.text("#live .saved") == f"{round(100 * saved)} %"
    await check_card(fresh, record)


async def check_card(fresh: Window, record: RequestRecord) -> None:
    """The keyboard chooses a lane, and the text, scores and fate of its candidate are shown, also
    of a rejected one."""
    await fresh.js("document.querySelector('#live .lane[tabindex=\"0\"]').focus()")
    await fresh.page.press(END)
    await fresh.page.press(UP)
    await fresh.frames(3)
    number = int(await fresh.js("return document.activeElement.dataset.candidate"))
    assert number == 22 and await fresh.text("#live .card-head") == "Candidate 22"
    scores = [c.score for done in record.rounds for c in done.trace.candidates if c.id == number]
    shown = await fresh.js(
        """
        const rows = [...document.querySelectorAll('#live .scores tbody tr')];
        return rows.map((row) => row.cells[2].textContent);"""
    )
    assert shown == [f"{score:.3f}" for score in scores]
    words = (await fresh.text("#live .text-so-far")).split()
    ends = [c.num_tokens for done in record.rounds for c in done.trace.candidates if c.id == number]
    assert len(words) == ends[-1]
    assert (await fresh.text("#live .fate-text")).startswith(
        {"rejected": "rejected at token", "finished": "finished at", "winner": "the answer"}[
            fates_of(record)[number]
        ]
    )


async def test_stop_frees_the_slots(fresh: Window, stack: Stack) -> None:
    """Guards against a button that only hides what runs on."""
    await fresh.send_endless()
    await fresh.run(n=24, max_tokens=4000, algorithm="best-of-n")
    await fresh.until("document.getElementById('live').state.position > 3")
    assert (await describe_generator(stack.generator_address)).slots.owned > 0
    await fresh.press("Stop")
    assert await fresh.ended() == "stopped"
    await until_slots_are_free(stack.generator_address, bound_s=10)
    await fresh.until("document.getElementById('stop').disabled")
    assert await fresh.text("#live .said") == "The request was stopped."


async def test_the_same_by_best_of_n_runs_beside_it(fresh: Window, client: Client) -> None:
    """Guards against a comparison of other requests, with figures of one side, or of requests that
    slowed each other down."""
    await fresh.run(**SEEDED, compare=True)
    overlap = (
        "['live', 'other'].every((id) => document.getElementById(id).state.phase === 'running')"
    )
    await fresh.js(
        f"window.overlaps = 0; setInterval(() => {{ window.overlaps += {overlap} ? 1 : 0; }}, 2)"
    )
    assert [await fresh.ended(), await fresh.ended("other")] == ["finished"] * 2
    await fresh.until(
        "!document.querySelector('#compare-reward .verdict').textContent.includes('…')"
    )
    ours, theirs = [await record_of(fresh, client, race) for race in ("live", "other")]
    assert ours.usage and theirs.usage
    assert (ours.n, ours.selection.rewards) == (theirs.n, theirs.selection.rewards)
    assert theirs.usage.generated_tokens == theirs.usage.best_of_n_tokens_estimate
    amounts = await fresh.js(
        "return [...document.querySelectorAll('#compare .amount')].map((e) => e.textContent)"
    )
    tokens = [f"{side.usage.generated_tokens:,}" for side in (ours, theirs) if side.usage]
    assert amounts[2:] == [*tokens, f"{ours.score:.3f}", f"{theirs.score:.3f}"]
    assert all(text.endswith(" s") for text in amounts[:2])
    assert await fresh.js("return window.overlaps") == 0
    fewer = theirs.usage.generated_tokens / ours.usage.generated_tokens
    assert await fresh.text("#compare-tokens .verdict") == f"{fewer:.1f} times fewer"


async def test_a_record_replays_step_by_step_and_at_any_speed(
    fresh: Window, client: Client
) -> None:
    """Guards against a replay that differs from the run, and a player that only runs forwards."""
    generation = await client.generate(PROMPT, n=24, max_tokens=96, seed=12)
    record = await client.record(generation.request_id)
    await fresh.load(f"#record={generation.request_id}")
    await fresh.until("document.getElementById('past').state.n")
    await fresh.seek(0)
    lives: list[int] = []
    for _ in range(len(record.rounds) + 2):
        await fresh.press("Step forward")
        state = await fresh.state("past")
        if len(state["rounds"]) > len(lives):
            lives.append(state["numLive"])
    assert lives == [done.trace.num_live for done in record.rounds]
    await fresh.press("Step back")
    assert len((await fresh.state("past"))["rounds"]) < len(record.rounds) + 1
    await fresh.fill_speed("16")
    await fresh.press("Play")
    assert await fresh.ended("past") == "finished"
    assert await fresh.fates("past") == fates_of(record)
    await fresh.seek(0)
    await fresh.press("Step forward")
    await fresh.frames(2)
    assert {*(await fresh.fates("past")).values()} == {None}  # of the start, not of the end


async def test_operators_see_backends_load_and_totals(fresh: Window, client: Client) -> None:
    """Guards against a tab with figures of another service, or frozen ones."""
    await client.generate(PROMPT, n=4, max_tokens=16, seed=14)
    description = await client.describe()
    await fresh.press("Operate")
    await fresh.until("document.querySelectorAll('#operate tbody tr').length === 2")
    rows = await fresh.js(
        """
        const rows = [...document.querySelectorAll('#operate tbody tr')];
        return rows.map((row) => [...row.cells].map((cell) => cell.textContent));"""
    )
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("generator", description.backends[0].address, "● serving"),
        ("reward service", description.backends[1].address, "● serving"),
    ]
    assert await fresh.text("#operate .answers") == f"{description.num_answers:,}"
    await client.generate(PROMPT, n=4, max_tokens=16, seed=15)
    expected = f"{description.num_answers + 1:,}"
    await fresh.until(f"document.querySelector('#operate .answers').textContent === '{expected}'")


async def test_a_token_stays_in_the_session_and_goes_to_the_gateway(
    fresh: Window, stack: Stack
) -> None:
    """Guards against a token that outlives the tab, and a page that cannot get one."""
    async with gateway_at(
        stack.orchestrator_address, host="127.0.0.1", allow_anonymous=False
    ) as own:
        # As if the orchestrator had a tokens file.
        own._gateway._checks_tokens, own._gateway._known_until_s = True, math.inf
        await fresh.load(url=f"http://127.0.0.1:{own.port}")
        await fresh.until("document.getElementById('token').open")
        await fresh.js("document.querySelector('#token input').value = 'a-token'")
        await fresh.press("Use it")
        await fresh.until("document.querySelector('#rewards input')")
        await fresh.run(n=4, max_tokens=16)
        assert await fresh.ended() == "finished"
        kept = await fresh.js(
            "return [sessionStorage.length, localStorage.length, document.cookie]"
        )
        assert kept == [1, 0, ""]
        requests = await fresh.requests()
        called = [request for request in requests if "/v1/" in request["url"]]
        tokens = [request["headers"].get("authorization") for request in called]
        assert tokens[0] is None and {*tokens[1:]} == {"Bearer a-token"}
        allowed = (f"http://127.0.0.1:{own.port}/", "about:blank")
        assert [each["url"] for each in requests if not each["url"].startswith(allowed)] == []
    assert all("401" in entry["message"] for entry in await fresh.page.log())
    await fresh.load()


async def test_errors_are_shown_with_their_field(fresh: Window) -> None:
    """Guards against a request that seems to wait for ever."""
    await fresh.run(n=4, max_tokens=16, schedule="tokens", tokens="9, 8")
    assert await fresh.ended() == "failed"
    assert "specrej.schedule" in await fresh.text("#live .problem")
    await fresh.page.log()  # the status is in the console


async def test_code_is_the_request_that_runs(fresh: Window) -> None:
    """Guards against code of another request than Run sends: other fields, or another seed."""
    await fresh.until("document.querySelector('#rewards input')")
    await fresh.js(
        """
        window.sent = [];
        const original = window.fetch;
        window.fetch = (path, options) => {
          if (options?.body) window.sent.push(options.body);
          return original(path, options);
        };"""
    )
    await fresh.press("As code")
    for name, fields in REQUESTS.items():
        await fresh.fill(prompt=QUOTED, n=6, max_tokens=24, **{"cache": False, **fields})
        body = json.loads(shlex.split(await code(fresh, "curl"))[-1])
        assert body["messages"][0]["content"] == QUOTED, name
        words = shlex.split(await code(fresh, "grpcurl"))
        data = json.loads(words[words.index("-d") + 1])
        message = json_format.ParseDict(data, pb.GenerateStreamRequest())
        # The gateway sends the defaults of a reward, which the code leaves out.
        assert request_of(message) == request_of(message_of_gateway(body)), name
        assert (message.progress, message.text_deltas, message.texts) == (True, True, True), name
        await fresh.press("Run")
        assert await fresh.ended() == "finished", name
        sent = json.loads((await fresh.js("return window.sent"))[-1])
        assert sent == json.loads(shlex.split(await code(fresh, "curl"))[-1]), name
        assert {**sent, "seed": 0} == {**body, "seed": 0}, name


async def code(window: Window, language: str) -> str:
    """The request in a language."""
    await window.js(
        """
        const language = document.getElementById('language');
        language.value = arguments[0];
        for (const name of ['input', 'change']) {
          language.dispatchEvent(new Event(name, { bubbles: true }));
        }""",
        language,
    )
    return await window.text("#code pre")


def request_of(message: pb.GenerateStreamRequest) -> GenerationRequest:
    """The request in a message, with the defaults of what it leaves out."""
    return wire.from_message(message.request, GenerationRequest)


def message_of_gateway(body: Any) -> pb.GenerateStreamRequest:
    """What the gateway sends for the body, as `Gateway._events` does."""
    call = call_of(parsed(ChatRequest, json.dumps(body).encode()), GatewaySettings().presets)
    request = build_request(call.prompt, **call.options)
    return pb.GenerateStreamRequest(request=request, progress=True, text_deltas=True, texts=True)
