"""The form in a real browser: its code, the request that it sends, and two requests compared."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import shutil
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import json_format

from deploy.local.stack import Stack
from gateway.completions import ChatRequest, call_of, parsed
from gateway.settings import GatewaySettings
from specrej.client import Client
from specrej.client.client import build_request
from specrej.v1 import orchestrator_pb2 as pb
from tests.gateway.page.conftest import need
from tests.gateway.page.window import ENTER, ESCAPE, Window
from tests.serving import until_slots_are_free

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = 'It\'s "quoted", with a \\ and\na second line.'
SMALL: Mapping[str, object] = {"prompt": PROMPT, "n": 6, "max_tokens": 24}
# The values of a page just loaded, of all fields that a request below changes.
USUAL: Mapping[str, object] = {
    **SMALL,
    "algorithm": "speculative-rejection",
    "alpha": 0.5,
    "schedule": "geometric",
    "first": 16,
    "temperature": 0.7,
    "seed": "",
    "cache": False,
    "compare": False,
}
REQUESTS: Mapping[str, Mapping[str, object]] = {
    "as it is": {},
    "an empty seed": {"seed": ""},
    "full slots": {"schedule": "memory", "first": 12},
    "a list": {"schedule": "tokens", "tokens": "5, 9 12", "alpha": 0.25},
    "branching": {"algorithm": "branching", "width": 6, "keep": 2, "taper": 0.5},
    "Best-of-N": {"algorithm": "best-of-n", "cache": True},
    "compared": {"cache": True, "compare": True},
    "greedy": {"temperature": 0, "n": 1},
}


@pytest_asyncio.fixture(loop_scope="session")
async def form(fresh: Window) -> AsyncIterator[Window]:
    """The page with its form filled in; `window.sent` has the bodies that it sends."""
    await fresh.until("document.querySelector('#rewards input')")
    await fresh.js(
        """
        window.sent = [];
        const original = window.fetch;
        window.fetch = (path, options) => {
          if (options.body) window.sent.push(options.body);
          return original(path, options);
        };"""
    )
    await fresh.fill(**SMALL)
    yield fresh


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


async def sent(window: Window) -> list[Any]:
    return [json.loads(body) for body in await window.js("return window.sent")]


def body_of_curl(text: str) -> Any:
    return json.loads(shlex.split(text)[-1])


def body_of_python(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the program sends."""
    requests: list[urllib.request.Request] = []

    def opened(request: urllib.request.Request) -> io.BytesIO:
        requests.append(request)
        return io.BytesIO()

    with monkeypatch.context() as patch:
        patch.setattr(urllib.request, "urlopen", opened)
        exec(compile(text, "snippet", "exec"), {})
    assert requests[0].full_url.endswith("/v1/specrej/stream")
    assert isinstance(requests[0].data, bytes)
    return json.loads(requests[0].data)


def message_of_grpcurl(text: str) -> pb.GenerateStreamRequest:
    words = shlex.split(text)
    assert words[-2:] == ["127.0.0.1:50050", "specrej.v1.OrchestratorService/GenerateStream"]
    data = json.loads(words[words.index("-d") + 1])
    return json_format.ParseDict(data, pb.GenerateStreamRequest())


def message_of_gateway(body: Any) -> pb.GenerateStreamRequest:
    """What the gateway sends for the body, as `Gateway._events` does."""
    call = call_of(parsed(ChatRequest, json.dumps(body).encode()), GatewaySettings().presets)
    request = build_request(call.prompt, **call.options)
    return pb.GenerateStreamRequest(request=request, progress=True, text_deltas=True, texts=True)


async def test_code_is_the_request_that_runs(form: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against code of another request than Run sends: other fields, or another seed."""
    await form.press("As code")
    for name, fields in REQUESTS.items():
        await form.fill(**{**USUAL, **fields})
        texts = {language: await code(form, language) for language in ("Python", "grpcurl", "curl")}
        body = body_of_curl(texts["curl"])
        assert body["messages"][0]["content"] == PROMPT, name
        assert body_of_python(texts["Python"], monkeypatch) == body, name
        assert message_of_grpcurl(texts["grpcurl"]) == message_of_gateway(body), name
        await form.js("window.sent = []")
        await form.press("Run")
        assert await form.ended() == "finished", name
        assert (await sent(form))[0] == body, name
        assert await form.text("#code pre") == texts["curl"], name
        if fields.get("compare"):
            assert await form.ended("other") == "finished", name


async def test_code_has_the_model_once_it_is_known(fresh: Window) -> None:
    """Guards against code that was open before the description came, without model and rewards."""
    await fresh.until("document.querySelector('#rewards input')")
    body = body_of_curl(await fresh.text("#code pre"))
    assert body["model"] and body["specrej"]["rewards"]


async def test_an_empty_seed_is_drawn_for_each_run(form: Window) -> None:
    """Guards against the same candidates at every Run, and code with the seed of no request."""
    await form.fill(seed="")
    await form.press("As code")
    for _ in range(2):
        await form.press("Run")
        assert await form.ended() == "finished"
    bodies = await sent(form)
    seeds = [body.pop("seed") for body in bodies]
    assert seeds[0] != seeds[1] and bodies[0] == bodies[1]
    assert body_of_curl(await form.text("#code pre"))["seed"] == seeds[1]


async def test_the_printed_curl_command_runs(form: Window) -> None:
    """Guards against a command that a shell or the gateway refuses."""
    need(shutil.which("curl"), "curl")
    await form.press("As code")
    process = await asyncio.create_subprocess_shell(
        f"{await code(form, 'curl')} --noproxy '*'", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    names = [line[7:] for line in output.decode().splitlines() if line.startswith("event: ")]
    assert names[0] == "admitted" and names[-1] == "finished"


@pytest.mark.parametrize("has_clipboard", [True, False])
async def test_copy_without_a_clipboard_selects_the_text(
    form: Window, *, has_clipboard: bool
) -> None:
    """Guards against an error over plain HTTP from another machine, where there is no clipboard."""
    await form.js(
        """
        const clipboard = { writeText: async (text) => { window.copied = text; } };
        const value = arguments[0] ? clipboard : undefined;
        Object.defineProperty(navigator, 'clipboard', { value });""",
        has_clipboard,
    )
    await form.press("As code")
    text = await form.text("#code pre")
    await form.press("Copy")
    label = "Copied" if has_clipboard else "Selected"
    await form.until(f"document.getElementById('copy').textContent === '{label}'")
    taken = "window.copied" if has_clipboard else "getSelection().toString()"
    assert await form.js(f"return {taken}") == text
    await form.fill(n=5)
    assert await form.text("#copy") == "Copy"


async def test_weights_of_rewards_are_sent(form: Window, client: Client) -> None:
    """Guards against a weight that changes nothing, or that another reward gets."""
    rewards = await form.js(
        """
        const items = [...document.querySelectorAll('#rewards [data-reward]')];
        return items.map((item, index) => {
          const [isChosen, weight] = item.querySelectorAll('input');
          isChosen.checked = true;
          weight.value = [0.25, 2][index];
          weight.dispatchEvent(new Event('input', { bubbles: true }));
          return item.dataset.reward;
        });"""
    )
    await form.press("Run")
    assert await form.ended() == "finished"
    record = await client.record((await form.state())["id"])
    given = {reward.name: reward.weight for reward in record.selection.rewards}
    assert rewards == [*(await client.describe()).rewards] and len(rewards) == 2
    assert given == dict(zip(rewards, [0.25, 2], strict=True))


async def test_both_sides_of_a_comparison_do_the_same_work(form: Window, client: Client) -> None:
    """Guards against a Best-of-N of more candidates, or one that the cache answers."""
    await form.fill(n=0, first=3000, max_tokens=3000, cache=True, compare=True, seed=5)
    await form.press("Run")
    assert await form.ended() == "finished"
    assert await form.ended("other") == "finished"
    bodies = await sent(form)
    states = [await form.state(race) for race in ("live", "other")]
    assert [body["specrej"]["n"] for body in bodies] == [0, states[0]["n"]]
    assert states[0]["n"] == states[1]["n"] > 1
    assert {body["specrej"]["cache"] for body in bodies} == {"bypass"}
    assert {body["seed"] for body in bodies} == {5}


async def test_fields_that_are_not_shown_do_not_refuse_the_form(form: Window) -> None:
    """Guards against a button that does nothing: a browser shows no error of a hidden field."""
    await form.fill(factor=1)
    await form.fill(schedule="tokens")
    await form.press("Run")
    assert await form.ended()
    await form.fill(temperature=2.5)
    await form.press("Run")
    await form.until("document.activeElement.name === 'temperature'")
    await form.js("document.activeElement.blur()")
    await form.fill(temperature="")  # would be 0, greedy
    await form.press("Run")
    await form.until("document.activeElement.name === 'temperature'")
    assert len(await sent(form)) == 1


async def test_the_keys_that_send_do_it_once(form: Window) -> None:
    """Guards against a second submission, which inputs make of their own."""
    await form.js("document.querySelector('#ask [name=n]').focus()")
    await form.page.chord("\ue009", ENTER)
    assert await form.ended()
    assert len(await sent(form)) == 1


async def test_the_dialog_for_a_token_can_be_left(form: Window) -> None:
    """Guards against a dialog that opens again and again before everything else."""
    await form.js(
        """
        window.numCalls = 0;
        window.fetch = async () => {
          window.numCalls += 1;
          return Response.json({ error: { message: 'a token is needed' } }, { status: 401 });
        };
        document.getElementById('token-open').click();"""
    )
    await form.page.press(ESCAPE)
    await form.until("!document.getElementById('token').open")
    assert await form.js("return window.numCalls") == 0
    await form.js("sessionStorage.setItem('specrej-token', 'x')")
    await form.js("document.getElementById('token-open').click()")
    await form.press("Forget it")
    await form.until("window.numCalls === undefined && document.getElementById('token')")
    assert await form.js("return sessionStorage.length") == 0


async def test_a_second_submission_ends_the_first(form: Window, stack: Stack) -> None:
    """Guards a request that Stop cannot end: both wait for the names of the models."""
    await form.send_endless()
    await form.fill(max_tokens=4000, first=2000)
    await form.js(
        """
        window.signals = [];
        const send = window.fetch;
        window.fetch = async (path, options) => {
          if (options.body) window.signals.push(options.signal);
          else await new Promise((resolve) => { setTimeout(resolve, 200); });
          return send(path, options);
        };
        const form = document.querySelector('[name=prompt]').form;
        form.elements.model.replaceChildren();
        form.requestSubmit();
        form.requestSubmit();"""
    )
    await form.until("window.signals.length === 2")
    await form.until("document.getElementById('live').state.phase === 'running'")
    await form.press("Stop")
    assert await form.ended() == "stopped"
    assert await form.js("return window.signals.map((each) => each.aborted)") == [True, True]
    await until_slots_are_free(stack.generator_address, bound_s=10)


async def test_a_stream_without_an_end_stops_the_clock(form: Window) -> None:
    """Guards against seconds that go on after a proxy has closed the stream."""
    await form.js(
        """
        const admitted = 'event: admitted\\ndata: {"n": 2, "prompt_tokens": 3}\\n\\n';
        window.fetch = async () => new Response(admitted);"""
    )
    await form.press("Run")
    assert await form.ended() == "failed"
    took = await form.text("#live .took")
    await form.page.evaluate("return new Promise((resolve) => { setTimeout(resolve, 100); })")
    await form.js(
        """
        const lane = document.querySelector('#live [data-candidate="1"]');
        lane.dispatchEvent(new Event('pointerover', { bubbles: true }));"""
    )
    await form.until("document.querySelector('#live .card-head').textContent === 'Candidate 1'")
    assert await form.text("#live .took") == took


async def test_stop_ends_both_sides_of_a_comparison(form: Window, stack: Stack) -> None:
    """Guards against a second side that waits for ever, and lanes that seem to grow."""
    await form.send_endless()
    await form.fill(n=32, max_tokens=4000, first=2000, compare=True)
    await form.js("document.querySelector('#other .actions').append('of an earlier request')")
    await form.press("Run")
    await form.until("document.getElementById('live').state.position > 3")
    await form.press("Stop")
    assert [await form.ended(), await form.ended("other")] == ["stopped"] * 2
    await form.until("document.getElementById('stop').disabled")
    assert await form.text("#other .chip") == "stopped"
    assert await form.text("#other .actions") == ""
    assert await form.text("#compare-reward .verdict") == "\u2013"
    names = await form.js(
        "return [...document.querySelectorAll('#live .lane')].map((each) => each.ariaLabel)"
    )
    assert len(names) == 32 and not [name for name in names if "growing" in name]
    assert len(await sent(form)) == 1
    await until_slots_are_free(stack.generator_address, bound_s=10)
