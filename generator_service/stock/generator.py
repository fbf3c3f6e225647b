"""A `Generator` on a program that runs requests: vLLM in this process, or a server of OpenAI's API.

A candidate has one of two forms. In *rounds* each round is a request, whose prompt ends with the
candidate's tokens so far; the program's prefix cache has their keys and values, but for the last
block. Nothing runs while scores are computed, and a fork is a request that begins with its parent's
tokens. In *streams* a candidate is one request, which is read to the decision token and closed when
the candidate is rejected; tokens that it generates meanwhile are discarded. Streams serve what a
continued prompt would change, such as presence penalties and structured outputs, and servers that
take no token ids.

The program schedules; this file decides how far each candidate may grow, so that sessions never
hold more slots than there are and vLLM never preempts a request. Paused candidates count.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from generator_service.admission import AdmissionQueue, Blocks
from generator_service.engine import commands
from generator_service.stock.requests import Ask, Part, Requests, continues_exactly
from specrej import contracts as c
from specrej.contracts.errors import OutOfOrder, SessionExpired, Violation, raise_if_any
from specrej_models.slots import SlotLedger

if TYPE_CHECKING:
    from generator_service.engine.generator import Frontend
    from generator_service.stock.endpoint import TextFrontend

# Tokens that are sent together where nobody reads a round's parts; a heartbeat is one such part.
_INTERVAL = 32


class Stream:
    """One candidate's request for its whole answer, read ahead of the rounds."""

    def __init__(self, parts: AsyncGenerator[Part, None]) -> None:
        self._parts = parts
        self._ahead: list[Part] = []
        self._arrived = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def take(self, count: int) -> Part:
        """The next tokens, at most `count`; waits for the first one.

        Raises:
            SpecrejError: the request failed.
        """
        while not self._ahead:
            if self._reading.done():
                self._reading.result()
                return Part((), (), finish=c.FinishReason.LENGTH)
            self._arrived.clear()
            await self._arrived.wait()
        part = self._ahead.pop(0)
        if len(part.token_ids) > count:
            part, rest = part.divided(count)
            self._ahead.insert(0, rest)
        return part

    async def close(self) -> int:
        """End the request; the number of tokens that were not taken."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        return sum(len(part.token_ids) for part in self._ahead)

    async def _read(self) -> None:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    self._ahead.append(part)
                    self._arrived.set()
        finally:
            self._arrived.set()


class StockSession:
    """A `Session` of requests; one call at a time."""

    def __init__(
        self,
        generator: StockGenerator,
        session_id: int,
        spec: c.SessionSpec,
        command: commands.OpenCommand,
    ) -> None:
        self.id = session_id
        self.command = command
        self.n = 0
        self.reduced = False
        self.fingerprint = ""  # the servicer has the generator's
        self.prompt_tokens = len(command.prompt_ids)
        self.max_tokens = command.sampling.max_tokens
        self.blocks = Blocks(generator.block_tokens, max(1, self.prompt_tokens))
        self.form = generator.form_of(command)
        self.answer_form = command.answer_form
        self.costly_rounds = self.form is c.CandidateForm.ROUNDS
        self.demand = command.demand(self.blocks.shared, self.blocks.own)
        if self.form is not c.CandidateForm.ROUNDS:  # a stream may reach its end in the first round
            self.demand = replace(self.demand, first_round_tokens=self.max_tokens)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.live: list[commands.GrowingCandidate] = []
        self.num_tokens = 0  # of every live candidate
        self._spec = spec
        self._name = uuid.uuid4().hex
        self._streams: dict[int, Stream] = {}
        self._generator = generator
        self._ledger = generator.ledger
        self._is_busy = False
        self._is_closed = False
        self._rate = commands.ReportRate()
        self._first = -1  # the candidate whose tokens are sent at once while several grow
        # Since they were last reported.
        self._prefilled = self._discarded = self._prompt_tokens = 0

    def begin(self, n: int) -> None:
        """It is admitted with `n` candidates."""
        self.n = n
        self.live = self.command.candidates(n)
        self.admitted.set_result(None)

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        """As `Session.extend`; a failure or a cancellation ends the session."""
        reported = list(self.live)
        self._enter()
        try:
            until = min(until_tokens, self.max_tokens)
            if self.form is c.CandidateForm.WHOLE_ANSWERS:
                until = self.max_tokens
            ended_by = await self._grow(until, report)
            self._generator.queue.admit_waiting()  # finished candidates have left slots
        except BaseException:
            self._is_closed = True
            raise
        finally:
            self._is_busy = False
        longest = max((len(one.token_ids) for one in reported), default=self.num_tokens)
        num_tokens = self.num_tokens if self.live else max(self.num_tokens, longest)
        prefixes = tuple(candidate.report() for candidate in reported)
        batch = commands.PrefixBatch(prefixes, ended_by, num_tokens, self._gauge())
        ended = await self._generator.frontend.round(batch, self.command.sampling)
        if not self.prompt_tokens:  # only the server counts them
            self.prompt_tokens = self._prompt_tokens
            ended = replace(ended, prompt_tokens=self._prompt_tokens)
        prefilled, self._prefilled = self._prefilled, 0
        return replace(ended, prefilled_tokens=prefilled)

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        """As `Session.prune`; streams refuse forks."""
        self._enter()
        try:
            live = {candidate.id: candidate for candidate in self.live}
            rejected = [candidate for candidate in self.live if candidate.id not in keep]
            self.live = [candidate for candidate in self.live if candidate.id in keep]
            await self._close_streams(rejected)
            own, queue = self._own(self.num_tokens), self._generator.queue
            self._ledger.give_back(self.id, freed := len(rejected) * own)
            queue.narrow(self, len(self.live), self.num_tokens)
            possible = forks if self.form is c.CandidateForm.ROUNDS else c.NO_FORKS
            made = queue.with_room(self, possible, live, len(self.live), self.num_tokens)
            self._ledger.take(self.id, len(made) * own)
            self.live += [live[parent].fork(number) for number, parent in made.items()]
            queue.admit_waiting()
        finally:
            self._is_busy = False
        discarded, self._discarded = self._discarded, 0
        refused = tuple(sorted(forks.keys() - made.keys()))
        return c.Pruned(freed, self._gauge(), refused, discarded)

    async def close(self) -> None:
        """Free everything, whether it was admitted or not."""
        self._is_closed = True
        live, self.live = self.live, []
        self._generator.queue.leave(self.id)
        try:
            await self._close_streams(live)
        finally:
            self._generator.leave(self)

    async def _grow(self, until: int, report: c.Report | None) -> c.RoundEnd:
        while self.live and self.num_tokens < until:
            self._generator.queue.widen(self, len(self.live))
            reach = until
            if self.form is c.CandidateForm.ROUNDS:
                room = self._ledger.share_of(self.id) // len(self.live)
                reach = min(until, self.blocks.reach(room))
            if reach <= self.num_tokens:
                return c.RoundEnd.SLOTS_FULL
            await self._grow_to(reach, report)
        return c.RoundEnd.DECISION_TOKEN if self.live else c.RoundEnd.ALL_FINISHED

    async def _grow_to(self, until: int, report: c.Report | None) -> None:
        """All live candidates to `until` tokens, for which there is room."""
        growing, self._first = list(self.live), self.live[0].id
        own = self._own(until)
        self._ledger.take(self.id, len(growing) * (own - self._own(self.num_tokens)))
        try:
            async with asyncio.TaskGroup() as group:
                for candidate in growing:
                    group.create_task(self._receive(candidate, until, report))
        except ExceptionGroup as group_of_errors:
            raise group_of_errors.exceptions[0] from None
        self.live = [candidate for candidate in growing if candidate.finish is None]
        longest = max(len(candidate.token_ids) for candidate in growing)
        self.num_tokens = until if self.live else max(self.num_tokens, longest)
        finished = [candidate for candidate in growing if candidate.finish]
        await self._close_streams(finished)
        self._ledger.give_back(self.id, len(finished) * own)

    async def _receive(
        self, candidate: commands.GrowingCandidate, until: int, report: c.Report | None
    ) -> None:
        """Append the tokens of a candidate up to `until`, or until it has finished."""
        if self.form is c.CandidateForm.ROUNDS:
            ask = self._ask(candidate, until, is_read=report is not None)
            async with aclosing(self._generator.requests.generate(ask)) as parts:
                async for part in parts:
                    self._append(candidate, part, until, report)
                    if candidate.finish:
                        return
            if len(candidate.token_ids) < until:
                candidate.finish = c.FinishReason.LENGTH  # a limit of the program
            return
        stream = self._streams.get(candidate.id)
        if stream is None:
            ask = self._ask(candidate, self.max_tokens, is_read=True)
            stream = self._streams[candidate.id] = Stream(self._generator.requests.generate(ask))
        while not candidate.finish and (count := until - len(candidate.token_ids)) > 0:
            part = await stream.take(count)
            self._append(candidate, part, self.max_tokens, report)

    def _ask(self, candidate: commands.GrowingCandidate, until: int, *, is_read: bool) -> Ask:
        has_stop_texts = self.command.stop_texts is not None
        is_shown = is_read and candidate.id == self._first
        streams = self.form is c.CandidateForm.STREAMS
        return Ask(
            self.command,
            self._spec.prompt,
            self._name,
            candidate.id,
            candidate.token_ids,
            until - len(candidate.token_ids),
            1 if has_stop_texts or is_shown or streams else _INTERVAL,
            not self._spec.without_likelihood,
        )

    def _append(
        self, candidate: commands.GrowingCandidate, part: Part, until: int, report: c.Report | None
    ) -> None:
        """Append a part's tokens, up to the one that finishes the candidate."""
        if isinstance(candidate.text, ServedText):
            candidate.text.receive(part.text, len(part.token_ids))
        for step, token_id in enumerate(part.token_ids):
            candidate.append(token_id, part.logprobs[step])
            if part.top:
                candidate.new_top.append(part.top[step])
            # Microseconds, so on the event loop: stop texts read the new token only.
            candidate.finish = self.command.finish_of(candidate, self._generator.end_ids)
            if candidate.finish:
                self._discarded += len(part.token_ids) - step - 1
                break
        is_cut = len(candidate.token_ids) < until and part.finish is c.FinishReason.LENGTH
        if part.finish is c.FinishReason.STOP or (is_cut and not candidate.finish):
            candidate.finish = part.finish
        self._prefilled += part.prefilled_tokens
        self._prompt_tokens = self._prompt_tokens or part.prompt_tokens
        self._generator.count(part)
        self._report(candidate, report)

    def _report(self, candidate: commands.GrowingCandidate, report: c.Report | None) -> None:
        """Report a part of the round, if it is due: of its only candidate, or of the first."""
        is_only = len(self.live) == 1
        if not report or candidate.finish or not (is_only or candidate.id == self._first):
            return
        if self._rate.is_due():
            parts = (candidate.report(),) if is_only else ()
            position = c.RoundEnd.DECISION_TOKEN, len(candidate.token_ids), self._gauge()
            part = commands.PrefixBatch(parts, *position, num_live=len(self.live))
            report(self._generator.frontend.part(part, self.command.sampling))

    def _own(self, tokens: int) -> int:
        """Slots of one candidate; a stream's are those of its whole answer."""
        is_stream = self.form is not c.CandidateForm.ROUNDS
        return self.blocks.own(self.max_tokens if tokens and is_stream else tokens)

    async def _close_streams(self, candidates: Sequence[commands.GrowingCandidate]) -> None:
        streams = [self._streams.pop(one.id) for one in candidates if one.id in self._streams]
        # They are not listed any more, so a cancellation must not skip this.
        closing = asyncio.gather(*(stream.close() for stream in streams))
        self._discarded += sum(await asyncio.shield(closing))

    def _gauge(self) -> c.SlotGauge:
        own = self.blocks.shared + self._ledger.owned_by(self.id)
        return c.SlotGauge(self._ledger.capacity, self._ledger.owned, own)

    def _enter(self) -> None:
        if self._is_closed:
            raise SessionExpired("the session is closed")
        if self._is_busy:
            raise OutOfOrder("the session's round is still running")
        self._is_busy = True


class ServedText:
    """The text of a candidate whose server sends texts, not ids: a token's id is its number."""

    stop_text = ""  # servers do not tell

    def __init__(self) -> None:
        self._pieces = [""]  # before the first token, and of each token
        self._num_grown = 0

    def receive(self, text: str, count: int) -> None:
        """Add the text of `count` tokens, or of the last one."""
        if count:
            self._pieces += [text, *[""] * (count - 1)]
        else:
            self._pieces[-1] += text

    def grown(self, token_ids: Sequence[int], finish: c.FinishReason | None) -> str:
        self._num_grown += len(token_ids)
        return "".join(self._pieces[: self._num_grown + 1])

    def copy(self) -> ServedText:
        raise AssertionError("streams are not forked")


class StockGenerator:
    """A `Generator` on requests; its calls belong to one event loop."""

    def __init__(
        self,
        requests: Requests,
        frontend: Frontend | TextFrontend,
        end_ids: frozenset[int],
        card: c.GeneratorDescription,
        *,
        block_tokens: int = 1,
        can_stream: bool = True,
        max_waiting: int = 64,
        refusals: Callable[[c.SessionSpec], Iterable[Violation]] = lambda _: (),
        on_step: commands.OnStep | None = None,
    ) -> None:
        """`card`: the frontend's, with the capacity in slots, which are counted in whole blocks.

        `can_stream`: whether requests are read before their end. `refusals`: why the program cannot
        run a session.
        """
        self.requests = requests
        self.frontend = frontend
        self.end_ids = end_ids
        self.block_tokens = block_tokens
        self.ledger = SlotLedger(card.slots.capacity)
        self.queue: AdmissionQueue[StockSession] = AdmissionQueue(
            self.ledger,
            self._admit,
            max_waiting=max_waiting,
            auto_candidates=card.auto_candidates,
            max_candidates=card.max_candidates,
        )
        self._form = card.form
        self._can_stream = can_stream
        self._refusals = refusals
        self._on_step = on_step
        self._ids = itertools.count(1)
        self._sessions: dict[int, StockSession] = {}

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[StockSession]:
        raise_if_any(self._refusals(spec))
        command = await self.frontend.command(spec)
        session = StockSession(self, next(self._ids), spec, command)
        try:
            self.queue.enter(session)
            await session.admitted
            yield session
        finally:
            await session.close()

    async def check(self, spec: c.SessionSpec) -> None:
        raise_if_any(self._refusals(spec))
        await self.frontend.command(spec)

    async def describe(self) -> c.GeneratorDescription:
        return self.frontend.description(self.load())

    def load(self) -> commands.Load:
        """Slots and sessions as of now."""
        gauge = c.SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return commands.Load(gauge, len(self._sessions), len(self.queue))

    def heartbeat_s(self) -> float:
        return max(self.requests.heartbeat_s(), self.frontend.heartbeat_s())

    async def close(self) -> None:
        await self.requests.close()

    def form_of(self, command: commands.OpenCommand) -> c.CandidateForm:
        """The form of a session's candidates; messages with images cannot be continued."""
        continues = continues_exactly(command.sampling) and command.prompt_ids
        if self._form is c.CandidateForm.ROUNDS and not continues:
            return c.CandidateForm.STREAMS if self._can_stream else c.CandidateForm.WHOLE_ANSWERS
        return self._form

    def count(self, part: Part) -> None:
        """Count tokens for telemetry; the program that computes has metrics of its steps."""
        if self._on_step:
            generated, prefilled = len(part.token_ids), part.prefilled_tokens
            reused = part.cached_tokens or 0
            self._on_step(commands.Step(generated=generated, prefilled=prefilled, reused=reused))

    def leave(self, session: StockSession) -> None:
        """Free the slots of a session whose requests have ended."""
        if self._sessions.pop(session.id, None):
            self.ledger.close(session.id)
            self.ledger.retire(session.blocks.shared)
            # The program may still cache the prompt; the ledger counts its slots as free.
            self.ledger.evict(session.blocks.shared)
        self.queue.admit_waiting()

    def _admit(self, session: StockSession, n: int) -> None:
        if not session.admitted.done():  # its caller may have been cancelled
            self.ledger.hold(session.blocks.shared)
            self.queue.give_share(session, n)
            self._sessions[session.id] = session
            session.reduced = self.queue.is_reduced(session, n)
            session.begin(n)
