"""A `Generator` on vLLM: sessions, rounds and slots over requests that pause between rounds.

vLLM schedules; this file decides how far each candidate may grow, so that sessions never hold more
than there is and vLLM never has to preempt a request. Slots are counted in whole blocks, as vLLM
stores them: the blocks of a prompt that all candidates share once, each candidate's own rounded up.
So a session's share may be full a little earlier than in the own engine.

Draws are the own engine's, keyed by (seed, candidate, step): they depend neither on where rounds
end nor on other candidates, and for equal logits both engines draw equal tokens. Logits differ in
their last bits, also within vLLM with the size of a batch; a token changes only if a draw falls
into that gap. Independent of the transport; imports vLLM only to load it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

from generator_service.admission import AdmissionQueue, Blocks
from generator_service.engine.commands import (
    GrowingCandidate,
    Load,
    OnStep,
    OpenCommand,
    PrefixBatch,
    ReportRate,
)
from generator_service.engine.generator import Frontend
from generator_service.engine.text import Text
from generator_service.settings import GeneratorSettings
from specrej import fingerprint
from specrej.contracts import (
    NO_FORKS,
    Forks,
    GeneratorDescription,
    Pruned,
    Report,
    Round,
    RoundEnd,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import OutOfOrder, SessionExpired
from specrej_models.probe import check_tensors, examine
from specrej_models.slots import SlotLedger
from specrej_models.vllm_options import prepare_environment

if TYPE_CHECKING:
    from generator_service.stock.vllm_engine import CandidateRequest, VLLMEngine

# Tokens of a stride, of which a round with reports has several; with many candidates a stride has a
# token per this many of them, since every stride ends and begins all requests.
_STRIDE_TOKENS, _ROWS_PER_TOKEN = 4, 16
# Engine arguments that name the nodes of one generator, and change no token.
_OF_NODES = ("node_rank", "master_addr", "master_port")


class VLLMSession:
    """A `Session` on vLLM; one call at a time."""

    def __init__(self, generator: VLLMGenerator, session_id: int, command: OpenCommand) -> None:
        self.id = session_id
        self.command = command
        self.n = 0
        self.reduced = False
        self.fingerprint = ""  # the servicer has the generator's
        self.prompt_tokens = len(command.prompt_ids)
        self.max_tokens = command.sampling.max_tokens
        self.blocks = Blocks(generator.engine.block_tokens, self.prompt_tokens)
        self.demand = command.demand(self.blocks.shared, self.blocks.own)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.live: list[GrowingCandidate] = []
        self.num_tokens = 0  # of every live candidate
        self._maker = generator.engine.session(session_id, command)
        self._requests: dict[int, CandidateRequest] = {}
        self._generator = generator
        self._ledger = generator.ledger
        self._is_busy = False
        self._is_closed = False
        self._rate = ReportRate()
        self._num_growing = 0  # candidates that were live when the round began

    def begin(self, n: int) -> None:
        """It is admitted with `n` candidates."""
        self.n = n
        self.live = self.command.candidates(n)
        self._requests = {c.id: self._maker.request(c.id) for c in self.live}
        self.admitted.set_result(None)

    async def extend(self, until_tokens: int, report: Report | None = None) -> Round:
        """As `Session.extend`; a failure or a cancellation ends the session."""
        reported = list(self.live)
        self._num_growing = len(reported)
        self._enter()
        try:
            until = min(until_tokens, self.max_tokens)
            ended_by = await self._grow(until, report)
            self._generator.queue.admit_waiting()  # finished candidates have left rows
        except BaseException:
            self._is_closed = True
            raise
        finally:
            self._is_busy = False
        prefixes = tuple(candidate.report() for candidate in reported)
        batch = PrefixBatch(prefixes, ended_by, self.num_tokens, self._gauge())
        return await self._generator.frontend.round(batch, self.command.sampling)

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """As `Session.prune`; a fork is a request that begins with its parent's tokens, whose whole
        blocks vLLM has in its prefix cache."""
        self._enter()
        try:
            live = {candidate.id: candidate for candidate in self.live}
            rejected = [candidate for candidate in self.live if candidate.id not in keep]
            self.live = [candidate for candidate in self.live if candidate.id in keep]
            own, queue = self.blocks.own(self.num_tokens), self._generator.queue
            self._ledger.give_back(self.id, freed := len(rejected) * own)
            queue.narrow(self, len(self.live), self.num_tokens)
            made = queue.with_room(self, forks, live, len(self.live), self.num_tokens)
            self._ledger.take(self.id, len(made) * own)
            for number, parent in made.items():
                fork = live[parent].fork(number)
                self._requests[number] = self._maker.request(number, fork.token_ids)
                self.live.append(fork)
            # The session no longer lists these requests, so a cancellation must not skip this.
            await asyncio.shield(self._abort(rejected))
            queue.admit_waiting()
        finally:
            self._is_busy = False
        return Pruned(freed, self._gauge(), tuple(sorted(forks.keys() - made.keys())))

    async def close(self) -> None:
        """Free everything, whether it was admitted or not."""
        self._is_closed = True
        live, self.live = self.live, []
        self._generator.queue.leave(self.id)
        try:
            await asyncio.shield(self._abort(live))
        finally:
            self._generator.leave(self)

    async def _grow(self, until: int, report: Report | None) -> RoundEnd:
        while self.live and self.num_tokens < until:
            self._generator.queue.widen(self, len(self.live))
            room = self._ledger.share_of(self.id) // len(self.live)
            reach = min(until, self.blocks.reach(room))
            if reach <= self.num_tokens:
                return RoundEnd.SLOTS_FULL
            if report and self._num_growing > 1:  # in strides: vLLM would send every token alone
                stride = max(_STRIDE_TOKENS, self._num_growing // _ROWS_PER_TOKEN)
                reach = min(reach, self.num_tokens + stride)
            await self._grow_to(reach, report)
            if self._num_growing > 1:
                self._report((), report)
        return RoundEnd.DECISION_TOKEN if self.live else RoundEnd.ALL_FINISHED

    async def _grow_to(self, until: int, report: Report | None) -> None:
        """All live candidates to `until` tokens, for which there is room."""
        growing = list(self.live)
        count, before = until - self.num_tokens, self.num_tokens
        more = self.blocks.own(until) - self.blocks.own(before)
        self._ledger.take(self.id, len(growing) * more)
        self._generator.engine.growing(more=len(growing))
        try:
            async with asyncio.TaskGroup() as group:
                for candidate in growing:
                    group.create_task(self._receive(candidate, count, report))
        except ExceptionGroup as group_of_errors:
            raise group_of_errors.exceptions[0] from None
        finally:
            self._generator.engine.growing(more=-len(growing))
        self.live = [candidate for candidate in growing if candidate.finish is None]
        longest = max(len(candidate.token_ids) for candidate in growing)
        self.num_tokens = until if self.live else max(before, longest)
        num_finished = len(growing) - len(self.live)
        self._ledger.give_back(self.id, num_finished * self.blocks.own(until))

    async def _receive(
        self, candidate: GrowingCandidate, count: int, report: Report | None
    ) -> None:
        """Append up to `count` tokens from vLLM; abort the request once the candidate finishes."""
        eos_ids, request = self._generator.engine.eos_ids, self._requests[candidate.id]
        at_once = report is not None and self._num_growing == 1
        async with aclosing(request.generate(count, at_once=at_once)) as tokens:
            async for token in tokens:
                candidate.append(token.id, token.logprob)
                if token.top:
                    candidate.new_top.append(token.top)
                # Microseconds, so on the event loop: stop texts read the new token only.
                candidate.finish = self.command.finish_of(candidate, eos_ids)
                if candidate.finish:
                    break
                if self._num_growing == 1:
                    self._report((candidate,), report)
        if candidate.finish:
            await self._abort([candidate])

    def _report(self, grown: Sequence[GrowingCandidate], report: Report | None) -> None:
        """Report a part of the round, if it is due: of its only candidate, or of all."""
        if report and self.live and self._rate.is_due():
            num_tokens = len(grown[0].token_ids) if grown else self.num_tokens
            parts = tuple(candidate.report() for candidate in grown)
            position = RoundEnd.DECISION_TOKEN, num_tokens, self._gauge()
            part = PrefixBatch(parts, *position, num_live=len(self.live))
            report(self._generator.frontend.part(part, self.command.sampling))

    async def _abort(self, candidates: Sequence[GrowingCandidate]) -> None:
        requests = [self._requests[candidate.id] for candidate in candidates]
        await self._generator.engine.abort(requests)

    def _gauge(self) -> SlotGauge:
        own = self.blocks.shared + self._ledger.owned_by(self.id)
        return SlotGauge(self._ledger.capacity, self._ledger.owned, own)

    def _enter(self) -> None:
        if self._is_closed:
            raise SessionExpired("the session is closed")
        if self._is_busy:
            raise OutOfOrder("the session's round is still running")
        self._is_busy = True


class VLLMGenerator:
    """A `Generator` on a vLLM engine; its calls belong to one event loop."""

    def __init__(
        self,
        engine: VLLMEngine,
        text: Text,
        card: GeneratorDescription,
        *,
        max_waiting: int = 64,
    ) -> None:
        self.engine = engine
        self.frontend = Frontend(text, card)
        self.ledger = SlotLedger(engine.capacity_slots)
        self.queue: AdmissionQueue[VLLMSession] = AdmissionQueue(
            self.ledger,
            self._admit,
            max_waiting=max_waiting,
            auto_candidates=card.auto_candidates,
            max_candidates=engine.max_rows,
            free_candidates=self._free_rows,
        )
        self._ids = itertools.count(1)
        self._sessions: dict[int, VLLMSession] = {}

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[VLLMSession]:
        command = await self.frontend.command(spec)
        session = VLLMSession(self, next(self._ids), command)
        try:
            self.queue.enter(session)
            await session.admitted
            yield session
        finally:
            await session.close()

    async def describe(self) -> GeneratorDescription:
        return self.frontend.description(self.load())

    async def warm_up(self) -> None:
        """See `Frontend.warm_up`."""
        await self.frontend.warm_up(self)

    def load(self) -> Load:
        """Slots and sessions as of now."""
        gauge = SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return Load(gauge, len(self._sessions), len(self.queue))

    def heartbeat_s(self) -> float:
        """The older of vLLM's heartbeat and the frontend's."""
        return max(self.engine.heartbeat_s(), self.frontend.heartbeat_s())

    def close(self) -> None:
        """End vLLM's processes."""
        self.engine.close()

    def leave(self, session: VLLMSession) -> None:
        """Free the slots of a session after its requests are aborted."""
        if self._sessions.pop(session.id, None):
            self.ledger.close(session.id)
            self.ledger.retire(session.blocks.shared)
            # vLLM may still cache the prompt's blocks; the ledger counts them as free.
            self.ledger.evict(session.blocks.shared)
        self.queue.admit_waiting()

    def _admit(self, session: VLLMSession, n: int) -> None:
        if not session.admitted.done():  # its caller may have been cancelled
            self.ledger.hold(session.blocks.shared)
            self.queue.give_share(session, n)
            self._sessions[session.id] = session
            session.reduced = self.queue.is_reduced(session, n)
            session.begin(n)

    def _free_rows(self) -> int:
        """How many more requests vLLM takes; those that pause between rounds count as taken."""
        return self.engine.max_rows - sum(len(session.live) for session in self._sessions.values())


def load_vllm(settings: GeneratorSettings, on_step: OnStep | None = None) -> VLLMGenerator:
    """A generator on a vLLM that is started for it; takes a minute."""
    _prepare_environment(settings)
    # Imported here: vLLM has an environment of its own, and reads the variables when imported.
    from generator_service.stock.vllm_engine import VERSION, VLLMEngine

    if settings.vllm_options.get("load_format", "auto") in ("auto", "safetensors"):
        check_tensors(settings.model_directory, reads_quantized=True)
    examined = examine(settings.model_directory)
    engine = VLLMEngine.load(settings, examined.end_ids, on_step)
    shape = engine.shape
    card = GeneratorDescription(
        model=settings.files.name,
        fingerprint=fingerprint_of(settings, shape.dtype, VERSION),
        context_tokens=shape.context_tokens,
        max_candidates=engine.max_rows,
        vocabulary=shape.vocabulary,
        slot_bytes=shape.slot_bytes,
        device=f"vllm {engine.device} {shape.dtype}",
        slots=SlotGauge(engine.capacity_slots, 0, 0),
        auto_candidates=min(settings.auto_candidates_of(engine.device), engine.max_rows),
        adapters=tuple(settings.adapters),
        probe=examined.probe,
    )
    return VLLMGenerator(engine, Text.of(examined), card, max_waiting=settings.max_waiting)


def run_node(settings: GeneratorSettings) -> NoReturn:
    """Become vLLM's process of a node without a port; it ends with one of its workers."""
    _prepare_environment(settings)
    from generator_service.stock.vllm_engine import node_command

    command = node_command(settings)
    os.execv(command[0], command)


def fingerprint_of(settings: GeneratorSettings, dtype: str, version: str) -> str:
    """Fingerprint of the weights and all that changes tokens, such as quantisation."""
    settings_of_engine: dict[str, object] = {"dtype": dtype, "engine": f"vllm {version}"}
    for name, adapter in settings.adapters.items():
        settings_of_engine[f"adapter {name}"] = fingerprint.of_directory(adapter)
    options = {k: v for k, v in settings.vllm_options.items() if k not in _OF_NODES}
    if options:
        settings_of_engine["options"] = options
    return fingerprint.of_directory(settings.model_directory, settings_of_engine)


def _prepare_environment(settings: GeneratorSettings) -> None:
    prepare_environment(
        settings.threads,
        # vllm_draw uses an interface that vLLM's second model runner does not have.
        VLLM_USE_V2_MODEL_RUNNER="0",
        # vLLM draws nothing itself, but would compile these kernels when it starts.
        VLLM_USE_FLASHINFER_SAMPLER="0",
    )
