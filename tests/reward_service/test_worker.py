"""The worker's thread and queue, and the in-process scorer on top of it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from reward_service.reward import Reward, RewardSession, ScoringTask, score
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.contracts import Candidate, Prompt, Scorer, Scores
from specrej.errors import InvalidRequest, Overloaded, RewardInvalid, Unavailable
from tests.reward_service.fakes import FixedReward, GatedReward, PiecewiseReward

PROMPT = Prompt.from_user("Say it.")
NAN, INF = float("nan"), float("inf")


@asynccontextmanager
async def started(reward: Reward, queue_limit: int = 4) -> AsyncIterator[Worker]:
    def load() -> Reward:
        return reward

    worker = await Worker.start(load, queue_limit)
    try:
        yield worker
    finally:
        worker.close()


def candidate(number: int, text: str) -> Candidate:
    return Candidate(number, text, num_tokens=1, logprob=-1.0)


class ThreadReward(ToyReward):
    """Remembers the threads that scored."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        self.threads.add(threading.get_ident())
        return super().score(prompt, candidates)


async def test_a_reward_is_loaded_and_scores_in_one_thread_that_is_not_the_loops() -> None:
    """Guards the event loop against torch, and torch's thread count against a second thread."""
    worker = await Worker.start(ThreadReward)
    await worker.score(PROMPT, ["a"])
    reward = worker._reward
    worker.close()
    assert isinstance(reward, ThreadReward)
    assert len(reward.threads) == 1
    assert threading.get_ident() not in reward.threads


async def test_a_load_that_fails_is_told_and_leaves_no_thread() -> None:
    def fail() -> Reward:
        raise FileNotFoundError("no model directory")

    with pytest.raises(FileNotFoundError, match="no model directory"):
        await Worker.start(fail)
    for thread in threading.enumerate():
        if thread.name.startswith("reward"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("values", [(NAN, 0.0), (0.0, INF), (-INF, 0.0), (0.0,), (0.0, 0.0, 0.0)])
async def test_scores_that_are_no_scores_are_refused(values: tuple[float, ...]) -> None:
    """Guards the ranking: NaN compares as false with everything, a lost score shifts the rest."""
    async with started(FixedReward(values)) as worker:
        with pytest.raises(RewardInvalid) as failure:
            await worker.score(PROMPT, ["a", "b"])
        assert failure.value.metadata == {"reward": "fixed"}


async def test_a_reward_that_fails_its_warm_up_is_not_served() -> None:
    class Broken(ToyReward):
        def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
            return Scores((NAN,))

    with pytest.raises(RewardInvalid):
        await Worker.start(Broken)


async def test_a_limit_of_l_calls_refuses_exactly_the_rest() -> None:
    reward = GatedReward()
    async with started(reward, queue_limit=3) as worker:
        calls = [asyncio.create_task(worker.score(PROMPT, [str(i)])) for i in range(5)]
        refused, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        reward.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, Overloaded) for result in results] == [False] * 3 + [True] * 2
        assert refused <= set(calls[3:])
        assert reward.seen == ["0", "1", "2"]
        # All room is back.
        again = [asyncio.create_task(worker.score(PROMPT, [str(i)])) for i in range(3)]
        assert len(await asyncio.gather(*again)) == 3


async def test_a_call_cancelled_while_it_waits_is_never_computed() -> None:
    """Guards against a queue full of work that nobody waits for, and against lost room."""
    reward = GatedReward()
    async with started(reward, queue_limit=2) as worker:
        running = asyncio.create_task(worker.score(PROMPT, ["running"]))
        assert await asyncio.to_thread(reward.entered.wait, 10)
        for _ in range(3):  # more often than there is room
            waiting = asyncio.create_task(worker.score(PROMPT, ["cancelled"]))
            await asyncio.wait({waiting}, timeout=0)  # let it queue
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        last = asyncio.create_task(worker.score(PROMPT, ["last"]))
        reward.gate.set()
        await asyncio.gather(running, last)
        assert reward.seen == ["running", "last"]


async def test_a_running_call_keeps_its_place_when_its_caller_gives_up() -> None:
    """Guards against more calls in the queue than its limit: the thread is still busy."""
    reward = GatedReward()
    async with started(reward, queue_limit=1) as worker:
        running = asyncio.create_task(worker.score(PROMPT, ["running"]))
        assert await asyncio.to_thread(reward.entered.wait, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(Overloaded):
            await worker.score(PROMPT, ["next"])
        reward.gate.set()


async def test_a_worker_is_a_scorer() -> None:
    async with started(ToyReward()) as worker:
        scorer: Scorer = worker
        async with scorer.open(PROMPT) as session:
            scores = await session.score([candidate(3, "aab"), candidate(1, "")])
            assert scores == Scores((2 / 3, 0.0), 1)
            # Candidates may vanish from a batch and their texts change.
            assert await session.score([candidate(1, "xyz e")]) == Scores((0.2,), 2)


def test_the_toy_is_deterministic_and_computes_equal_texts_once() -> None:
    reward = ToyReward()
    scores = score(reward, PROMPT, ["AEi x", "", "b", "AEi x"])
    assert scores == Scores((0.6, 0.0, 0.0, 0.6), 3)
    assert score(reward, PROMPT, ["AEi x", "", "b", "AEi x"]) == scores


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyboardInterrupt])
async def test_what_is_no_ordinary_error_is_told_like_one(error: type[BaseException]) -> None:
    """Guards a caller against waiting for ever (asyncio's futures refuse a StopIteration), and the
    service against being ended by a user's function."""

    class Strange(ToyReward):
        def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
            if candidates[0].text == "stop":
                raise error
            return super().score(prompt, candidates)

    async with started(Strange()) as worker:
        with pytest.raises(RuntimeError, match=f"a reward raised {error.__name__}"):
            await asyncio.wait_for(worker.score(PROMPT, ["stop"]), 10)
        assert (await worker.score(PROMPT, ["a"])).values == (1.0,)


class PickyReward(ToyReward):
    """Refuses "!", and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        self.seen.append(candidates[0].text)
        if candidates[0].text == "!":
            raise InvalidRequest([])
        return super().score(prompt, candidates)


async def test_one_whole_batch_of_a_pass_fails_alone() -> None:
    """Guards the others against being asked twice, and against another's error."""
    reward = PickyReward()
    async with started(reward) as worker:
        calls = (worker.score(PROMPT, [text]) for text in ("a", "!", "b"))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found[1], InvalidRequest)
        assert [isinstance(scores, Scores) for scores in found] == [True, False, True]
        assert sorted(reward.seen) == ["!", "Hello.", "a", "b"]


@pytest.mark.parametrize(
    "module", ["reward", "worker", "toy", "settings", "batching", "catalog", "embedded"]
)
def test_in_process_parts_import_without_grpc_and_torch(module: str) -> None:
    """Guards experiments on machines without grpc, and the start of services without models."""
    code = (
        f"import sys, reward_service.{module}\n"
        "heavy = {'grpc', 'torch', 'transformers', 'google.protobuf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class CountingReward(ToyReward):
    """Counts its open sessions; they refuse a text "!"."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = 0
        self.closed = threading.Event()

    def open(self, prompt: Prompt, *, once: bool = False) -> Any:
        self.num_open += 1
        return CountingSession(self, super().open(prompt))


class CountingSession:
    def __init__(self, reward: CountingReward, session: RewardSession) -> None:
        self._reward = reward
        self._session = session

    def begin(self, candidates: Sequence[Candidate]) -> ScoringTask:
        if any(candidate.text == "!" for candidate in candidates):
            raise InvalidRequest([])
        return self._session.begin(candidates)

    def close(self) -> None:
        self._reward.num_open -= 1
        self._reward.closed.set()


async def test_a_session_is_closed_when_it_ends() -> None:
    """Guards keys and values of prefixes against staying behind."""
    reward = CountingReward()
    async with started(reward) as worker:
        async with worker.open(PROMPT) as session:
            reward.closed.clear()  # the one that warmed up is closed by now, not before
            assert reward.num_open == 1
            scores = await session.score([candidate(3, "a"), candidate(1, "")])
            assert scores == Scores((1.0, 0.0), 1)
        assert await asyncio.to_thread(reward.closed.wait, 10)
        assert reward.num_open == 0


async def test_a_batch_that_is_refused_frees_what_its_session_keeps() -> None:
    """Guards against a session that counts on what was never computed."""
    reward = CountingReward()
    async with started(reward) as worker, worker.open(PROMPT) as session:
        reward.closed.clear()
        with pytest.raises(InvalidRequest):
            await session.score([candidate(3, "!")])
        assert reward.closed.is_set()


async def test_a_session_that_ends_after_its_worker_is_no_error() -> None:
    """Guards shutdown: the thread is gone before the streams are."""
    async with AsyncExitStack() as stack, started(CountingReward()) as worker:
        await stack.enter_async_context(worker.open(PROMPT))


async def test_what_waits_when_a_worker_is_closed_is_told_so() -> None:
    """Guards against calls that are never answered."""
    reward = GatedReward()
    async with started(reward) as worker:
        running = asyncio.create_task(worker.score(PROMPT, ["running"]))
        assert await asyncio.to_thread(reward.entered.wait, 10)
        waiting = asyncio.create_task(worker.score(PROMPT, ["waiting"]))
        await asyncio.wait({waiting}, timeout=0)
        worker.close()
        reward.gate.set()
        for call in (waiting, asyncio.create_task(worker.score(PROMPT, ["late"]))):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(call, 10)
        await asyncio.wait({running}, timeout=10)
        assert running.done()


async def passes(reward: PiecewiseReward, count: int) -> None:
    """Let so many passes happen, and wait until the thread is in the one after them."""
    for _ in range(count):
        reward.gate.release()
        assert await asyncio.to_thread(reward.entered.acquire, timeout=10)


@asynccontextmanager
async def two_sessions(reward: PiecewiseReward) -> AsyncIterator[tuple[Worker, Any, Any]]:
    worker = await Worker.start(lambda: reward)
    assert reward.entered.acquire(timeout=10)  # the warm-up's
    reward.passes.clear()
    try:
        async with worker.open(PROMPT) as one, worker.open(PROMPT) as two:
            yield worker, one, two
    finally:
        for _ in range(50):
            reward.gate.release()
        worker.close()


async def test_batches_of_sessions_share_passes_and_a_small_one_does_not_wait() -> None:
    """Guards a request with a few candidates against waiting for one with a thousand."""
    reward = PiecewiseReward(token_budget=4)
    async with two_sessions(reward) as (_, one, two):
        large = asyncio.create_task(one.score([candidate(0, "a" * 12)]))
        assert await asyncio.to_thread(reward.entered.acquire, timeout=10)
        small = asyncio.create_task(two.score([candidate(0, "b"), candidate(1, "b")]))
        await asyncio.wait({small}, timeout=0)
        await passes(reward, 2)  # the large one's first, and the first shared one
        assert (await asyncio.wait_for(small, 10)).values == (2.0, 2.0)
        assert not large.done()
        assert reward.passes == ["aaaa", "abab"]
        await passes(reward, 1)
        reward.gate.release()
        assert (await asyncio.wait_for(large, 10)).values == (12.0,)
        assert reward.passes == ["aaaa", "abab", "aaaa", "aa"]


async def test_what_arrives_together_is_merged() -> None:
    """Guards the wait for others: without it, the first of two would have a pass of its own."""
    reward = PiecewiseReward(token_budget=8)
    async with two_sessions(reward) as (worker, one, two):
        worker._merge_s = 10  # over when both are there
        reward.gate.release()
        first = asyncio.create_task(one.score([candidate(0, "aa")]))
        second = asyncio.create_task(two.score([candidate(0, "bb")]))
        await asyncio.wait_for(asyncio.gather(first, second), 20)
        assert reward.passes == ["abab"]


async def test_a_batch_given_up_under_way_gets_no_more_passes() -> None:
    """Guards the machine against work that nobody waits for."""
    reward = PiecewiseReward(token_budget=4)
    async with two_sessions(reward) as (_, one, two):
        large = asyncio.create_task(one.score([candidate(0, "a" * 12)]))
        assert await asyncio.to_thread(reward.entered.acquire, timeout=10)
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        num_closed = reward.num_closed
        other = asyncio.create_task(two.score([candidate(0, "b")]))
        await asyncio.wait({other}, timeout=0)
        await passes(reward, 1)
        reward.gate.release()
        assert (await asyncio.wait_for(other, 10)).values == (1.0,)
        assert reward.passes == ["aaaa", "b"]
        assert reward.num_closed == num_closed + 1


async def test_a_batch_that_fails_fails_alone() -> None:
    """Guards a session against what another one sent in the same pass."""
    reward = PiecewiseReward(token_budget=8)
    async with two_sessions(reward) as (worker, one, two):
        worker._merge_s = 10
        for _ in range(3):
            reward.gate.release()
        good = asyncio.create_task(one.score([candidate(0, "aa")]))
        bad = asyncio.create_task(two.score([candidate(0, "b!")]))
        assert (await asyncio.wait_for(good, 20)).values == (2.0,)
        with pytest.raises(ValueError, match="a bad letter"):
            await bad
        assert reward.passes == ["aba!", "aa", "b!"]


class Unclosable(PiecewiseReward):
    """Its sessions cannot be closed, which no reward may do."""

    def close(self) -> None:
        raise SystemExit


async def test_when_the_thread_ends_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against callers that hang: one under way, one that has just come, one that is late."""
    reward = Unclosable()
    async with started(reward) as worker:
        async with worker.open(PROMPT) as session:
            failing = asyncio.ensure_future(session.score([candidate(0, "!")]))
            await asyncio.to_thread(reward.entered.acquire)  # the warm-up's
            await asyncio.to_thread(reward.entered.acquire)
            waiting = asyncio.ensure_future(worker.score(PROMPT, ["a"]))
            await asyncio.sleep(0)  # it has been sent
            reward.gate.release()
            for call in (failing, waiting, worker.score(PROMPT, ["b"])):
                with pytest.raises(Unavailable):
                    await asyncio.wait_for(call, 20)
        assert worker.heartbeat_s() == math.inf
    assert "the thread of reward piecewise ends" in caplog.text
