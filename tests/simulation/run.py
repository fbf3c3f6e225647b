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
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import replace
from functools import cache, partial
from itertools import count, pairwise
from typing import Any, cast
from unittest import mock

from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Fleet, FleetSettings
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.rewards import FleetRewards
from orchestrator.cache import Cache, RedisClient, tenant_digest
from orchestrator.cache import redis_client as redis_py
from orchestrator.edge import service
from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from orchestrator.loop.run import run
from orchestrator.observe.requests import RequestRecords
from specrej import Client, Retries, contracts
from specrej.client import client as client_module
from specrej.contracts import CacheControl, Generation, Options
from specrej.contracts.errors import SpecrejError
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.security import TENANT_METADATA
from tests.simulation import nodes
from tests.simulation.loop import EPOCH_S, Violation, VirtualLoop, note_change
from tests.simulation.wire import Channel, Server

DEADLINE_S = 30.0
_LATE_S = 1.5  # a call to Redis and the end of a session may follow the deadline
_SETTLED_S = 12.0  # then every lease has expired
_MOST_IDLE = 700  # entries of all containers of an idle orchestrator, of which 64 per backend
_CONTROLS = [CacheControl.USE] * 14 + [CacheControl.BYPASS, CacheControl.REFRESH]
_NOT_SEARCHED = ("cache", "allow_degraded")


class WatchedAdmission(Admission):
    """The product's admission; every permit is checked for the limit and for fair turns."""

    def __init__(self, limits: Limits, clock: Any) -> None:
        super().__init__(limits, clock)
        self.__most, self.__largest = limits.max_running, 0
        self.__waiting: Counter[str] = Counter()
        self.__debt: Counter[str] = Counter()  # granted to others since the tenant's last turn

    @asynccontextmanager
    async def enter(self, tenant: str = "", tokens: int = 1, *others: Any) -> AsyncIterator[None]:
        waiting, debt = self.__waiting, self.__debt
        debt[tenant] *= waiting[tenant] > 0
        waiting[tenant] += 1
        self.__largest = max(self.__largest, tokens)
        is_held = False
        note_change(self)
        try:
            async with super().enter(tenant, tokens, *others):
                is_held = True
                waiting[tenant] -= 1
                debt[tenant] = 0
                debt.update({t: tokens for t, num in waiting.items() if num and t != tenant})
                if max(debt.values()) > self.__largest * (2 * len(debt) - 2 + self.__most):
                    raise Violation(f"turns are not fair: {debt}")
                yield
        finally:
            waiting[tenant] -= not is_held
            note_change(self)

    def check(self) -> None:
        """The limits hold, and no request waits beside a free permit."""
        if self.running > self.__most or (self.running < self.__most and self.queued):
            raise Violation(f"{self.running} requests run of {self.__most}, {self.queued} wait")


class Process:
    """One orchestrator."""

    def __init__(self, run: Simulation, limits: Limits, **cache_options: Any) -> None:
        loop, draw = run.loop, run.rng.random
        self.link = nodes.Link(run.redis)
        self.generators = _fleet(
            run.generators, RemoteGenerator, lambda described: described.fingerprint
        )
        self.rewards = _fleet(run.rewards, RemoteRewards, len)
        with mock.patch.object(redis_py, "connect", lambda *_: self.link):
            redis = RedisClient("redis://simulated")
        cached = Cache(redis, **cache_options)
        self.admission = WatchedAdmission(limits, loop.time)
        self.orchestrator = Orchestrator(
            FleetGenerator(self.generators, draw),
            FleetRewards(self.rewards, draw),
            cached,
            self.admission,
            records=RequestRecords(4, clock=loop.time),
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
    is_container = isinstance(one, dict | list | tuple | set | deque)
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
        self._tenants = "abcde"[: rng.randint(1, 5)]
        self.generators = [
            nodes.GeneratorNode(rng, f"g{n}", self._slots) for n in range(rng.randint(1, 3))
        ]
        self.rewards = [nodes.RewardNode(rng, f"r{n}") for n in range(rng.randint(1, 2))]
        self.redis = nodes.SimulatedRedis(rng)
        most = rng.choice((1, 2, 4, 8)), rng.choice((0, 8, 64))
        limits = Limits(*most)
        ages = {"ttl_s": rng.choice((1.0, 5.0, 60.0))}
        self._processes = [Process(self, limits, **ages) for _ in range(rng.randint(1, 3))]
        served: list[nodes.Node] = [*self.generators, *self.rewards]
        links = [one.link for one in self._processes]
        self._places: dict[str, tuple[Any, list[str]]] = {  # by kind: where, and the faults
            "crash": (served, ["down"]),
            "upgrade": (self.generators, ["upgrade"]),
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
                mock.patch.object(service, "run", partial(run, clock=clock)),
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
            held = process.admission.running + process.admission.queued
            size = _num_kept(process.orchestrator, set())
            if held or size > _MOST_IDLE:
                raise Violation(f"idle, but {held} permits are held and {size} entries are kept")
        if num_open := sum(node.num_open() for node in (*self.generators, *self.rewards)):
            raise Violation(f"{num_open} sessions were never closed")

    async def _break(self, targets: Sequence[Any], names: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1.0))
            target = self.rng.choice(targets)
            fault = self.rng.choice(names)
            target.set_fault(fault)
            self._note(fault)
            try:
                await asyncio.sleep(self.rng.choice((0.01, 0.01, 0.3, 2.0, 6.0)))
            finally:
                target.set_fault("")

    async def _send_all(self) -> None:
        """Requests in bursts, which may be equal; a flood is of one tenant at one orchestrator."""
        rng, num_left = self.rng, self._num_requests
        while num_left:
            await asyncio.sleep(int(rng.expovariate(self._per_s / 4) * 1e3) / 1e3)
            size = min(num_left, 40 if rng.random() < 0.05 else rng.randint(1, 6))
            num_left -= size
            caller = rng.choice(self._tenants), rng.choice(self._processes)
            equal = self._draw_request() if rng.random() < 0.5 else None
            for _ in range(size):
                if size < 10:
                    caller = rng.choice(self._tenants), rng.choice(self._processes)
                client = self._client(equal or self._draw_request(), *caller)
                self._clients.add(asyncio.ensure_future(client))

    def _draw_request(self) -> tuple[str, Options]:
        draw = self.rng.random
        is_hot = draw() < 0.5
        options = Options(
            seed=int(draw() * 4) if is_hot else next(self._new_seeds),
            max_tokens=(4, 8, 12)[int(draw() * 3)],
            n=4 if is_hot else int(draw() * 6),
            algorithm=[*contracts.Algorithm][draw() < 0.1],
            schedule=contracts.Schedule(first=4 if is_hot else 2),
            rewards=dict.fromkeys(nodes.REWARDS[: 1 + (draw() < 0.1)], 1.0),
            cache=_CONTROLS[int(draw() * len(_CONTROLS))],
            allow_degraded=draw() < 0.2,
            prefer_complete=draw() < 0.5,
            return_candidates=1 + int(draw() * 3),
        )
        if draw() < 0.2 and options["algorithm"] is not contracts.Algorithm.BEST_OF_N:
            options["branching"] = contracts.Branching(width=4, keep=2)
            options["n"] = 4
        return ("one", "one two", "one two three", "four")[int(draw() * 4)], options

    async def _client(self, request: Any, tenant: str, process: Process) -> None:
        draw, faults, began_s = self.rng.random, {*self.faults}, self.loop.time()
        cancels_s = draw() ** 2 / 5 if "cancel" in faults and draw() < 0.1 else None
        deadline_s = draw() / 2 if "deadline" in faults and draw() < 0.1 else DEADLINE_S
        is_stream, shows_text = draw() < 0.6, draw() < 0.5
        if cancels_s is not None:
            self.loop.call_later(cancels_s, cast(Any, asyncio.current_task()).cancel)
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
                "Cancelled": cancels_s is not None,
                "CancelledError": cancels_s is not None,
                "DeadlineExceeded": is_stuck or deadline_s < DEADLINE_S,
                "InvalidRequest": self._slots < 100,
                "SlotsExceeded": self._slots < 100,
                "Overloaded": True,
                "RewardInvalid": "reward" in faults,
                "Unavailable": bool(faults & {"crash", "upgrade", "stall", "reward"}),
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

    def _check(
        self, prompt: str, options: Any, tenant: str, generation: Generation, left_s: float
    ) -> None:
        """The answer may be given to this request, `left_s` before its deadline, with its texts."""
        is_weak = generation.degraded or generation.hurried
        if generation.cached:
            # Requests of a flight have the same `allow_degraded`, and weak answers are not stored.
            is_late = left_s <= generation.timings.total_ms / 1e3 + _LATE_S
            only_reward = {*generation.degradations} == {contracts.Degradation.REWARD}
            is_lent = (options["allow_degraded"] or not generation.degraded) and (
                is_late or (only_reward and not generation.hurried)
            )
            if options["cache"] is not CacheControl.USE or (is_weak and not is_lent):
                raise Violation(f"an answer of another request for {options['cache']}")
        _check_texts(prompt, options, tenant, generation)
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
    ranking = [(is_preferred and c.finish is length, -c.score, c.id) for c in generation.candidates]
    if ranking != sorted(ranking) or len(ranking) > options["return_candidates"]:
        raise Violation(f"not in order: {ranking}")
    parents = {fork.id: fork for trace in generation.rounds for fork in trace.forks}
    starts = {fork.id: trace.decision_token for trace in generation.rounds for fork in trace.forks}
    sampling = contracts.Sampling(max_tokens=options["max_tokens"], seed=options["seed"])
    user = contracts.Prompt.from_user(prompt)
    salt = tenant_digest(tenant)

    def words_of(number: int) -> list[str]:
        """The words that a candidate draws if it does not end."""
        endless = replace(sampling, ignore_eos=True)
        spec = contracts.SessionSpec(user, number + 1, endless, 1, salt)
        own = _alone(spec, 40).text.split()
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
            version = generation.generator_fingerprint.removeprefix("toy-")
            if _alone(spec, int(version)).num_tokens != len(words):
                raise Violation(f"the end of another version: {ranked.text}")


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
        if (one.number + 1, one.num_live) != (other.number, other.num_started):
            raise Violation(f"round {other.number} does not follow round {one.number}")
    text = "".join(event.text for event in earlier if isinstance(event, contracts.TextDelta))
    if text and text != generation.best.text:
        raise Violation(f"streamed {text!r}, but the answer is {generation.best.text!r}")
    return generation


@cache
def _alone(spec: contracts.SessionSpec, end_every: int) -> contracts.Candidate:
    """The last candidate, as the toy makes it alone and without cuts."""

    async def grown() -> Any:
        async with ToyGenerator(end_every=end_every).open(nodes.seeded(spec)) as session:
            await session.prune([spec.n - 1])
            return (await session.extend(spec.sampling.max_tokens)).candidates[0]

    coroutine = grown()
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(contracts.Candidate, done.value)
    raise Violation("the toy waits")
