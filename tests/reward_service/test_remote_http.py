"""A reward behind a real HTTP server on loopback, correct and faulty."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from reward_service.reward import score, score_batch, take_fairly
from specrej.contracts import Candidate, FinishReason, Message, Prompt
from specrej.errors import RewardInvalid, Unavailable
from tests.reward_service.tiny import batch, load

PROMPT = Prompt(messages=(Message("system", "Be brief."), Message("user", "Hi")))


@contextmanager
def served(answer: Any, status: int = 200, together: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """A server's address and the requests it got; it answers once `together` are there."""
    requests: list[Any] = []
    barrier = threading.Barrier(together)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((dict(self.headers), body))
            barrier.wait(10)
            content = answer(body) if callable(answer) else answer
            with suppress(OSError):  # the client has given up
                self.send_response(status)
                self.end_headers()
                self.wfile.write(
                    content if isinstance(content, bytes) else json.dumps(content).encode()
                )

        def log_message(self, *_: Any) -> None:
            """Not into the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def lengths(body: Any) -> dict[str, list[int]]:
    return {"scores": [len(response) for response in body["responses"]]}


def test_batch_is_one_request_with_what_is_finished() -> None:
    with served(lengths) as (url, requests):
        reward = load("http", url=url, headers={"Authorization": "Bearer secret"})
        candidates = [
            Candidate(0, "abc", 0, 0.0),
            Candidate(1, "", 0, 0.0, FinishReason.STOP),
            Candidate(2, "é", 0, 0.0, FinishReason.LENGTH),
        ]
        assert score_batch(reward.open(PROMPT), reward, candidates).values == (3.0, 0.0, 1.0)
        ((headers, body),) = requests
        # The server's reward may change: its version is in the fingerprint.
        assert load("http", url=url, version="2").fingerprint != reward.fingerprint
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "responses": ["abc", "", "é"],
        "finished": [False, True, False],
    }


def test_batches_of_several_sessions_are_sent_at_the_same_time() -> None:
    """Guards against one slow answer after the other: the server waits for both requests."""
    with served(lengths, together=2) as (url, _):
        reward = load("http", url=url, timeout_s=10)
        tasks = [reward.open(PROMPT).begin(batch({0: text})) for text in ("a", "bb")]
        reward.compute(take_fairly(tasks, reward.token_budget))
        assert [task.scores().values for task in tasks] == [(1.0,), (2.0,)]


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (b"<html>", 200, RewardInvalid),
        ({"rewards": [1]}, 200, RewardInvalid),
        ({"scores": ["x"]}, 200, RewardInvalid),
        ({"scores": None}, 200, RewardInvalid),
        ({"scores": {"0": 0.5}}, 200, RewardInvalid),  # its keys look like numbers
        ({"scores": "1"}, 200, RewardInvalid),
        ({"scores": ["1"]}, 200, RewardInvalid),
        ({"scores": [True]}, 200, RewardInvalid),
        ({"scores": [10**400]}, 200, RewardInvalid),
        (b"[" * 100_000, 200, RewardInvalid),
        ([1.0], 200, RewardInvalid),
        ({"scores": [1]}, 404, RewardInvalid),
        ({"scores": [1]}, 429, Unavailable),
        ({"scores": [1]}, 503, Unavailable),
    ],
)
def test_bad_answer_is_the_error_that_it_stands_for(
    answer: Any, status: int, error: type[Exception]
) -> None:
    """Guards the caller's choice between a retry and another reward."""
    with served(answer, status) as (url, _), pytest.raises(error) as failure:
        score(load("http", url=url), PROMPT, ["a"])
    assert "127.0.0.1" not in str(failure.value)


def test_late_answer_and_refused_connection_are_unavailable() -> None:
    """Guards the reward's thread, for which all of its sessions wait."""
    with pytest.raises(Unavailable, match="cannot be reached"):
        score(load("http", url="http://127.0.0.1:1/score"), PROMPT, ["a"])
    late = threading.Event()

    def answer(body: Any) -> Any:
        late.wait(10)
        return lengths(body)

    with served(answer) as (url, _), pytest.raises(Unavailable, match="Timeout"):
        try:
            score(load("http", url=url, timeout_s=0.2), PROMPT, ["a"])
        finally:
            late.set()
