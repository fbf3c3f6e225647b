"""A reward behind a real HTTP server on loopback, correct and faulty."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reward_service.kinds import http
from reward_service.specs import HTTPSpec
from reward_service.worker import Worker
from specrej.contracts import Candidate, FinishReason, Message, Prompt, Scores, ToolCall
from specrej.contracts.errors import Overloaded, RewardInvalid, Unavailable
from tests.certificates import place
from tests.reward_service.endpoint import Endpoint, Reply, served
from tests.reward_service.tiny import load, working
from tests.serving import until

PROMPT = Prompt(messages=(Message("system", "Be brief."), Message("user", "Hi")))


@asynccontextmanager
async def worker_of(
    endpoint: Endpoint, queue_limit: int = 4, **options: Any
) -> AsyncIterator[Worker]:
    """A worker of the reward there; its first request is not among the endpoint's."""
    async with working(lambda: load("http", url=endpoint.url, **options), queue_limit) as worker:
        endpoint.requests.clear()
        yield worker


async def score_at(endpoint: Endpoint, *texts: str, **options: Any) -> Scores:
    """The scores of complete answers."""
    async with worker_of(endpoint, **options) as worker:
        return await worker.score(PROMPT, texts)


async def test_batch_is_one_request_with_what_is_finished() -> None:
    async with served() as endpoint, worker_of(endpoint, headers={"X-Team": "a"}) as worker:
        candidates = [
            Candidate(0, "abc", 0, 0.0),
            Candidate(1, "", 0, 0.0, FinishReason.STOP),
            Candidate(2, "é", 0, 0.0, FinishReason.LENGTH),
        ]
        async with worker.open(PROMPT, "[1e999]") as session:
            assert (await session.score(candidates)).values == (3.0, 0.0, 1.0)
        (request,) = endpoint.requests
        # The server's reward may change: its version is in the fingerprint.
        for version, team in (("2", "a"), ("", "b")):
            other = load("http", url=endpoint.url, version=version, headers={"X-Team": team})
            assert other.fingerprint != worker.description.fingerprint
            await other.aclose()
    assert request.headers["x-team"] == "a"
    assert request.headers["specrej-timeout-ms"] == "30000"
    assert request.body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "responses": ["abc", "", "é"],
        "finished": [False, True, False],
        "data": [float("inf")],  # as it was: json cannot write it
    }


async def test_turns_of_tools_are_sent_as_in_openais_api() -> None:
    """Guards against a conversation in which nothing was called."""
    calls = (ToolCall("c1", "add", '{"n": 1}'),)
    turns = Message("assistant", tool_calls=calls), Message("tool", "2", tool_call_id="c1")
    async with served() as endpoint, worker_of(endpoint) as worker:
        await worker.score(Prompt(messages=(*PROMPT.messages, *turns)), ["a"])
        sent = endpoint.requests[-1].body["messages"][2:]
    function = {"name": "add", "arguments": '{"n": 1}'}
    made = {"id": "c1", "type": "function", "function": function}
    assert sent == [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


async def test_what_is_for_this_machine_is_sent_to_no_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards secrets, which may be in plaintext here, and rewards that a proxy cannot reach."""
    async with served() as proxy, served() as endpoint:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert (await score_at(endpoint, "abc")).values == (3.0,)
        assert endpoint.requests and not proxy.requests


async def test_a_slow_answer_delays_no_other_caller() -> None:
    """Guards against calls that wait for each other."""
    async with served() as endpoint, worker_of(endpoint, queue_limit=3) as worker:
        slow = [asyncio.create_task(worker.score(PROMPT, ["slow"])) for _ in range(2)]
        await until(lambda: len(endpoint.requests) == 2)
        for _ in range(3):
            assert (await worker.score(PROMPT, ["fast"])).values == (4.0,)
        assert not any(task.done() for task in slow)
        assert worker.heartbeat_s() == 0.0
        last = asyncio.create_task(worker.score(PROMPT, ["slow"]))
        await until(lambda: len(endpoint.requests) == 6)
        with pytest.raises(Overloaded, match="3 calls"):
            await worker.score(PROMPT, ["fast"])
        endpoint.release.set()
        assert [(await task).values for task in (*slow, last)] == [(4.0,)] * 3


async def test_a_cancelled_call_ends_its_request() -> None:
    """Guards against a server that computes for a caller that is gone."""
    async with served() as endpoint, worker_of(endpoint) as worker:
        call = asyncio.create_task(worker.score(PROMPT, ["slow"]))
        await until(lambda: len(endpoint.requests) == 1)
        call.cancel()
        await until(lambda: endpoint.num_gone == 1)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await worker.score(PROMPT, ["fast"])).values == (4.0,)


@pytest.mark.parametrize("left_s", [5.0, 90.0])
async def test_the_time_that_is_left_goes_with_the_call(
    monkeypatch: pytest.MonkeyPatch, left_s: float
) -> None:
    """Guards against a server that works for longer than its caller waits."""
    monkeypatch.setattr(http, "time_left_s", lambda: left_s)
    async with served() as endpoint:
        await score_at(endpoint, "a", timeout_s=20.0)
    sent_ms = endpoint.requests[0].headers["specrej-timeout-ms"]
    assert sent_ms == ("5000" if left_s < 20 else "20000")


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (b"<html>", 200, RewardInvalid),
        ({"rewards": [1]}, 200, RewardInvalid),
        ({"scores": {"0": 0.5}}, 200, RewardInvalid),  # its keys look like numbers
        ({"scores": ["1"]}, 200, RewardInvalid),
        ({"scores": [True]}, 200, RewardInvalid),
        ({"scores": [10**400]}, 200, RewardInvalid),
        ({"scores": [1, 2]}, 200, RewardInvalid),
        (b"[" * 100_000, 200, RewardInvalid),
        (gzip.compress(b'{"scores": [1]}', mtime=0), 200, RewardInvalid),
        (b'{"scores": [1' + b" " * (2 << 20) + b"]}", 200, RewardInvalid),
        ({"scores": [1]}, 302, RewardInvalid),
        ({"scores": [1]}, 429, Unavailable),
        ({"scores": [1]}, 503, Unavailable),
    ],
)
async def test_bad_answer_is_the_error_that_it_stands_for(
    answer: Any, status: int, error: type[Exception]
) -> None:
    """Guards the caller's choice between a retry and another reward."""
    async with served(lambda *_: Reply(answer, status)) as endpoint:
        with pytest.raises(error) as failure:
            await score_at(endpoint, "a")
    assert "127.0.0.1" not in str(failure.value)


async def test_a_server_that_is_away_at_the_start_is_used_later() -> None:
    """Guards the other rewards of a service against one server."""
    async with served() as endpoint:
        port = endpoint.port
    async with worker_of(endpoint) as worker:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await worker.score(PROMPT, ["a"])
        async with served(port=port):
            assert (await worker.score(PROMPT, ["a"])).values == (1.0,)
    with pytest.raises(Unavailable, match="stopped"):
        await worker.score(PROMPT, ["a"])


async def test_secrets_of_headers_are_read_from_files(tmp_path: Path) -> None:
    """Guards against a secret in the environment, and a change that needs a restart."""
    file = tmp_path / "token"
    place(file, "Bearer one\n")
    async with (
        served() as endpoint,
        worker_of(endpoint, header_files={"Authorization": file}) as worker,
    ):
        await worker.score(PROMPT, ["a"])
        place(file, "Bearer two")
        await worker.score(PROMPT, ["a"])
        sent = [request.headers["authorization"] for request in endpoint.requests]
    assert sent == ["Bearer one", "Bearer two"]
    place(file, "s3cret\nb")
    with pytest.raises(ValueError, match="one line") as raised:
        load("http", url="http://127.0.0.1:1/", header_files={"X": file})
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": {"authorization": "s3cret"}}, "put it in header_files"),
        ({"headers": {"X-API-Key": "s3cret"}}, "put it in header_files"),
        ({"url": "https://user:s3cret@rewards.internal/"}, "must not hold credentials"),
        ({"url": "http://rewards.internal/", "header_files": {"X": "f"}}, "in plaintext"),
        ({"url": "http://10.0.0.1/", "header_files": {"X": "f"}}, "in plaintext"),
        ({"headers": {"X\r\nY": "s3cret"}}, "match pattern"),
    ],
)
def test_secrets_stay_secret(options: dict[str, Any], message: str) -> None:
    """Guards against secrets in settings, or on the network in plaintext."""
    with pytest.raises(ValueError, match=message):
        load("http", **dict[str, Any](url="https://rewards.internal/") | options)


def test_secrets_may_be_sent_over_tls_and_within_this_machine() -> None:
    files = {"X-Key": Path("token")}
    assert HTTPSpec(name="r", url="https://rewards.internal/", header_files=files)
    assert HTTPSpec(name="r", url="http://[::1]:1/", header_files=files)
    far = "http://rewards.internal/"
    assert HTTPSpec(name="r", url=far, header_files=files, allow_plaintext_token=True)
