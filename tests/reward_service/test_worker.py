"""The worker's thread and queue, and the in-process scorer on top of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from reward_service.reward import Reward
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.contracts import Candidate, Prompt, Scorer, Scores
from specrej.errors import InvalidRequest, Overloaded, RewardInvalid
from tests.reward_service.fakes import FixedReward, GatedReward

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

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        self.threads.add(threading.get_ident())
        return super().score(prompt, texts)


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
        def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
            return Scores((NAN,))

    with pytest.raises(RewardInvalid):
        await Worker.start(Broken)


async def test_a_queue_of_q_beside_one_running_call_refuses_exactly_the_rest() -> None:
    reward = GatedReward()
    async with started(reward, queue_limit=2) as worker:
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
    async with started(reward, queue_limit=1) as worker:
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
    async with started(reward, queue_limit=0) as worker:
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
    scores = reward.score(PROMPT, ["AEi x", "", "b", "AEi x"])
    assert scores == Scores((0.6, 0.0, 0.0, 0.6), 3)
    assert reward.score(PROMPT, ["AEi x", "", "b", "AEi x"]) == scores


@pytest.mark.parametrize("module", ["reward", "worker", "toy", "settings", "batching", "embedded"])
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

    def open(self, prompt: Prompt) -> CountingSession:
        self.num_open += 1
        return CountingSession(self)


class CountingSession:
    def __init__(self, reward: CountingReward) -> None:
        self._reward = reward

    def score(self, candidates: Sequence[Candidate]) -> Scores:
        if any(candidate.text == "!" for candidate in candidates):
            raise InvalidRequest([])
        return Scores(tuple(float(candidate.id) for candidate in candidates))

    def close(self) -> None:
        self._reward.num_open -= 1
        self._reward.closed.set()


@pytest.mark.parametrize("text", ["a", "!"])
async def test_a_session_is_closed_however_it_ends(text: str) -> None:
    """Guards keys and values of prefixes against staying behind."""
    reward = CountingReward()
    async with started(reward) as worker:
        with suppress(InvalidRequest):
            async with worker.open(PROMPT) as session:
                assert reward.num_open == 1
                scores = await session.score([candidate(3, text), candidate(1, "")])
                assert scores == Scores((3.0, 1.0))
        assert await asyncio.to_thread(reward.closed.wait, 10)
        assert reward.num_open == 0


async def test_a_session_that_ends_after_its_worker_is_no_error() -> None:
    """Guards shutdown: the thread is gone before the streams are."""
    async with AsyncExitStack() as stack, started(CountingReward()) as worker:
        await stack.enter_async_context(worker.open(PROMPT))
