"""The page in a real browser, against all services on toys: one smoke test per use of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from deploy.local.stack import Stack
from specrej.client import Client
from specrej.contracts import CacheControl, Fate, Schedule, ServiceDescription
from tests.gateway.gateways import gateway_at
from tests.gateway.page.window import PROMPT, SEEDED, Window, fates_of
from tests.serving import describe_generator, until_slots_are_free

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_lanes_are_those_of_the_response(fresh: Window, client: Client) -> None:
    """Guards against lanes that show another cut than the service's, and another answer."""
    await fresh.run(**SEEDED)
    assert await fresh.ended() == "finished"
    same = await client.generate(PROMPT, **SEEDED, temperature=0.7, cache=CacheControl.BYPASS)
    assert await fresh.fates() == fates_of(same)
    assert {Fate.REJECTED.value, "winner"} <= set(fates_of(same).values())
    assert await fresh.text("#answer") == same.best.text.strip()
    assert await fresh.text("#live .made") == f"{same.usage.generated_tokens:,}"
    saved = 1 - same.usage.generated_tokens / same.usage.best_of_n_tokens_estimate
    assert await fresh.text("#live .saved") == f"{round(100 * saved)} %"


async def test_stop_frees_the_slots(fresh: Window, stack: Stack) -> None:
    """Guards against a button that only hides what runs on."""
    assert await fresh.text("#service") == "toy on none"
    await fresh.js(  # candidates grow to max_tokens
        """
        const send = window.fetch;
        window.fetch = (path, options) => {
          if (!options?.body) return send(path, options);
          const body = JSON.parse(options.body);
          body.specrej = { ...body.specrej, ignore_eos: true };
          return send(path, { ...options, body: JSON.stringify(body) });
        };"""
    )
    await fresh.run(n=24, max_tokens=4000, algorithm="best-of-n")
    await fresh.until("document.getElementById('live').state.position > 3")
    assert (await describe_generator(stack.generator_address)).slots.owned > 0
    await fresh.press("Stop")
    assert await fresh.ended() == "stopped"
    await until_slots_are_free(stack.generator_address, bound_s=10)
    await fresh.until("document.getElementById('stop').disabled")
    assert await fresh.text("#live .said") == "The request was stopped."


@pytest.mark.long
async def test_a_request_replays_step_by_step_and_at_any_speed(fresh: Window) -> None:
    """Guards against a replay that differs from the run, and a player that only runs forwards."""
    await fresh.run(n=24, max_tokens=96, seed=12)
    assert await fresh.ended() == "finished"
    rounds, fates = (await fresh.state())["rounds"], await fresh.fates()
    await fresh.press("Replay")
    await fresh.until("document.getElementById('past').state.n")
    await fresh.seek(0)
    lives: list[int] = []
    for _ in range(len(rounds) + 2):
        await fresh.press("Step forward")
        state = await fresh.state("past")
        if len(state["rounds"]) > len(lives):
            lives.append(state["numLive"])
    assert lives == [trace["num_live"] for trace in rounds]
    await fresh.press("Step back")
    assert len((await fresh.state("past"))["rounds"]) < len(rounds) + 1
    await fresh.js("speed.value = '16'; speed.dispatchEvent(new Event('change'));")
    await fresh.press("Play")
    assert await fresh.ended("past") == "finished"
    assert await fresh.fates("past") == fates
    await fresh.seek(0)
    await fresh.press("Step forward")
    await fresh.frames(2)
    assert {*(await fresh.fates("past")).values()} == {None}  # of the start, not of the end


@pytest.mark.long
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


async def test_a_page_that_comes_before_the_model_waits_for_it(fresh: Window, stack: Stack) -> None:
    """Guards against a request without a model, a form that stays empty once it is there, and one
    that cuts at 16 where the service's default is another schedule."""

    class Described(Client):
        async def describe(self, **options: Any) -> ServiceDescription:
            described = await super().describe(**options)
            return replace(described, default_schedule=Schedule(first=64, factor=4))

    async with gateway_at("127.0.0.1:1", allow_anonymous=True) as early:
        client = early._gateway._client
        await fresh.load(url=f"http://127.0.0.1:{early.port}")
        await fresh.until("document.getElementById('service').textContent")
        assert await fresh.text("#run") == "Loading"
        await fresh.js("document.querySelector('form').requestSubmit()")
        await fresh.js("document.querySelector('#ask > details').open = true")
        async with Described(stack.orchestrator_address) as early._gateway._client:
            await fresh.fill(factor=3)
            await fresh.until("document.getElementById('run').textContent === 'Run'")
            cuts = await fresh.js("return ['first', 'factor'].map((name) => ask[name].value)")
            assert cuts == ["64", "3"], "the service's default, but what was typed stays"
            assert await fresh.js("return document.querySelector('[name=model]').value")
            about = "document.getElementById('about-alpha')"
            await fresh.js(f"{about}.parentElement.querySelector('.help').click()")
            assert "rejected at each decision token" in await fresh.js(f"return {about}.innerText")
        early._gateway._client = client
        assert (await fresh.state())["phase"] == "waiting"
    await fresh.load()
    await fresh.requests()  # of the other gateway
    assert all("50" in entry["message"] for entry in await fresh.page.log())


async def test_waves_checks_and_votes_are_shown(fresh: Window) -> None:
    """Guards against lanes of candidates that have not begun, and data that is not sent."""
    await fresh.until("document.querySelector('[data-reward=answer]')")
    await fresh.js(
        """
        document.querySelector('[data-reward=toy] input').checked = false;
        const [isChosen, , data] = document.querySelectorAll('[data-reward=answer] input');
        isChosen.checked = true;
        data.value = arguments[0];
        data.dispatchEvent(new Event('input', { bubbles: true }));""",
        '{"answer": "clouds elm grove", "kind": "exact", "extract": "all"}',
    )
    await fresh.run(n=8, max_tokens=24, seed=5, waves=2, stop_at=1)
    assert await fresh.ended() == "finished", await fresh.text("#live .problem")
    assert await fresh.text("#answer") == "clouds elm grove"
    assert len((await fresh.state())["lanes"]) == 4
    names = "[...document.querySelectorAll('#live [data-candidate]')].map((lane) => lane.ariaLabel)"
    lanes = await fresh.js(f"return {names}")
    assert lanes[2] == "Candidate 2, the answer at token 3, reward 1.000, passed, of wave 2"
    assert lanes[0].endswith("not passed")
    assert "an answer has the score" in await fresh.text("#live .facts")
    await fresh.run(seed=5, waves="", stop_at="", vote=r"regex:^(\w+)", alpha=0)
    assert await fresh.ended() == "finished", await fresh.text("#live .problem")
    votes = await fresh.js("return document.querySelector('#live .votes').innerText")
    assert "elm\t" in votes and "33 %" in votes and "clouds" in votes


async def test_errors_are_shown_with_their_field(fresh: Window) -> None:
    """Guards against a request that seems to wait for ever."""
    await fresh.run(n=4, max_tokens=16, schedule="tokens", tokens="9, 8")
    assert await fresh.ended() == "failed"
    assert "specrej.schedule" in await fresh.text("#live .problem")
    await fresh.page.log()  # the status is in the console
