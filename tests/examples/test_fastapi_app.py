"""The app behind a real HTTP server: answers, events, statuses, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from deploy.local.stack import Stack
from examples.fastapi_app.app import Question, app
from specrej import Client
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = {"text": "Why is the sky blue?", "n": 4, "max_tokens": 24}


class Server(uvicorn.Server):
    """Leaves the test's signals alone."""

    async def serve(self, sockets: Any = None) -> None:
        await self._serve(sockets)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECREJ_ADDRESS", stack.orchestrator_address)
        server = Server(uvicorn.Config(app, port=0, log_config=None))
        serving = asyncio.ensure_future(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield http
        server.should_exit = True
        await serving


async def events(http: httpx.AsyncClient, **question: Any) -> list[tuple[str, Any]]:
    """Names and data of the events of /stream."""
    response = await http.post("/stream", json=QUESTION | question)
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [
        dict(line.split(": ", 1) for line in part.splitlines())
        for part in response.text.strip().split("\n\n")
        if not part.startswith(":")
    ]
    return [(part["event"], json.loads(part["data"])) for part in parts]


async def test_the_texts_of_a_stream_are_the_answer(http: httpx.AsyncClient) -> None:
    """The second stream comes from the cache, which has no deltas."""
    one = {"text": "one", "n": 1}  # certain to win from the first token on
    first = await events(http, **one)
    answer = (await http.post("/answer", json=QUESTION | one)).json()
    assert len(first) > 2
    second = await events(http, **one)
    assert len(second) == 2
    for received in (first, second):
        *texts, done = received
        assert "".join(data for name, data in texts if name == "text") == answer["text"]
        assert done == ("done", {"score": answer["score"]})


@pytest.mark.parametrize("path", ["/answer", "/stream"])
async def test_an_invalid_request_is_422(http: httpx.AsyncClient, path: str) -> None:
    """Bounds of the app, and one that only the orchestrator checks."""
    for body in ({"n": 4}, QUESTION | {"n": 0}, QUESTION | {"text": " "}):
        response = await http.post(path, json=body)
        assert response.status_code == 422, response.text
    assert "prompt" in response.json()["detail"]
    assert "retry-after" not in response.headers


async def test_a_client_that_leaves_a_stream_ends_its_call(
    http: httpx.AsyncClient, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that goes on ends with an answer in the cache, as that of a client that stays."""
    # More than a caller may ask for: even a slow client leaves long before the end.
    options: dict[str, Any] = {"n": 16, "max_tokens": 1000, "ignore_eos": True}
    monkeypatch.setattr(Question, "options", options)
    assert (await events(http, text="stay"))[-1][0] == "done"
    assert (await client.generate("stay", **options)).cached
    async with http.stream("POST", "/stream", json={"text": "leave"}) as response:
        assert response.status_code == 200
        assert (await client.describe()).running == 1
    async with asyncio.timeout(20):
        while (await client.describe()).running:
            pass
    assert not (await client.generate("leave", **options)).cached
