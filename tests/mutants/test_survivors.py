"""Bugs that the suite once missed, each caught by the smallest test that sees it."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.answers import CompletionAnswer
from orchestrator.cache import RedisClient
from orchestrator.loop.deadline import DeadlineController
from specrej import contracts as c
from specrej.contracts import FinishReason, Sampling
from specrej.contracts.validation import check_sampling


def test_the_time_of_a_batch_is_divided_among_its_candidates() -> None:
    """Of 100 candidates scored in 5 s, one takes 0.05 s: there is time for another step."""
    now_s = 0.0
    deadline = DeadlineController(lambda at: at + 16, 64, 10.0, lambda: now_s)
    for _ in range(2):
        deadline.note_stride(100, 1, 0, 0.1)
    deadline.note_scoring(100, 5.0)
    now_s = 8.0
    assert not deadline.is_over


def test_greedy_candidates_of_open_number_are_refused() -> None:
    """n = 0 means as many as fit, which would all be equal."""
    for n, num_violations in ((0, 1), (1, 0), (2, 1)):
        found = [*check_sampling(Sampling(temperature=0.0, max_tokens=8), n, 100, 100)]
        assert len(found) == num_violations, (n, found)


def test_text_offsets_are_those_of_the_beginnings_of_tokens() -> None:
    """Of tokens of different lengths: of equal ones, the offsets of other tokens look alike."""
    candidate = c.RankedCandidate(
        *(0, "abcdef", 0.5, FinishReason.STOP, 3, -1.0),
        token_ids=(1, 2, 3),
        logprobs=(-1.0, -1.0, -1.0),
        tokens=(b"ab", b"cde", b"f"),
    )
    usage = c.Usage(1, 3, 3, 0, 0, 3)
    generation = c.Generation((candidate,), (), usage, c.Timings(), 1)
    parts = CompletionAnswer("model", 1, is_chat=False, logprobs=True).body(generation)
    assert json.loads("".join(parts))["choices"][0]["logprobs"]["text_offset"] == [0, 2, 5]


async def test_a_request_that_is_cancelled_at_redis_ends() -> None:
    """Guards against a failure of Redis in place of the cancellation, after which it would run."""
    redis, never = RedisClient("redis://127.0.0.1:1/0", timeout_s=60), asyncio.Event()
    releasing = asyncio.ensure_future(redis.attempt("unlock", "EVALSHA", never.wait))
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    await redis.close()
