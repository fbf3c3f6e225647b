"""The generator engine: many sessions over one model, one forward pass per step.

A step schedules the rows of all sessions that grow and one bounded chunk of unread prompts, runs
the model once, then samples, appends and ends the rounds that are over. All calls belong to one
thread: see `engine_thread.EngineThread` for others. Independent of transport, text and rewards.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from generator_service.admission import AdmissionQueue
from generator_service.engine import commands
from generator_service.engine.prompt_tree import PromptTree
from generator_service.engine.sampling import most_probable, sample
from generator_service.engine.session import Session, prompt_chunks
from generator_service.turns import Turns
from specrej.contracts import NO_FORKS, Forks, Pruned, RoundEnd, SlotGauge
from specrej.contracts.errors import InternalError, OutOfOrder, SessionExpired, SpecrejError
from specrej_models.attention import PrefillSegment, Segment
from specrej_models.kv import KVShape, PromptKV, SuffixKV
from specrej_models.slots import SlotLedger

log = logging.getLogger(__name__)

T = TypeVar("T")
Batch = list[tuple[Session, Segment]]


class Model(Protocol):
    """The part of `generator_service.engine.model.CausalLM` that the engine uses."""

    shape: KVShape
    eos_ids: frozenset[int]

    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor: ...


class Engine:
    """Sessions over one model and one ledger of slots."""

    def __init__(
        self,
        model: Model,
        capacity_slots: int,
        *,
        max_waiting: int = 64,
        auto_candidates: int = 64,
        prefill_chunk: int = 256,
        max_rows: int = 1024,
        prefix_cache_slots: int = 0,
        on_step: commands.OnStep | None = None,
    ) -> None:
        """`auto_candidates` bounds N where it is left to the engine.

        A step takes at most `prefill_chunk` prompt tokens and the rows of `max_rows` candidates (or
        of one session, if it has more): of one tenant half as many while sessions of several are
        open, since a command waits for the step under way. Prompts that no session uses any more
        stay in up to `prefix_cache_slots` slots. `on_step` is called after every step.
        """
        self._model = model
        self._capacity_slots = capacity_slots
        self._max_waiting = max_waiting
        self._auto_candidates = auto_candidates
        self._prefill_chunk = prefill_chunk
        self._max_rows = max_rows
        self._prefix_cache_slots = prefix_cache_slots
        self._on_step = on_step
        self._ids = itertools.count(1)
        self._num_steps = 0
        self._tally = commands.Step()  # of the next step
        self._clear()

    def _clear(self) -> None:
        """No sessions, all slots free, no prompt stored."""
        self.sessions: dict[int, Session] = {}
        self._failed: dict[int, SpecrejError] = {}  # sessions between two commands, until closed
        self._turns = Turns()
        self._read_at: dict[str, int] = {}  # by tenant: the last step that read a prompt
        self.ledger = SlotLedger(self._capacity_slots)
        self.prompts: PromptTree[PromptKV] = PromptTree(
            self.ledger,
            lambda tokens: PromptKV(self._model.shape, tokens),
            self._prefix_cache_slots,
        )
        self.queue: AdmissionQueue[Session] = AdmissionQueue(
            self.ledger,
            self._admit,
            max_waiting=self._max_waiting,
            auto_candidates=self._auto_candidates,
            missing=lambda s: self.prompts.missing(s.command.cache_salt, s.command.prompt_ids),
        )

    def gauge(self, session_id: int = 0) -> SlotGauge:
        """Slots now (session 0: of no session); from any thread: what is cached is read last."""
        ledger, session = self.ledger, self.sessions.get(session_id)
        prompt = session.prompt_tokens if session else 0
        owned, own = ledger.owned, prompt + ledger.owned_by(session_id)
        return SlotGauge(ledger.capacity, owned, own, min(ledger.cached, ledger.capacity - owned))

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return any(s.growing or s.is_reading for s in self.sessions.values())

    def check_integrity(self) -> None:
        """Raises AssertionError if ledger, prompts and tensors disagree."""
        self.ledger.check_integrity()
        self.prompts.check_integrity()
        slot_bytes = self._model.shape.slot_bytes
        for node in self.prompts.nodes():
            assert node.store.num_bytes == len(node.tokens) * slot_bytes
        for session in self.sessions.values():
            owned, share = self.ledger.owned_by(session.id), self.ledger.share_of(session.id)
            assert owned == session.suffix.live * session.suffix.length
            assert session.suffix.num_bytes <= share * slot_bytes

    # Commands

    def new_session(self, command: commands.OpenCommand) -> Session:
        """A session with an id, to be opened; from any thread."""
        return Session(next(self._ids), command)

    def open(self, session: Session) -> Session:
        """Admit a session now or when there are slots, which its future `opened` shows.

        Raises:
            InvalidRequest: it can never fit.
            Overloaded: too many sessions wait already.
        """
        self.queue.enter(session)
        return session

    def extend(
        self,
        session_id: int,
        until_tokens: int,
        growing: Future[commands.PrefixBatch] | None = None,
        report: Callable[[commands.PrefixBatch], None] | None = None,
    ) -> Future[commands.PrefixBatch]:
        """Grow all live candidates to `until_tokens` new tokens (at most max_tokens), in steps;
        `report` receives how far they are, as in `contracts.Session.extend`."""
        session = self._idle(session_id)
        session.report = report
        session.until = min(until_tokens, session.command.sampling.max_tokens)
        self.queue.widen(session, len(session.rows))
        self.prompts.make_room()
        session.growing = growing = growing or Future()
        if not session.is_reading:
            self._end_round_if_over(session)
        return growing

    def prune(self, session_id: int, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """As `contracts.Session.prune`; ids in `keep` that are not live are ignored.

        Raises:
            InternalError: the memory for forks cannot be allocated, which ends the session.
        """
        session = self._idle(session_id)
        live, length = {candidate.id for candidate in session.rows}, session.suffix.length
        kept = live.intersection(keep)
        freed = (len(live) - len(kept)) * length
        self.ledger.give_back(session_id, freed)
        self.queue.narrow(session, len(kept), session.num_tokens)
        made = self.queue.with_room(session, forks, live, len(kept), session.num_tokens)
        self.prompts.make_room()
        self.ledger.take(session_id, len(made) * length)
        try:
            share = self.ledger.share_of(session_id)
            session.keep(kept, made, share)
            session.suffix.shrink(share)
        except Exception as error:
            raise self._fail(session, error, "the generator cannot hold the session") from error
        return Pruned(freed, self.gauge(session_id), tuple(sorted(forks.keys() - made.keys())))

    def close(self, session_id: int) -> int:
        """Free all that a session holds, waiting or running; slots freed, 0 if it is gone."""
        self.queue.leave(session_id)
        self._failed.pop(session_id, None)
        session = self.sessions.pop(session_id, None)
        if session is None:
            return 0
        if session.growing:
            session.growing.cancel()
        before = self.ledger.owned
        self.ledger.close(session_id)
        if session.prompt:
            self.prompts.release(session.prompt)
        return before - self.ledger.owned

    def start_over(self, error: SpecrejError) -> None:
        """Discard all state, which may be wrong after a bug; `error` ends all sessions."""
        lost = [*self.queue, *self.sessions.values()]
        self._clear()
        for session in lost:
            refuse(session.opened, error)
            if session.growing:
                refuse(session.growing, error)

    def step(self) -> bool:
        """One forward pass over all that can go on; False if there is nothing to compute."""
        self.queue.admit_waiting()
        batch = self._schedule()
        if batch:
            began = time.monotonic()
            # Before any of them finishes.
            decoded = [s for _, s in batch if not isinstance(s, PrefillSegment)]
            self._tally.rows = sum(segment.num_rows for segment in decoded)
            try:
                for session, segment, logits in _computed(self._model, batch, self._fail):
                    try:
                        self._postprocess(session, segment, logits)
                    except Exception as error:
                        self._fail(session, error)
            finally:
                self._num_steps += 1
                step, self._tally = self._tally, commands.Step()
                step.seconds = time.monotonic() - began
                if self._on_step:
                    self._on_step(step)
            self.queue.admit_waiting()  # a session that failed has left room
        return bool(batch)

    def _schedule(self) -> Batch:
        """Sessions that can grow by a token, and prompts to be read, in turns of their tenants."""
        grown: Batch = []
        read: Batch = []
        tenants: set[str] = set()
        working: dict[str, list[Session]] = {}  # by tenant
        for session in self.sessions.values():
            tenants.add(tenant := session.command.cache_salt)
            if session.is_reading or session.growing:
                working.setdefault(tenant, []).append(session)
        most = self._max_rows // min(2, max(1, len(tenants)))
        self._read_at = {tenant: self._read_at.get(tenant, -1) for tenant in working}
        self._turns.take(
            {
                t: (sessions[-1].command.weight, self._line(t, sessions, grown, read, most))
                for t, sessions in working.items()
            }
        )
        return [*grown, *read]

    def _line(
        self, tenant: str, sessions: Sequence[Session], grown: Batch, read: Batch, most: int
    ) -> Iterator[int]:
        """Add a tenant's sessions to a pass, one after the other; returns the rows of each. What
        waited longer is first: the sessions that grow, or the prompts."""
        growing = sorted((s for s in sessions if not s.is_reading), key=lambda s: s.last_step)
        lines = [self._grow(growing, grown, most), self._read(tenant, sessions, read)]
        if growing and self._read_at[tenant] < growing[0].last_step:
            lines.reverse()
        return itertools.chain(*lines)

    def _grow(self, growing: Sequence[Session], grown: Batch, most: int) -> Iterator[int]:
        own = 0
        for session in growing:
            rows = len(session.rows)
            all_rows = sum(segment.num_rows for _, segment in grown) + rows
            has_room = all_rows <= self._max_rows and (own + rows <= most or not own)
            if (has_room or not grown) and self._make_room(session):
                grown.append((session, session.decode_rows()))
                own += rows
                yield rows

    def _read(self, tenant: str, sessions: Sequence[Session], read: Batch) -> Iterator[int]:
        for chunk in prompt_chunks(sessions, read, self._prefill_chunk):
            self._read_at[tenant] = self._num_steps
            read.append(chunk)
            yield chunk[1].num_rows

    def _make_room(self, session: Session) -> bool:
        """Whether there is room for one more token per row; if the share is full, end the round.

        If memory cannot be allocated, this session fails and no other.
        """
        if len(session.rows) > self.ledger.room_of(session.id):
            self._end_round(session, RoundEnd.SLOTS_FULL)
            return False
        try:
            session.reserve(self.ledger.share_of(session.id))
        except Exception as error:
            self._fail(session, error, "the generator cannot hold the session")
            return False
        return True

    def _postprocess(self, session: Session, segment: Segment, logits: Tensor) -> None:
        """Count what the pass has stored, draw the next tokens, end the round if it is over."""
        if isinstance(segment, PrefillSegment):
            if not segment.stored:
                session.unread().computed += segment.num_rows
                self._tally.prefilled += segment.num_rows
            if segment.start + segment.num_rows < session.prompt_tokens:
                return
            session.is_reading = False
            session.last_step = self._num_steps  # it has not waited longer than those that grow
            logits = logits.expand(len(session.rows), -1)
        else:
            session.last_step = self._num_steps
            session.suffix.advance()
            self.ledger.take(session.id, session.suffix.live)
        if session.rows:  # a prune may have come before the end of the prompt
            self._append(session, logits)
        self._end_round_if_over(session)
        if session.growing and session.report and session.rate.is_due():
            grown = session.unreported if len(session.unreported) == 1 else ()
            session.report(self._batch(session, grown, num_live=len(session.rows)))

    def _append(self, session: Session, logits: Tensor) -> None:
        """Append each live candidate's next token; a finished candidate holds no slots."""
        eos_ids, command = self._model.eos_ids, session.command
        tokens, logprobs = _draw(session, logits, eos_ids)
        session.num_tokens += 1
        self._tally.generated += len(session.rows)
        drawn = zip(session.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        for candidate, token_id, logprob in drawn:
            candidate.append(token_id, logprob)
            candidate.finish = command.finish_of(candidate, eos_ids)
        if count := command.sampling.top_logprobs:
            tops = most_probable(logits, tokens, logprobs, count)
            for candidate, top in zip(session.rows, tops, strict=True):
                candidate.new_top.append(top)
        self.ledger.give_back(session.id, session.drop_finished() * session.suffix.length)

    def _end_round_if_over(self, session: Session) -> None:
        if session.growing and not session.rows:
            self._end_round(session, RoundEnd.ALL_FINISHED)
        elif session.growing and session.num_tokens >= session.until:
            self._end_round(session, RoundEnd.DECISION_TOKEN)

    def _end_round(self, session: Session, ended_by: RoundEnd) -> None:
        batch = self._batch(session, session.unreported, ended_by)
        session.unreported = sorted(session.rows, key=lambda candidate: candidate.id)
        growing, session.growing = session.growing, None
        assert growing
        resolve(growing, batch)

    def _batch(
        self,
        session: Session,
        grown: Sequence[commands.GrowingCandidate],
        ended_by: RoundEnd = RoundEnd.DECISION_TOKEN,
        num_live: int = 0,
    ) -> commands.PrefixBatch:
        prefixes, gauge = tuple(one.report() for one in grown), self.gauge(session.id)
        return commands.PrefixBatch(prefixes, ended_by, session.num_tokens, gauge, num_live)

    def _admit(self, session: Session, n: int) -> None:
        """Open a session that fits. If memory cannot be allocated, it fails and no other does."""
        command = session.command
        try:
            session.prompt = self.prompts.acquire(command.cache_salt, command.prompt_ids)
            self.sessions[session.id] = session  # from here on, closing it frees all it has
            path = session.prompt.path()
            self._tally.reused += sum(len(v.tokens) for v in path if v.computed or v.users > 1)
            self.queue.give_share(session, n)
            self.prompts.make_room()
            session.suffix = SuffixKV(self._model.shape, n)
            session.rows = command.candidates(n)
            session.unreported = list(session.rows)
            resolve(session.opened, commands.Opened(n, self.queue.is_reduced(session, n)))
        except Exception as error:
            self._fail(session, error, "the generator cannot hold the session")

    def _fail(
        self, session: Session, cause: Exception, reason: str = "the generator's step failed"
    ) -> InternalError:
        log.error("%s", reason, exc_info=cause)
        failure = InternalError(reason)
        failure.__cause__ = cause
        growing, session.growing = session.growing, None
        try:
            self.close(session.id)
        finally:
            if growing:
                refuse(growing, failure)
            elif session.opened.done():  # no command waits: the next one fails
                self._failed[session.id] = failure
            refuse(session.opened, failure)
        return failure

    def _idle(self, session_id: int) -> Session:
        session = self.sessions.get(session_id)
        if failure := self._failed.get(session_id):
            raise failure
        if session is None:
            raise SessionExpired("the session is closed")
        if session.growing:
            raise OutOfOrder("the session's round is still running")
        return session


def _draw(session: Session, logits: Tensor, eos_ids: frozenset[int]) -> tuple[Tensor, Tensor]:
    """The next token of each row [rows], and its log-probability [rows].

    Raises:
        RuntimeError: a row's logits are not finite; on CPUs single NaN are never drawn instead.
    """
    sampling, step = session.command.sampling, session.num_tokens
    forbidden = session.command.ends(eos_ids) if step < sampling.min_tokens else ()
    ids = [candidate.id for candidate in session.rows]
    texts = [candidate.token_ids for candidate in session.rows]
    allowed = None
    if session.matchers:  # on a GPU, while the forward pass computes
        allowed, forbidden = session.matchers.allowed(ids, texts, forbidden), ()
    drawn = sample(logits, sampling, ids, step, forbidden, session.adjustment, texts, allowed)
    if drawn[1].isnan().any():
        raise RuntimeError("the model's logits are not finite")
    return drawn


def _computed(
    model: Model, batch: Batch, fail: Callable[[Session, Exception], object]
) -> Iterator[tuple[Session, Segment, Tensor]]:
    """Logits of each session.

    A pass that fails is repeated with each half of its sessions, so that only the sessions that
    cause the failure end. The repetition overwrites what the failed pass stored.
    """
    half = len(batch) // 2
    logits: tuple[Tensor, ...] = ()
    try:
        logits = _run(model, batch)
    except Exception as error:
        if not half:
            fail(batch[0][0], error)
    if logits:
        for (session, segment), part in zip(batch, logits, strict=True):
            yield session, segment, part
    elif half:  # outside of the handler: the error holds the tensors of its pass
        log.warning("a step of %d sessions failed, it is repeated in halves", len(batch))
        yield from _computed(model, batch[:half], fail)
        yield from _computed(model, batch[half:], fail)


def _run(model: Model, batch: Batch) -> tuple[Tensor, ...]:
    """Float32 logits per session: of each live row, or of a chunk's last token."""
    token_ids: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    for session, segment in batch:
        if isinstance(segment, PrefillSegment):
            end = segment.start + segment.num_rows
            token_ids += session.command.prompt_ids[segment.start : end]
            positions += range(segment.start, end)
            last.append(len(token_ids) - 1)
        else:
            last += range(len(token_ids), len(token_ids) + segment.num_rows)
            token_ids += [candidate.token_ids[-1] for candidate in session.rows]
            positions += [segment.position] * segment.num_rows
    segments = [segment for _, segment in batch]
    logits = model.forward(token_ids, positions, segments, last)
    rows = [1 if isinstance(s, PrefillSegment) else s.num_rows for s in segments]
    return torch.split(logits, rows)


def resolve(future: Future[T], value: T) -> None:
    """Set a result, unless another thread has cancelled the future."""
    with suppress(InvalidStateError):
        future.set_result(value)


def refuse(future: Future[T], error: SpecrejError) -> None:
    """Set an error, unless the future has a result or was cancelled by another thread."""
    with suppress(InvalidStateError):
        future.set_exception(error)
