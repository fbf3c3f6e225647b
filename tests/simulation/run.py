"""One run: clients of several tenants, orchestrators and faults, all drawn from a seed.

The product's client calls the product's servicers over `wire`: request and events are messages, an
error is a status. Backends are toys behind their own servicers.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from contextvars import ContextVar
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import count, pairwise
from typing import Any, cast
from unittest import mock

from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Fleet, FleetSettings
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.rewards import FleetRewards
from orchestrator.cache import Cache, RedisClient, single_flight, tenant_digest
from orchestrator.cache import redis_client as redis_py
from orchestrator.cache.single_flight import Flight, SingleFlight
from orchestrator.edge import service
from orchestrator.edge.admission import MOST_PASSED, Admission, Permit
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.run import run
from specrej import Client, Retries, contracts
from specrej.client import client as client_module
from specrej.contracts import CacheControl, Generation, Options
from specrej.contracts.errors import SpecrejError
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.security import TENANT_METADATA
from tests.simulation import nodes
from tests.simulation.loop import EPOCH_S, Violation, VirtualLoop, fail, note_change
from tests.simulation.wire import Channel, Server

DEADLINE_S = 30.0
_LATE_S = 1.5  # a call to Redis and the end of a session may follow the deadline
_SETTLED_S = 12.0  # then every lease has expired
_MOST_IDLE = 700  # entries of all containers of an idle orchestrator, of which 64 per backend
_UNREAD_S = 0.06  # most between a look at the cache and the lock, without a fault
_CONTROLS = [CacheControl.USE] * 14 + [CacheControl.BYPASS, CacheControl.REFRESH]
_NOT_SEARCHED = ("cache", "allow_degraded")


_due_s: ContextVar[float] = ContextVar("due_s")  # a request's deadline
_leaving: ContextVar[asyncio.Task[None] | None] = ContextVar("leaving", default=None)
_looks: ContextVar[tuple[float, ...]] = ContextVar("looks", default=())  # at the cache: when


class WatchedDeadline(DeadlineController):
    """No run of a request plans with more time than the request has."""

    def __post_init__(self) -> None:
        DeadlineController.__post_init__(self)
        if self.clock() + self.time_left_s > _due_s.get() + 1e-6:
            fail("a run may end after its deadline")


class WatchedCache(Cache):
    """No answer of another version is found, and a lock keeps equal requests from running twice."""

    run: Simulation

    async def get(self, key: str) -> Generation | None:
        found = await super().get(key)
        _looks.set((*_looks.get(), self.run.loop.time()))
        if found and f":{found.generator_fingerprint}:" not in key:
            fail(f"{found.generator_fingerprint} is stored as {key}")
        return found

    async def put(self, key: str, generation: Generation) -> bool:
        is_stored, looks = await super().put(key, generation), _looks.get()
        # One that has waited for the lock, and looked again without success, runs without it.
        if is_stored and len(looks) == 1 and not {"redis", "link", "deadline"} & {*self.run.faults}:
            if self.run.stored_s.get(key, 0.0) > looks[0] + _UNREAD_S:
                fail("a request runs although it waited for an equal one")
            self.run.stored_s[key] = self.run.loop.time()
        return is_stored


class WatchedFlights(SingleFlight[Generation]):
    """A caller with less than half of the leader's time waits for it during half of its own."""

    @asynccontextmanager
    async def join(  # type: ignore[override]
        self, key: str, *left: Any
    ) -> AsyncIterator[Flight[Generation]]:
        flight, is_over = self.flying.get(key), False

        def check() -> None:
            waits = not is_over and self.flying.get(key) is flight
            if waits and f"{key}:beside" not in self.flying:
                fail("a caller with little time waits for one with much")

        if flight and left[0]() < flight.left_s() / 2:
            asyncio.get_running_loop().call_later(left[0]() / 2 + 0.05, check)
        try:
            async with super().join(key, *left) as joined:
                is_over = True
                yield joined
        finally:
            is_over = True


class WatchedAdmission(Admission):
    """The product's admission; every permit is checked for the limit and for fair turns."""

    def __init__(self, most: tuple[int, int], clock: Any, rng: random.Random) -> None:
        super().__init__(*most, clock)
        self.__most, self.__most_queued = most
        self.__largest = 0
        self.__waiting: Counter[str] = Counter()
        self.__debt: Counter[str] = Counter()  # granted to others since the tenant's last turn
        self.__lead: Counter[str] = Counter()  # granted while the same two tenants wait
        self.__numbers = count(1)
        self.__came: dict[str, int] = {}
        self.__since: dict[str, int] = {}  # the begin of its wait, or its last turn
        self.__passed: Counter[str] = Counter()  # permits of tenants that came later, since then
        self.__leaving: list[asyncio.Task[None]] = []  # clients that wait, until another leaves
        self.__random = rng

    @asynccontextmanager
    async def enter(  # type: ignore[override]
        self, tenant: str = "", tokens: int = 1, *others: Any
    ) -> AsyncIterator[Permit]:
        waiting, debt = self.__waiting, self.__debt
        debt[tenant] *= waiting[tenant] > 0
        self.__came.setdefault(tenant, next(self.__numbers))
        if not waiting[tenant]:
            self.__since[tenant], self.__passed[tenant] = next(self.__numbers), 0
        waiting[tenant] += 1
        if client := _leaving.get():
            self.__leaving.append(client)
        self.__largest = max(self.__largest, tokens)
        is_held = False
        note_change(self)
        try:
            async with super().enter(tenant, tokens, *others) as permit:
                is_held = True
                self.__stay(client)
                waiting[tenant] -= 1
                debt[tenant] = 0
                if not permit.is_beyond:
                    debt.update({t: tokens for t, num in waiting.items() if num and t != tenant})
                if max(debt.values()) > self.__largest * (2 * len(debt) - 2 + self.__most):
                    fail(f"turns are not fair: {debt}")
                self.__compare(tenant, tokens, permit.is_beyond)
                try:
                    yield permit
                finally:
                    await self.__cancel_another()
                # What it did not use is not had before them.
                passed = {t for t, num in waiting.items() if num and t != tenant}
                unused = min(permit.unused, tokens)
                debt.update({t: -min(unused, debt[t]) for t in passed})
                self.__lead[tenant] -= unused
        finally:
            self.__stay(client)
            waiting[tenant] -= not is_held
            note_change(self)

    def __stay(self, client: asyncio.Task[None] | None) -> None:
        if client in self.__leaving:
            self.__leaving.remove(client)

    async def __cancel_another(self) -> None:
        """So many turns before a permit is returned that a request is cancelled as it gets it."""
        if self.__leaving:
            self.__leaving.pop(0).cancel()
            for _ in range(self.__random.randrange(6)):
                await asyncio.sleep(0)

    def __compare(self, tenant: str, tokens: int, is_beyond: bool) -> None:
        """A tenant that waits is not passed without a bound, and of two each gets its share.
        Permits beyond the limit delay nobody, but are part of a share."""
        others = [one for one, num in self.__waiting.items() if num and one != tenant]
        self.__since[tenant], self.__passed[tenant] = next(self.__numbers), 0
        for other in [] if is_beyond else others:
            self.__passed[other] += self.__came[tenant] > self.__since[other]
            if self.__passed[other] > MOST_PASSED + 5 + self.__most:
                fail(f"{self.__passed[other]} requests that came later pass {other}")
        if len(others) != 1 or not self.__waiting[tenant]:
            self.__lead = Counter()  # also those of tenants whose lines have ended meanwhile
            return
        self.__lead[tenant] += tokens
        lead = self.__lead[tenant] - self.__lead[others[0]]
        if not is_beyond and lead > self.__largest * (3 + self.__most):
            fail(f"unequal shares: {self.__lead}")

    def check(self) -> None:
        """The limits hold, and no request waits beside a free permit."""
        is_idle, most = self.running < self.__most and self.queued, self.__most * 5 // 4
        if self.running > most or self.queued > self.__most_queued or is_idle:
            raise Violation(f"{self.running} requests run of {self.__most}, {self.queued} wait")


class Process:
    """One orchestrator."""

    def __init__(self, run: Simulation, most: tuple[int, int], **cache_options: Any) -> None:
        loop, draw = run.loop, run.rng.random
        self.link = nodes.Link(run.redis)
        self.generators = _fleet(
            run.generators, RemoteGenerator, lambda described: described.fingerprint
        )
        self.rewards = _fleet(run.rewards, RemoteRewards, len)
        with mock.patch.object(redis_py, "connect", lambda *_: self.link):
            redis = RedisClient("redis://simulated")
        cached = WatchedCache(redis, **cache_options)
        cached.run = run
        self.admission = WatchedAdmission(most, loop.time, run.rng)
        with mock.patch.object(single_flight, "SingleFlight", WatchedFlights):
            self.orchestrator = Orchestrator(
                FleetGenerator(self.generators, draw),
                FleetRewards(self.rewards, draw),
                cached,
                self.admission,
            )
        servicer = OrchestratorServicer(self.orchestrator)
        self._server = Server(
            servicer.service(), deadline_s=2 * DEADLINE_S, max_deadline_s=2 * DEADLINE_S
        )
        self._draw = draw

    async def travel(self) -> None:
        """From a client or back."""
        await asyncio.sleep(int(self._draw() ** 2 * 8) / 1e3)

    def client(self, attempts: int) -> Client:
        """The product's client of this orchestrator."""
        channel = Channel(self._server, self)
        with mock.patch.object(client_module, "open_channel", lambda *_, **__: channel):
            return Client(timeout_s=DEADLINE_S, retries=Retries(attempts))


def _fleet(targets: Sequence[nodes.Node], peer: Any, version: Any) -> Fleet[Any]:
    by_target = {node.target: node for node in targets}
    polls = FleetSettings(report_s=1.0, resolve_s=5.0, lost_s=4.0)
    listed: Any = partial(asyncio.sleep, 0, frozenset(by_target))

    def connect(at: Any) -> tuple[Any, Any]:
        channel = Channel(by_target[at].server, by_target[at])
        return channel, peer(channel)

    return Fleet("node", listed, connect, version, polls)


def _num_kept(one: Any, seen: set[int]) -> int:
    """Entries of all containers that an orchestrator's objects hold."""
    is_container = isinstance(one, (dict, list, tuple, set, deque))
    if id(one) in seen or not (is_container or type(one).__module__.startswith("orchestrator.")):
        return 0
    seen.add(id(one))
    size = len(one) if is_container else 0
    return size + sum(_num_kept(value, seen) for value in gc.get_referents(one))


class Simulation:
    """A run of one seed, over after `num_requests` requests."""

    def __init__(self, seed: int, num_requests: int) -> None:
        self.seed, self._num_requests = seed, num_requests
        self.rng = rng = random.Random(seed)
        likelihood = rng.choice((0.0, 0.2, 0.5, 0.8))  # a defect cannot hide behind few faults
        self.loop = VirtualLoop(rng, shuffles=rng.random() < 0.5)
        self._slots, self._per_s = rng.choice((60, 150, 2000)), rng.choice((20, 60, 400))
        # With rapid ones a request may have two faults.
        step_s, self._is_rapid = rng.choice((0.0, 0.005, 0.02)), rng.random() < 0.4
        self._tenants = "abcde"[: rng.randint(1, 5)]
        self.generators = [
            nodes.GeneratorNode(rng, f"g{n}", self._slots * rng.choice((1, 1, 3)), step_s)
            for n in range(rng.randint(1, 3))
        ]
        self.rewards = [nodes.RewardNode(rng, f"r{n}") for n in range(rng.randint(1, 2))]
        self.redis = nodes.SimulatedRedis(rng)
        most = rng.choice((1, 2, 4, 8)), rng.choice((0, 8, 64))
        self.stored_s: dict[str, float] = {}
        ages = {"ttl_s": rng.choice((1.0, 5.0, 60.0))}
        self._processes = [Process(self, most, **ages) for _ in range(rng.randint(1, 3))]
        served: list[nodes.Node] = [*self.generators, *self.rewards]
        links = [one.link for one in self._processes]
        self._places: dict[str, tuple[Any, list[str]]] = {  # by kind: where, and the faults
            "crash": (served, ["down"]),
            "upgrade": (self.generators, ["upgrade"]),
            "refuse": (self.generators, ["refuse"]),
            "stall": (served, ["stall", "slow"]),
            "reward": (self.rewards, ["error", "nan", "short"]),
            "redis": ([self.redis], ["down", "hangs", "slow", "full"]),
            "link": (links, ["cut"]),
        }
        kinds = (*self._places, "cancel", "deadline")
        self.faults = [kind for kind in kinds if rng.random() < likelihood]
        self.outcomes: Counter[str] = Counter()
        self._clients: set[asyncio.Task[None]] = set()
        self._answers: dict[Any, Any] = {}
        self._new_seeds = count(1000)
        self._digest = hashlib.blake2b(digest_size=8)

    def run(self) -> str:
        """The digest of all events. Raises Violation: an invariant does not hold."""
        random.seed(self.seed)
        gc.disable()  # it must not decide when an abandoned object ends
        logging.disable(logging.WARNING)
        loop, clock = self.loop, self.loop.time
        times = {"perf_counter": clock, "monotonic": clock, "time": lambda: EPOCH_S + clock()}
        try:
            with (
                mock.patch.dict(vars(time), times),
                mock.patch.object(service, "run", self._run),
                mock.patch("orchestrator.loop.run.DeadlineController", WatchedDeadline),
                # `Logger.exception` calls `error`, too.
                mock.patch.object(logging.Logger, "error", lambda *what, **_: loop.fail(what)),
                closing(loop),
            ):
                loop.run_until_complete(self._main())
                if left := asyncio.all_tasks(loop):
                    raise Violation(f"{len(left)} tasks did not end, such as {next(iter(left))}")
        except Exception as error:
            raise Violation(f"seed {self.seed}: {error!r}; faults: {self.faults}") from error
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()
        return self._digest.hexdigest()

    def _run(self, *given: Any, **named: Any) -> AsyncGenerator[contracts.Event, None]:
        """The product's loop, which ends by the deadline."""
        *_, left_s = given
        _due_s.set(self.loop.time() + left_s)
        return run(*given, **named | dict[str, Any](clock=self.loop.time))

    def _note(self, what: str) -> None:
        self._digest.update(f"{self.loop.time():.6f} {what}\n".encode())

    async def _main(self) -> None:
        async with AsyncExitStack() as stack:
            for process in self._processes:
                for fleet in (process.generators, process.rewards):
                    await stack.enter_async_context(fleet)
                    await fleet.wait_heard()
            places = [self._places[kind] for kind in self.faults if kind in self._places]
            breaking = [asyncio.ensure_future(self._break(*place)) for place in places]
            await self._send_all()
            for task in breaking:
                task.cancel()
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0)), *breaking, *self._clients])
            await self._check_end()
        await asyncio.sleep(0.1)  # servers of polls that were just cancelled end

    async def _check_end(self) -> None:
        if self.outcomes.total() != self._num_requests:
            raise Violation(f"{self.outcomes.total()} outcomes of {self._num_requests} requests")
        if (num_leases := self.redis.num_leases()) and not {"redis", "link"} & {*self.faults}:
            raise Violation(f"{num_leases} leases were not released")
        await asyncio.sleep(_SETTLED_S)
        for process in self._processes:
            admission = process.admission
            held = admission.running + admission.queued + len(admission.heaviest(1))
            size = _num_kept(process.orchestrator, set())
            if held or size > _MOST_IDLE:
                raise Violation(f"idle, but {held} permits are held and {size} entries are kept")
        if num_open := sum(node.num_open() for node in (*self.generators, *self.rewards)):
            raise Violation(f"{num_open} sessions were never closed")

    async def _break(self, targets: Sequence[Any], names: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(16.0 if self._is_rapid else 4.0))
            target = self.rng.choice(targets)
            fault = self.rng.choice(names)
            target.set_fault(fault)
            self._note(fault)
            try:
                lasts_s = (0.01, 0.03) if self._is_rapid else (0.01, 0.01, 0.3, 2.0, 6.0)
                await asyncio.sleep(self.rng.choice(lasts_s))
            finally:
                target.set_fault("")

    async def _send_all(self) -> None:
        """Requests in bursts, which may be equal. A flood is of one tenant at one orchestrator; new
        tenants may follow it, or another tenant's small requests compete with its large ones."""
        rng, num_left = self.rng, self._num_requests
        latest: deque[tuple[str, Options]] = deque(maxlen=4)
        while num_left:
            await asyncio.sleep(int(rng.expovariate(self._per_s / 4) * 1e3) / 1e3)
            beside = rng.choice(("none", "new", "small")) if rng.random() < 0.08 else ""
            size = min(num_left, 50 if beside else rng.randint(1, 6))
            num_left -= size
            caller = rng.choice(self._tenants), rng.choice(self._processes)
            equal = self._draw_request() if rng.random() < 0.5 else None
            if equal:
                latest.append(equal)
                equal = rng.choice(latest)
            is_of_one = equal and rng.random() < 0.5
            for index in range(size):
                prompt, options = equal or self._draw_request()
                tenant, process = caller
                if not beside:
                    tenant = self._tenants[0] if is_of_one else rng.choice(self._tenants)
                    process = rng.choice(self._processes)
                if beside == "new" and index > 9:
                    await asyncio.sleep(int(rng.random() * 30) / 1e3)
                    tenant = f"new-{num_left}-{index}"
                elif beside == "small":
                    tenant, shape = (tenant, (5, 12)) if index % 2 else ("small", (1, 4))
                    options = {**options, "seed": next(self._new_seeds), "min_answers": 1}
                    for name in ("branching", "waves", "first"):
                        options.pop(name, None)
                    options |= dict(zip(("n", "max_tokens"), shape, strict=True))
                options = {**options, "allow_degraded": rng.random() < 0.4}
                options["return_candidates"] = rng.choice((1, 1, 1, 2, 3))
                client = self._client((prompt, options), tenant, process)
                self._clients.add(asyncio.ensure_future(client))
            await asyncio.sleep(2.0 * (beside == "small"))

    def _draw_request(self) -> tuple[str, Options]:
        draw = self.rng.random
        is_hot = draw() < 0.5
        options = Options(
            seed=int(draw() * 4) if is_hot else next(self._new_seeds),
            max_tokens=(4, 8, 12)[int(draw() * 3)],
            n=4 if is_hot else int(draw() * 6) * (draw() < 0.6),
            alpha=(0.5, 0.8)[draw() < 0.3],
            algorithm=[*contracts.Algorithm][draw() < 0.1],
            schedule=contracts.Schedule(first=4 if is_hot and draw() < 0.7 else 2),
            rewards=[
                contracts.WeightedReward(name, veto_below=0.25 if draw() < 0.2 else None)
                for name in nodes.REWARDS[: 1 + (draw() < 0.1)]
            ],
            cache=_CONTROLS[int(draw() * len(_CONTROLS))],
            prefer_complete=draw() < 0.5,
        )
        if draw() < 0.2 and options["algorithm"] is not contracts.Algorithm.BEST_OF_N:
            options["branching"] = contracts.Branching(width=4, keep=2)
            options["n"] = 4
        options["min_answers"] = 1 + (options["n"] != 1 and draw() < 0.2)
        if draw() < 0.2 and options["n"] and "branching" not in options:
            options |= {"waves": 2 * (draw() < 0.7), "first": int(draw() * 3) % options["n"]}
            options["stop_at"] = (0.3, 0.6)[int(draw() * 2)]
        return ("one", "one two", "one two three", "four")[int(draw() * 4)], options

    async def _client(self, request: Any, tenant: str, process: Process) -> None:
        draw, faults, began_s = self.rng.random, {*self.faults}, self.loop.time()
        # In whole milliseconds, so that they coincide with other events.
        is_cancelled = "cancel" in faults and draw() < 0.2
        cancels_s = int(draw() ** 2 * 200) / 1e3 if is_cancelled else None
        is_short = "deadline" in faults and draw() < 0.4
        deadline_s = int(draw() * 500) / 1e3 if is_short else DEADLINE_S
        is_stream, shows_text = draw() < 0.6, draw() < 0.5
        task = cast(Any, asyncio.current_task())
        if cancels_s is not None:
            self.loop.call_later(cancels_s, task.cancel)
        elif "cancel" in faults and draw() < 0.2:
            _leaving.set(task)
        sent: Any = {"metadata": ((TENANT_METADATA, tenant),), "timeout_s": deadline_s}
        (prompt, options), client = request, process.client(attempts=1 + 2 * (draw() < 0.2))
        events: list[contracts.Event] = []
        try:
            if is_stream:
                shown: Any = dict.fromkeys(("progress", "text_deltas", "texts"), shows_text)
                stream = client.stream(prompt, **sent, **shown, **options)
                async with aclosing(stream):
                    async for event in stream:
                        events.append(event)
                        await asyncio.sleep(int(draw() * 1.1) / 10)  # at times it reads slowly
                generation = _checked(events)
            else:
                generation = await client.generate(prompt, **sent, **options)
            left_s = began_s + deadline_s - self.loop.time()
            self._check(prompt, options, tenant, generation, left_s)
            outcome = "CACHED" if generation.cached else "RUN"
            self._note(generation.best.text)
        except (SpecrejError, asyncio.CancelledError) as error:
            outcome, took_s = type(error).__name__, self.loop.time() - began_s
            is_stuck = took_s > 0.3 * DEADLINE_S and bool(faults & {"crash", "stall"})
            may_fail = {
                "Cancelled": task.cancelling(),
                "CancelledError": task.cancelling(),
                "DeadlineExceeded": is_stuck or deadline_s < DEADLINE_S,
                "InvalidRequest": self._slots < 100,
                "Overloaded": True,
                "RewardInvalid": "reward" in faults,
                "Unavailable": bool(faults & {"crash", "upgrade", "refuse", "stall", "reward"})
                and not self._has_other(error),
            }
            if not may_fail.get(outcome):
                self.loop.fail(f"a request fails after {took_s:.3f} s: {error!r}")
        except Exception as error:
            outcome = type(error).__name__
            self.loop.fail(error if isinstance(error, Violation) else repr(error))
        if self.loop.time() > began_s + deadline_s + _LATE_S:
            self.loop.fail(f"a request ends late: {outcome}")
        self.outcomes[outcome] += 1
        self._note(f"{tenant} {outcome}")

    def _has_other(self, error: BaseException) -> bool:
        """Whether another generator must have answered: one has crashed, all else has worked."""
        broken = [node for node in self.generators if node.had_faults]
        is_crash = len(broken) == 1 < len(self.generators) and broken[0].had_faults <= {
            "down",
            "refuse",
        }
        is_full = "no other one could answer" in str(error)
        return is_crash and not is_full and not any(node.had_faults for node in self.rewards)

    def _check(
        self, prompt: str, options: Any, tenant: str, generation: Generation, left_s: float
    ) -> None:
        """The answer may be given to this request, `left_s` before its deadline, with its texts."""
        is_reduced = generation.reduced and options["n"] > 0  # a wave found no room
        is_weak = generation.degraded or generation.hurried or is_reduced
        if generation.cached:
            # Requests of a flight have the same `allow_degraded`, and weak answers are not stored.
            is_late = left_s <= generation.timings.total_ms / 1e3 + _LATE_S
            only_reward = {*generation.degradations} == {contracts.Degradation.REWARD}
            is_lent = (options["allow_degraded"] or not generation.degraded) and (
                is_late or (only_reward and not generation.hurried)
            )
            if options["cache"] is not CacheControl.USE or (is_weak and not is_lent):
                raise Violation(f"an answer of another request for {options['cache']}")
        if generation.hurried and left_s > DEADLINE_S / 2 and "stall" not in self.faults:
            raise Violation(f"an answer is hurried {left_s:.1f} s before the deadline")
        _check_texts(prompt, options, tenant, generation)
        _check_rounds(options, generation, is_weak=is_weak)
        is_full = any(t.ended_by is contracts.RoundEnd.SLOTS_FULL for t in generation.rounds)
        if options["n"] and not (is_weak or is_full):
            searched = {name: options[name] for name in options if name not in _NOT_SEARCHED}
            key = tenant, prompt, repr(searched), generation.generator_fingerprint
            value = generation.best.text, generation.best.score
            if value != (known := self._answers.setdefault(key, value)):
                raise Violation(f"equal requests, but the answers {known} and {value}")


def _check_texts(prompt: str, options: Any, tenant: str, generation: Generation) -> None:
    """Candidates are in their order, and have the texts that the toy draws for them."""
    length, is_preferred = contracts.FinishReason.LENGTH, options["prefer_complete"]
    ranking = [
        (c.vetoed, is_preferred and c.finish is length, -c.score, c.id)
        for c in generation.candidates
    ]
    if ranking != sorted(ranking) or len(ranking) > options["return_candidates"]:
        raise Violation(f"not in order: {ranking}")
    parents = {fork.id: fork for trace in generation.rounds for fork in trace.forks}
    starts = {fork.id: trace.decision_token for trace in generation.rounds for fork in trace.forks}
    sampling = contracts.Sampling(max_tokens=options["max_tokens"], seed=options["seed"])
    user = contracts.Prompt.from_user(prompt)
    salt, version = (
        tenant_digest(tenant),
        int(generation.generator_fingerprint.removeprefix("toy-")),
    )

    def words_of(number: int) -> list[str]:
        """The words that a candidate draws if it does not end."""
        endless = replace(sampling, ignore_eos=True)
        spec = contracts.SessionSpec(user, number + 1, endless, 1, salt)
        own = _alone(spec, version).text.split()
        if number not in parents:
            return own
        at = starts[number]
        return words_of(parents[number].parent_id)[:at] + own[at:]

    for ranked in generation.candidates:
        words, is_cut = ranked.text.split(), ranked.finish is contracts.FinishReason.LENGTH
        if words != words_of(ranked.id)[: ranked.num_tokens]:
            raise Violation(f"the text of another request: {ranked.text}")
        if ranked.id not in parents and not is_cut:
            spec = contracts.SessionSpec(user, ranked.id + 1, sampling, 1, salt)
            if _alone(spec, version).num_tokens != len(words):
                raise Violation(f"the end of another version: {ranked.text}")


def _check_rounds(options: Any, generation: Generation, *, is_weak: bool) -> None:
    """Tokens add up, all candidates end, and rounds end and cut as Algorithm 1 does."""
    rounds, num_tokens = generation.rounds, generation.usage.generated_tokens
    traced = sum(trace.generated_tokens for trace in rounds)
    if num_tokens < traced or (num_tokens > traced and not is_weak):  # a round was interrupted
        raise Violation(f"{num_tokens} tokens are reported, {traced} in rounds")
    if rounds[-1].num_live and not (is_weak or generation.stopped_by):
        raise Violation(f"the run ended with {rounds[-1].num_live} live candidates")
    if is_weak or "branching" in options or "waves" in options:
        return
    alpha, planned = options["alpha"], [options["schedule"].first * 2**at for at in range(4)]
    if options["algorithm"] is contracts.Algorithm.BEST_OF_N:
        alpha, planned = 0.0, []
    vetoes = [reward.veto_below for reward in options["rewards"] if reward.veto_below]
    # All rewards of the toys are equal.
    least_score = len(options["rewards"]) * max(vetoes, default=0.0)
    ranked: dict[int, float] = {}
    for trace in rounds:
        ranked |= {one.id: one.score for one in trace.candidates}
        live = {one.id for one in trace.candidates if one.fate is not contracts.Fate.FINISHED}
        if trace.ended_by is contracts.RoundEnd.SLOTS_FULL or not live:
            return
        if trace.alpha != alpha or trace.decision_token not in (*planned, options["max_tokens"]):
            raise Violation(f"not of the plan: {trace.alpha} at {trace.decision_token}")
        ranking = sorted(ranked, key=lambda one: (ranked[one] < least_score, -ranked[one], one))
        most = max(options["min_answers"], round((1 - Fraction(str(alpha))) * len(ranked)))
        ranked = {one: ranked[one] for one in ranking[:most] if ranked[one] >= least_score}
        if not ranked:
            return  # all are vetoed
        kept = {one.id for one in trace.candidates if one.fate is contracts.Fate.KEPT}
        if kept != ranked.keys() & live:
            raise Violation(f"round {trace.number} keeps {kept}, not {ranked}")


def _checked(events: Sequence[contracts.Event]) -> Generation:
    """The answer of a stream. Raises Violation: its events are not those of one request."""
    *earlier, last = events
    begins = [at for at, event in enumerate(events) if isinstance(event, contracts.Admitted)]
    if not isinstance(last, contracts.Finished):
        raise Violation("the answer is not the last event")
    generation = last.generation
    # A request that has lost its generator is admitted again, and its rounds begin again.
    answering = earlier[max(begins, default=0) :]
    rounds = [event.trace for event in answering if isinstance(event, contracts.RoundCompleted)]
    if generation.cached:
        return generation
    if begins[:1] != [0] or {cast(Any, events[at]).n for at in begins} != {generation.n}:
        raise Violation(f"admitted as events {begins}, or with another n")
    if tuple(rounds) != generation.rounds:
        raise Violation("the streamed rounds are not those of the answer")
    for one, other in pairwise(rounds):
        num_live = one.num_live if one.wave == other.wave else other.num_started
        if (one.number + 1, num_live) != (other.number, other.num_started):
            raise Violation(f"round {other.number} does not follow round {one.number}")
    text = "".join(event.text for event in earlier if isinstance(event, contracts.TextDelta))
    if text and text != generation.best.text:
        raise Violation(f"streamed {text!r}, but the answer is {generation.best.text!r}")
    return generation


@cache
def _alone(spec: contracts.SessionSpec, end_every: int) -> contracts.Candidate:
    """The last candidate, as the toy makes it alone and without cuts."""

    async def grown() -> Any:
        async with ToyGenerator(end_every=end_every).open(nodes.seeded(spec, end_every)) as session:
            await session.prune([spec.n - 1])
            return (await session.extend(spec.sampling.max_tokens)).candidates[0]

    coroutine = grown()
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(contracts.Candidate, done.value)
    raise Violation("the toy waits")
