"""A reward behind a real HTTP server on loopback, well-behaved and not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from reward_service.batching import take_fairly
from reward_service.remote_http import HTTPReward
from reward_service.reward import score, score_batch
from specrej.contracts import Candidate, FinishReason, Message, Prompt
from specrej.errors import RewardInvalid, Unavailable

PROMPT = Prompt(messages=(Message("system", "Be brief."), Message("user", "Hi")))


@contextmanager
def served(answer: Any, status: int = 200, together: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """A server's address and what it was asked; it answers once `together` have asked."""
    asked: list[Any] = []
    barrier = threading.Barrier(together)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((dict(self.headers), json.loads(body)))
            barrier.wait(10)
            said = answer(json.loads(body)) if callable(answer) else answer
            with suppress(OSError):  # nobody waits for it any more
                self.send_response(status)
                self.end_headers()
                self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            """Not into the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def lengths(body: Any) -> dict[str, list[int]]:
    return {"scores": [len(response) for response in body["responses"]]}


def test_it_is_asked_for_a_batch_at_once_and_told_what_is_finished() -> None:
    with served(lengths) as (url, asked):
        reward = HTTPReward("far", url, headers={"Authorization": "Bearer secret"})
        batch = [
            Candidate(0, "abc", 0, 0.0),
            Candidate(1, "", 0, 0.0, FinishReason.STOP),
            Candidate(2, "é", 0, 0.0, FinishReason.LENGTH),
        ]
        assert score_batch(reward.open(PROMPT), reward, batch).values == (3.0, 0.0, 1.0)
        ((headers, body),) = asked
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "responses": ["abc", "", "é"],
        "finished": [False, True, False],
    }


def test_batches_of_several_sessions_are_asked_for_at_the_same_time() -> None:
    """Guards against one slow answer after the other: the server answers only when both wait."""
    with served(lengths, together=2) as (url, _):
        reward = HTTPReward("far", url, timeout_s=10)
        texts = ("a", "bb")
        tasks = [reward.open(PROMPT).begin([Candidate(0, text, 0, 0.0)]) for text in texts]
        reward.compute(take_fairly(tasks, reward.token_budget))
        assert [task.scores().values for task in tasks] == [(1.0,), (2.0,)]


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (b"<html>", 200, RewardInvalid),
        ({"rewards": [1]}, 200, RewardInvalid),
        ({"scores": ["x"]}, 200, RewardInvalid),
        ({"scores": None}, 200, RewardInvalid),
        ({"scores": {"0": 0.5}}, 200, RewardInvalid),  # its keys are numbers, too
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
def test_what_is_no_answer_is_told_as_what_it_is(
    answer: Any, status: int, error: type[Exception]
) -> None:
    """Guards the caller's choice: to come again, or to rank by something else."""
    with served(answer, status) as (url, _), pytest.raises(error) as failure:
        score(HTTPReward("far", url), PROMPT, ["a"])
    assert "127.0.0.1" not in str(failure.value)


def test_nobody_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        score(HTTPReward("far", "http://127.0.0.1:1/score"), PROMPT, ["a"])


def test_an_answer_that_takes_too_long_is_unavailable() -> None:
    """Guards the reward's thread, on which all of its sessions wait."""
    late = threading.Event()

    def answer(body: Any) -> Any:
        late.wait(10)
        return lengths(body)

    with served(answer) as (url, _), pytest.raises(Unavailable, match="Timeout"):
        try:
            score(HTTPReward("far", url, timeout_s=0.2), PROMPT, ["a"])
        finally:
            late.set()


def test_the_version_tells_answers_apart() -> None:
    """Guards the cache: what the other end serves may change, and only its owner knows."""
    first = HTTPReward("far", "http://127.0.0.1:1/", version="1")
    assert first.fingerprint != HTTPReward("far", "http://127.0.0.1:1/", version="2").fingerprint
