"""The worker's thread and queue, and the in-process scorer on top of it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest

from reward_service.kinds.toy import ToyReward
from reward_service.reward import Reward, RewardLost, Task, as_candidates
from reward_service.worker import Worker
from specrej.contracts import Candidate, Prompt, Scores
from specrej.contracts.errors import InvalidRequest, Overloaded, RewardInvalid, Unavailable
from specrej.telemetry import metrics, names
from tests.serving import until

PROMPT = Prompt.from_user("Write it.")
NAN, INF = float("nan"), float("inf")


class PiecewiseReward(Reward):
    """Computes letters, `token_budget` of them per pass; a pass with a "!" in it fails.
    The text "?" is refused.

    Records its passes after the warm-up; each waits for `gate`.
    """

    name, fingerprint, description = "piecewise", "f", "Letter by letter."

    def __init__(self, token_budget: int = 4) -> None:
        self.token_budget = token_budget
        self.passes: list[str] = []
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_freed = 0

    def begin(self, session: Prompt, candidates: Sequence[Candidate]) -> Task:
        texts = [candidate.text for candidate in candidates]
        if "?" in texts:
            raise InvalidRequest([])
        computed: list[str] = []

        def finish(num_tokens: int) -> Scores:
            return self.finish((float(len(computed)),) * len(texts), num_tokens)

        is_warm_up = texts == ["Hello."]
        letters = "" if is_warm_up else "".join(texts)
        return Task([(1, (computed, letter)) for letter in letters], finish)

    def finish(self, values: tuple[float, ...], num_tokens: int) -> Scores:
        return Scores(values, num_tokens)

    def free(self, session: Prompt) -> None:
        self.num_freed += 1

    def compute(self, pieces: Sequence[tuple[list[str], str]]) -> None:
        letters = "".join(letter for _, letter in pieces)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        self.passes.append(letters)
        if "!" in letters:
            raise ValueError("a bad letter")
        for computed, letter in pieces:
            computed.append(letter)


@asynccontextmanager
async def started(reward: Reward, queue_limit: int = 4) -> AsyncIterator[Worker]:
    worker = await Worker.start(lambda: reward, queue_limit)
    try:
        yield worker
    finally:
        worker.close()
        if isinstance(reward, PiecewiseReward):
            reward.gate.release(50)


async def entered(reward: PiecewiseReward) -> None:
    """Return when the thread is in its next pass."""
    assert await asyncio.to_thread(reward.entered.acquire, timeout=10)


async def sent(call: Awaitable[Scores]) -> asyncio.Future[Scores]:
    """The call, once its request is in the worker's queue."""
    task = asyncio.ensure_future(call)
    await asyncio.wait({task}, timeout=0)
    return task


class RecordingReward(ToyReward):
    """Records the threads that scored and the first texts; raises `errors` for some texts."""

    def __init__(self, errors: dict[str, BaseException] | None = None) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}
        self.texts: list[str] = []
        self.errors = errors or {}

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        self.threads.add(threading.get_ident())
        self.texts.append(candidates[0].text)
        if error := self.errors.get(candidates[0].text):
            raise error
        return super().score(prompt, candidates)


async def test_reward_is_loaded_and_scores_in_one_thread_that_is_not_the_loops() -> None:
    """Guards the event loop against torch, and torch's thread count against a second thread."""
    worker = await Worker.start(RecordingReward)
    await worker.score(PROMPT, ["a"])
    reward = worker.reward
    async with worker.open(PROMPT):  # a session may end after its worker
        worker.close()
    assert isinstance(reward, RecordingReward)
    assert len(reward.threads) == 1
    assert threading.get_ident() not in reward.threads


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_failed_load_or_warm_up_is_raised_and_leaves_no_thread(is_loaded: bool) -> None:
    def load() -> Reward:
        if is_loaded:
            return RecordingReward({"Hello.": ValueError("bad weights")})
        raise ValueError("bad weights")

    before = {*threading.enumerate()}
    with pytest.raises(ValueError, match="bad weights"):
        await Worker.start(load)
    for thread in {*threading.enumerate()} - before:
        if thread.name.startswith("reward"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("values", [(NAN, 0.0), (0.0, INF), (-INF, 0.0), (0.0,), (0.0, 0.0, 0.0)])
async def test_invalid_scores_are_refused(
    values: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the ranking: NaN compares as false, and a missing score shifts the rest."""
    async with started(ToyReward()) as worker:
        monkeypatch.setattr(ToyReward, "score", lambda *_: Scores(values))
        with pytest.raises(RewardInvalid) as failure:
            await worker.score(PROMPT, ["a", "b"])
        assert failure.value.metadata == {"reward": "toy"}


async def test_time_size_and_tokens_are_measured_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a time per candidate: estimates for a deadline divide it by the size."""
    recorded, reward = mock.Mock(), PiecewiseReward()
    async with started(reward) as worker:
        monkeypatch.setattr(metrics, "record", recorded)
        monkeypatch.setattr(metrics, "add", recorded)
        call = await sent(worker.score(PROMPT, ["ab"] * 20))
        await entered(reward)
        began = time.perf_counter()
        await asyncio.sleep(0.1)
        held_s = time.perf_counter() - began
        reward.gate.release(50)
        await call
    calls = recorded.call_args_list
    assert all(call.kwargs == {"reward": "piecewise"} for call in calls)
    assert [call.args[1] for call in calls if call.args[0] is names.REWARD_BATCH] == [20]
    assert [call.args[1] for call in calls if call.args[0] is names.REWARD_TOKENS] == [40]
    (seconds,) = [call.args[1] for call in calls if call.args[0] is names.REWARD_DURATION]
    assert seconds >= held_s


async def test_queue_limit_refuses_exactly_the_rest() -> None:
    reward = PiecewiseReward()
    async with started(reward, queue_limit=3) as worker:
        calls = [asyncio.create_task(worker.score(PROMPT, [str(i)])) for i in range(5)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        reward.gate.release(50)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, Overloaded) for result in results] == [False] * 3 + [True] * 2
        assert "".join(reward.passes) == "012"
        # All room is free again.
        await asyncio.gather(*(worker.score(PROMPT, [str(i)]) for i in range(3)))


@asynccontextmanager
async def busy(
    reward: PiecewiseReward, queue_limit: int
) -> AsyncIterator[tuple[Worker, asyncio.Future[Scores]]]:
    """A worker and the call that its thread is computing."""
    async with started(reward, queue_limit) as worker:
        running = await sent(worker.score(PROMPT, ["r"]))
        await entered(reward)
        yield worker, running


async def test_of_cancelled_calls_only_the_running_one_keeps_its_room() -> None:
    """Guards against a queue full of cancelled work, and against lost room; and against more calls
    than the limit, as the thread is still busy."""
    reward = PiecewiseReward()
    async with busy(reward, queue_limit=2) as (worker, running):
        for _ in range(3):  # more often than there is room
            waiting = await sent(worker.score(PROMPT, ["c"]))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        last = await sent(worker.score(PROMPT, ["l"]))
        with pytest.raises(Overloaded):
            await worker.score(PROMPT, ["n"])
        reward.gate.release(50)
        await last
    assert reward.passes == ["r", "l"]


@pytest.mark.parametrize(
    "error", [StopIteration, SystemExit, KeyboardInterrupt, TimeoutError, CancelledError]
)
async def test_errors_that_mean_something_else_become_runtime_errors(
    error: type[BaseException],
) -> None:
    """Guards callers against waiting for ever (asyncio's futures refuse a StopIteration) and
    retries of a timeout that is not theirs, and the service against a function that ends it."""
    async with started(RecordingReward({"stop": error()})) as worker:
        with pytest.raises(RuntimeError, match=f"a reward raised {error.__name__}"):
            await asyncio.wait_for(worker.score(PROMPT, ["stop"]), 10)
        assert (await worker.score(PROMPT, ["a"])).values == (1.0,)


async def test_one_whole_batch_of_a_pass_fails_alone() -> None:
    """Guards the other batches against a second computation, and against its error."""
    reward = RecordingReward({"!": InvalidRequest([])})
    async with started(reward) as worker:
        calls = (worker.score(PROMPT, [text]) for text in ("a", "!", "b"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], InvalidRequest)
        assert [isinstance(scores, Scores) for scores in results] == [True, False, True]
        assert sorted(reward.texts) == ["!", "Hello.", "a", "b"]


async def test_a_session_is_freed_when_a_batch_is_refused_and_when_it_ends() -> None:
    """Guards against keys and values that stay in memory, and against a session that takes for
    computed what was never computed."""
    reward = PiecewiseReward()
    async with started(reward) as worker:
        async with worker.open(PROMPT) as session:
            assert reward.num_freed == 1  # that of the warm-up
            with pytest.raises(InvalidRequest):
                await session.score(as_candidates(["?"]))
            await until(lambda: reward.num_freed == 2)
        await until(lambda: reward.num_freed == 3)


async def test_calls_that_wait_when_a_worker_is_closed_are_unavailable() -> None:
    """Guards against calls that are never answered."""
    reward = PiecewiseReward()
    async with busy(reward, queue_limit=4) as (worker, running):
        waiting = await sent(worker.score(PROMPT, ["w"]))
        worker.close()
        reward.gate.release(50)
        for call in (waiting, worker.score(PROMPT, ["late"])):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(call, 10)
        await asyncio.wait({running}, timeout=10)
        assert running.done()


@asynccontextmanager
async def two_sessions(reward: PiecewiseReward) -> AsyncIterator[tuple[Worker, Any, Any]]:
    async with started(reward) as worker, worker.open(PROMPT) as one, worker.open(PROMPT) as two:
        yield worker, one, two


async def begun(reward: PiecewiseReward, session: Any) -> asyncio.Future[Scores]:
    """A batch of three passes of four, whose first pass the thread has entered."""
    large = await sent(session.score(as_candidates(["a" * 12])))
    await entered(reward)
    return large


async def test_sessions_share_passes_and_a_small_batch_does_not_wait() -> None:
    """Guards a request with a few candidates against waiting for one with a thousand."""
    reward = PiecewiseReward(token_budget=4)
    async with two_sessions(reward) as (_, one, two):
        large = await begun(reward, one)
        small = await sent(two.score(as_candidates(["b", "b"])))
        for _ in range(2):  # the large one's first, and the first shared one
            reward.gate.release()
            await entered(reward)
        assert (await asyncio.wait_for(small, 10)).values == (2.0, 2.0)
        assert not large.done()
        reward.gate.release(50)
        assert (await asyncio.wait_for(large, 10)).values == (12.0,)
        assert reward.passes == ["aaaa", "abab", "aaaa", "aa"]


async def test_cancelled_batch_under_way_gets_no_more_passes() -> None:
    """Guards against passes for calls that were cancelled."""
    reward = PiecewiseReward(token_budget=4)
    async with two_sessions(reward) as (_, one, two):
        large = await begun(reward, one)
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        num_freed = reward.num_freed
        other = await sent(two.score(as_candidates(["b"])))
        reward.gate.release(50)
        assert (await asyncio.wait_for(other, 10)).values == (1.0,)
        assert reward.passes == ["aaaa", "b"]
        assert reward.num_freed == num_freed + 1


async def test_batches_of_a_failed_pass_begin_again_alone_and_in_turn() -> None:
    """Guards sessions against another one's batch in the same pass, and a small batch against the
    whole of a large one after it."""
    reward = PiecewiseReward(token_budget=4)
    async with two_sessions(reward) as (worker, one, two), worker.open(PROMPT) as three:
        large = await begun(reward, one)
        bad = await sent(two.score(as_candidates(["!"])))
        small = await sent(three.score(as_candidates(["bb"])))
        reward.gate.release(50)
        assert (await asyncio.wait_for(small, 20)).values == (2.0,)
        assert (await asyncio.wait_for(large, 20)).values == (12.0,)
        with pytest.raises(ValueError, match="a bad letter"):
            await bad
        assert "bb" in reward.passes[:5], reward.passes
        assert not any({*letters} > {"!"} for letters in reward.passes[2:])


@pytest.mark.parametrize("place", ["open", "begin", "compute", "finish", "free"])
async def test_the_heartbeat_ages_wherever_the_thread_hangs(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards templates and tokenizers, which work between two passes."""
    reward, released = PiecewiseReward(), threading.Event()
    reward.gate.release(50)
    async with started(reward) as worker:
        assert worker.heartbeat_s() < 10.0
        method = getattr(reward, place)

        def hang(*arguments: Any, **options: Any) -> Any:
            released.wait()
            return method(*arguments, **options)

        monkeypatch.setattr(reward, place, hang)
        call = asyncio.ensure_future(worker.score(PROMPT, ["a"]))
        await until(lambda: worker.heartbeat_s() > 0.05)
        released.set()
        assert (await call).values == (1.0,)
        await until(lambda: worker.heartbeat_s() == 0)


class AcceleratorError(RuntimeError):
    """Of the name of torch's, which this module does not import."""


@pytest.mark.parametrize("error", [RewardLost("gone"), AcceleratorError("CUDA error")])
@pytest.mark.parametrize("place", [(ToyReward, "compute"), (Task, "scores")])
async def test_a_reward_that_is_lost_is_unavailable_and_not_alive(
    error: Exception, place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a service that stays ready and fails every batch as INTERNAL; a GPU may fail
    where scores are read."""
    async with started(ToyReward()) as worker:
        monkeypatch.setattr(*place, mock.Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(worker.score(PROMPT, ["a"]), 20)
        assert worker.heartbeat_s() == math.inf


async def test_when_the_thread_ends_all_calls_are_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against callers that wait for ever: computing, queued and late ones. No reward may
    raise where a session is freed."""
    reward = PiecewiseReward()
    async with started(reward) as worker, worker.open(PROMPT) as session:
        monkeypatch.setattr(reward, "free", mock.Mock(side_effect=SystemExit))
        failing = await sent(session.score(as_candidates(["!"])))
        await entered(reward)
        waiting = await sent(worker.score(PROMPT, ["a"]))
        reward.gate.release()
        with pytest.raises(ValueError, match="a bad letter"):
            await asyncio.wait_for(failing, 20)
        for call in (waiting, worker.score(PROMPT, ["b"])):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(call, 20)
        assert worker.heartbeat_s() == math.inf
