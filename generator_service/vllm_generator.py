"""A `Generator` on vLLM: sessions, rounds and slots over candidates that write, pause and write on.

vLLM schedules; this file decides how far every candidate may write, so that what sessions hold
never exceeds what there is and vLLM never has to take anything back. Slots are counted in whole
blocks, as vLLM stores them: the blocks of a prompt that all candidates share once, what each has by
itself rounded up. So a session's share may be full a little earlier than the own engine's.

Draws are the own engine's, keyed by (seed, candidate, step): where rounds end, who was cut and who
else is there changes no token, and for equal logits both engines say the same. Logits differ in
their last bits, also within vLLM with the size of a batch; a token changes only if a draw falls
into that gap. Knows no wire; imports vLLM only when it is to be loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from generator_service.local import ModelCard
from generator_service.settings import GeneratorSettings
from generator_service.steps import Load, OnStep
from generator_service.text import Text
from inference.slots import SlotLedger
from specrej import fingerprint
from specrej.contracts import (
    Candidate,
    FinishReason,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    RoundEnd,
    Sampling,
    SlotGauge,
)
from specrej.errors import InvalidRequest, OutOfOrder, Overloaded, SessionExpired, Violation


class Token(Protocol):
    """One token, and its log-probability at temperature 1 over the whole distribution."""

    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float: ...


class Writer(Protocol):
    """One candidate's request."""

    def write(self, count: int) -> AsyncGenerator[Token, None]:
        """At most `count` more tokens, fewer if one of them ends the text; then it waits."""


class Engine(Protocol):
    """What is needed of `generator_service.vllm_engine.VLLMEngine`."""

    block_tokens: int
    capacity_slots: int
    max_rows: int
    eos_ids: frozenset[int]

    def writer(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        candidate: int,
        *,
        salt: str = "",
        watched: bool = False,
    ) -> Writer: ...
    async def abort(self, writers: Sequence[Any]) -> None: ...
    def growing(self, *, more: int) -> None: ...
    def heartbeat_s(self) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a prompt's candidates hold, in slots of whole blocks of `size` tokens."""

    size: int
    prompt_tokens: int

    @property
    def shared(self) -> int:
        """Held once: vLLM computes a prompt's last token anew, whatever it finds."""
        return (self.prompt_tokens - 1) // self.size * self.size

    def own(self, tokens: int) -> int:
        """Of a candidate of so many new tokens, the newest of which is not stored yet."""
        if not tokens:
            return 0
        stored = self.prompt_tokens - self.shared + tokens - 1
        return -(-stored // self.size) * self.size

    def reach(self, room: int) -> int:
        """The most new tokens for which `own` is at most `room`."""
        stored = room // self.size * self.size
        return max(0, stored - (self.prompt_tokens - self.shared) + 1) if stored else 0


@dataclass(eq=False, slots=True)
class _Growing:
    """A candidate on its way."""

    id: int
    writer: Writer
    token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)  # since the last report
    logprob: float = 0.0
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a session is opened with."""

    prompt_ids: Sequence[int]
    n: int
    sampling: Sampling
    first_round_tokens: int
    cache_salt: str
    first_candidate: int
    blocks: Blocks
    stops: Callable[[Sequence[int]], bool] | None

    def floor(self, n: int) -> int:
        """The least useful share: a first round for all, or the whole answer for one."""
        return max(n * self.blocks.own(self.first), self.blocks.own(self.sampling.max_tokens))

    @property
    def first(self) -> int:
        """Tokens of the first round."""
        return max(1, min(self.first_round_tokens, self.sampling.max_tokens))

    def whole(self, n: int) -> int:
        """What `n` candidates can ever need."""
        return n * self.blocks.own(self.sampling.max_tokens)

    def finish_of(self, token_ids: Sequence[int], eos_ids: frozenset[int]) -> FinishReason | None:
        """Whether a candidate's newest token has ended it."""
        sampling = self.sampling
        if not sampling.ignore_eos and token_ids[-1] in eos_ids:
            return FinishReason.STOP
        if self.stops and len(token_ids) >= sampling.min_tokens and self.stops(token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= sampling.max_tokens else None


class VLLMSession:
    """A `Session` on vLLM; one call at a time."""

    def __init__(self, generator: VLLMGenerator, session_id: int, plan: _Plan) -> None:
        self.id = session_id
        self.plan = plan
        self.n = 0
        self.prompt_tokens = len(plan.prompt_ids)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.live: list[_Growing] = []
        self.num_tokens = 0  # of every live candidate
        self._generator = generator
        self._is_busy = False
        self._is_closed = False

    async def extend(self, until_tokens: int) -> Round:
        """As the contract says; a failure, or being cancelled, ends the session."""
        reported = list(self.live)
        self._enter()
        try:
            ended_by = await self._grow(min(until_tokens, self.plan.sampling.max_tokens))
        except BaseException:
            self._is_closed = True
            raise
        finally:
            self._is_busy = False
        gauge = self._generator.gauge(self)
        candidates = await asyncio.to_thread(self._report, reported)
        return Round(candidates, ended_by, self.num_tokens, gauge)

    async def prune(self, keep: Collection[int]) -> Pruned:
        self._enter()
        try:
            cut = [candidate for candidate in self.live if candidate.id not in keep]
            self.live = [candidate for candidate in self.live if candidate.id in keep]
            freed = await self._generator.free(self, cut)
            self._generator.narrow(self)
        finally:
            self._is_busy = False
        return Pruned(freed, self._generator.gauge(self))

    async def close(self) -> None:
        """Free everything."""
        self._is_closed = True
        live, self.live = self.live, []
        await self._generator.leave(self, live)

    async def _grow(self, until: int) -> RoundEnd:
        while self.live and self.num_tokens < until:
            reach = min(until, self._generator.reach(self))
            if reach <= self.num_tokens:
                return RoundEnd.SLOTS_FULL
            await self._write(reach)
        return RoundEnd.DECISION_TOKEN if self.live else RoundEnd.ALL_FINISHED

    async def _write(self, until: int) -> None:
        """All live candidates to `until` tokens, for which there is room."""
        self._generator.take(self, until)
        count, before = until - self.num_tokens, self.num_tokens
        writing = list(self.live)
        self._generator.engine.growing(more=len(writing))
        try:
            async with asyncio.TaskGroup() as group:
                for candidate in writing:
                    group.create_task(self._follow(candidate, count))
        except ExceptionGroup as group_of_errors:
            raise group_of_errors.exceptions[0] from None
        finally:
            self._generator.engine.growing(more=-len(writing))
        self.live = [candidate for candidate in writing if candidate.finish is None]
        longest = max(len(candidate.token_ids) for candidate in writing)
        self.num_tokens = until if self.live else max(before, longest)
        self._generator.give_back(self, len(writing) - len(self.live), until)

    async def _follow(self, candidate: _Growing, count: int) -> None:
        """Take in what a candidate writes, and let go of it once it has finished."""
        engine = self._generator.engine
        async with aclosing(candidate.writer.write(count)) as tokens:
            async for token in tokens:
                candidate.token_ids.append(token.id)
                candidate.new_logprobs.append(token.logprob)
                candidate.logprob += token.logprob
                # A few microseconds, so it may be done here: a stop text is looked for in the tail.
                candidate.finish = self.plan.finish_of(candidate.token_ids, engine.eos_ids)
                if candidate.finish:
                    break
        if candidate.finish:
            await engine.abort([candidate.writer])

    def _enter(self) -> None:
        if self._is_closed:
            raise SessionExpired("the session is closed")
        if self._is_busy:
            raise OutOfOrder("the session's round is still running")
        self._is_busy = True

    def _report(self, candidates: Sequence[_Growing]) -> tuple[Candidate, ...]:
        return tuple(self._candidate(candidate) for candidate in candidates)

    def _candidate(self, candidate: _Growing) -> Candidate:
        sampling = self.plan.sampling
        new, candidate.new_logprobs = tuple(candidate.new_logprobs), []
        ids = tuple(candidate.token_ids)
        return Candidate(
            id=candidate.id,
            text=self._generator.text.answer(ids, sampling.stop, sampling.min_tokens),
            num_tokens=len(ids),
            logprob=candidate.logprob,
            finish=candidate.finish,
            new_token_ids=ids[len(ids) - len(new) :],
            new_logprobs=new if sampling.logprobs else (),
        )


class VLLMGenerator:
    """A `Generator` on a vLLM engine; its calls belong to one event loop."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        card: ModelCard,
        *,
        max_waiting: int = 64,
        auto_candidates: int = 64,
    ) -> None:
        self.engine = engine
        self.text = text
        self.ledger = SlotLedger(engine.capacity_slots)
        self._card = card
        self._max_waiting = max_waiting
        self._auto_candidates = min(auto_candidates, engine.max_rows)
        self._ids = itertools.count(1)
        self._sessions: dict[int, VLLMSession] = {}
        self._waiting: deque[VLLMSession] = deque()

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[VLLMSession]:
        prompt_ids = await asyncio.to_thread(self.text.encode, prompt)
        self._card.check_context(len(prompt_ids), sampling.max_tokens)
        plan = _Plan(
            prompt_ids,
            n,
            sampling,
            first_round_tokens,
            cache_salt,
            first_candidate,
            Blocks(self.engine.block_tokens, len(prompt_ids)),
            self.text.stops(sampling.stop),
        )
        self._check_room(plan)
        session = VLLMSession(self, next(self._ids), plan)
        try:
            self._queue(session)
            await session.admitted
            yield session
        finally:
            await session.close()

    async def describe(self) -> GeneratorDescription:
        return self._card.description(self.load())

    async def warm_up(self) -> None:
        """A few tokens, so that the first request does not pay for first-time work."""
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        async with self.open(Prompt(text="Hello"), 2, sampling, 1) as session:
            await session.extend(1)
            await session.extend(3)

    def load(self) -> Load:
        """Slots and sessions as of now."""
        ledger = self.ledger
        gauge = SlotGauge(ledger.capacity, ledger.owned, 0)
        return Load(gauge, len(self._sessions), len(self._waiting))

    def heartbeat_s(self) -> float:
        """As `VLLMEngine.heartbeat_s`."""
        return self.engine.heartbeat_s()

    def close(self) -> None:
        """End vLLM's processes."""
        self.engine.close()

    # For sessions

    def gauge(self, session: VLLMSession) -> SlotGauge:
        ledger = self.ledger
        own = session.plan.blocks.shared + ledger.owned_by(session.id)
        return SlotGauge(ledger.capacity, ledger.owned, own)

    def reach(self, session: VLLMSession) -> int:
        """The tokens up to which there is room for all live candidates."""
        live, blocks = len(session.live), session.plan.blocks
        self.ledger.widen(session.id, session.plan.whole(live), len(self._waiting))
        return blocks.reach(self.ledger.share_of(session.id) // live)

    def take(self, session: VLLMSession, until: int) -> None:
        """Room for all live candidates to `until` tokens, as `reach` has allowed."""
        blocks = session.plan.blocks
        more = blocks.own(until) - blocks.own(session.num_tokens)
        self.ledger.take(session.id, len(session.live) * more)

    def give_back(self, session: VLLMSession, num_finished: int, tokens: int) -> None:
        """What finished candidates held, for which `tokens` were planned."""
        self.ledger.give_back(session.id, num_finished * session.plan.blocks.own(tokens))

    async def free(self, session: VLLMSession, cut: Sequence[_Growing]) -> int:
        """The slots of rejected candidates, once vLLM knows."""
        await self.engine.abort([candidate.writer for candidate in cut])
        freed = len(cut) * session.plan.blocks.own(session.num_tokens)
        self.ledger.give_back(session.id, freed)
        return freed

    def narrow(self, session: VLLMSession) -> None:
        """Pass on what the session can no longer need, and its surplus if others wait."""
        live, plan = len(session.live), session.plan
        ahead = min(session.num_tokens + plan.first_round_tokens, plan.sampling.max_tokens)
        floor = max(plan.whole(min(live, 1)), live * plan.blocks.own(ahead))
        self.ledger.narrow(session.id, floor, plan.whole(live), len(self._waiting))
        self._admit_waiting()

    async def leave(self, session: VLLMSession, live: Sequence[_Growing]) -> None:
        """All that a session has, admitted or not."""
        if session in self._waiting:
            self._waiting.remove(session)
        try:
            await asyncio.shield(self.engine.abort([candidate.writer for candidate in live]))
        finally:
            if self._sessions.pop(session.id, None):
                self.ledger.close(session.id)
                self.ledger.retire(session.plan.blocks.shared)
                # Found again by vLLM for as long as nothing else needs it, which is its affair.
                self.ledger.forget(session.plan.blocks.shared)
            self._admit_waiting()

    # Admission

    def _check_room(self, plan: _Plan) -> None:
        """Raises InvalidRequest: it can never fit; SLOTS_EXCEEDED, if that is for want of slots."""
        if plan.n > self.engine.max_rows:
            limit = f"must be at most {self.engine.max_rows}, is {plan.n}"
            raise InvalidRequest([Violation("n", limit)])
        capacity, blocks = self.ledger.capacity, plan.blocks
        needed = blocks.shared + plan.floor(max(1, plan.n))
        if needed <= capacity:
            return
        room = capacity - blocks.shared
        most = room // blocks.own(plan.first) if room >= plan.floor(1) else 0
        raise InvalidRequest(
            [Violation("n", f"needs {needed} KV slots, capacity is {capacity}")],
            reason="SLOTS_EXCEEDED",
            metadata={
                "needed": str(needed),
                "capacity": str(capacity),
                "candidates": str(min(most, self.engine.max_rows)),
            },
        )

    def _queue(self, session: VLLMSession) -> None:
        """Raises Overloaded: too many wait already."""
        self._waiting.append(session)
        self._admit_waiting()
        if session in self._waiting and len(self._waiting) > self._max_waiting:
            self._waiting.remove(session)
            raise Overloaded(f"{self._max_waiting} sessions wait for slots already")

    def _admit_waiting(self) -> None:
        """First come, first served: nobody overtakes, so nobody starves."""
        while self._waiting and self._fits(self._waiting[0].plan):
            session = self._waiting.popleft()
            if not session.admitted.done():  # its caller may be gone
                self._admit(session)

    def _fits(self, plan: _Plan) -> bool:
        n = max(1, plan.n)
        return n <= self._free_rows and self.ledger.can_admit(plan.blocks.shared + plan.floor(n))

    @property
    def _free_rows(self) -> int:
        """Requests that vLLM takes more; those that wait between two rounds count."""
        return self.engine.max_rows - sum(len(each.live) for each in self._sessions.values())

    def _admit(self, session: VLLMSession) -> None:
        plan = session.plan
        n = plan.n or self._choose_n(plan)
        self.ledger.hold(plan.blocks.shared)
        self.ledger.admit(session.id, plan.floor(n), plan.whole(n), len(self._waiting))
        self._sessions[session.id] = session
        watched = plan.stops is not None
        session.n = n
        session.live = [
            _Growing(
                number,
                self.engine.writer(
                    plan.prompt_ids,
                    plan.sampling,
                    number,
                    salt=plan.cache_salt,
                    watched=watched,
                ),
            )
            for number in range(plan.first_candidate, plan.first_candidate + n)
        ]
        session.admitted.set_result(None)

    def _choose_n(self, plan: _Plan) -> int:
        """As many candidates as the free slots take to the end of the first round."""
        room = self.ledger.unshared - plan.blocks.shared
        most = min(self._auto_candidates, self._free_rows)
        return max(1, min(most, room // plan.blocks.own(plan.first)))


def load_vllm(settings: GeneratorSettings, on_step: OnStep | None = None) -> VLLMGenerator:
    """A generator on a vLLM that is started for it; takes a minute."""
    _prepare_environment(settings)
    # Here, as vLLM has an environment of its own, and reads the variables when it is imported.
    from generator_service.vllm_engine import VERSION, VLLMEngine

    directory = settings.model_directory
    engine = VLLMEngine.load(settings, on_step)
    shape = engine.shape
    card = ModelCard(
        name=directory.resolve().name,
        fingerprint=fingerprint_of(settings, shape.dtype, VERSION),
        context_tokens=shape.context_tokens,
        max_candidates=engine.max_rows,
        vocabulary=shape.vocabulary,
        slot_bytes=shape.slot_bytes,
        device=f"vllm {engine.device} {shape.dtype}",
    )
    return VLLMGenerator(
        engine,
        Text.load(directory, shape.eos_ids),
        card,
        max_waiting=settings.max_waiting,
        auto_candidates=min(settings.auto_candidates, settings.max_candidates),
    )


def fingerprint_of(settings: GeneratorSettings, dtype: str, version: str) -> str:
    """Of the weights and whatever else changes a token, such as how options have them quantised."""
    told: dict[str, object] = {"dtype": dtype, "engine": f"vllm {version}"}
    if settings.vllm_options:
        told["options"] = settings.vllm_options
    return fingerprint.of_directory(settings.model_directory, told)


def _prepare_environment(settings: GeneratorSettings) -> None:
    """What vLLM is told by variables only; whoever has set them already knows better."""
    told = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the service's own logging is there
        # Its draws are replaced by way of an interface that the second runner does not have.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # On a CPU, one worker lives in the scheduler's process, which would spin on a core of its
        # own while it waits for another's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # What this version stores of compiled code it cannot load again.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
    }
    if settings.threads:
        told["OMP_NUM_THREADS"] = str(settings.threads)
    for name, value in told.items():
        os.environ.setdefault(name, value)
