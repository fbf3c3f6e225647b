"""The generator engine: one thread, many sessions, one forward pass per step.

A step picks the rows of all sessions that grow (and one bounded chunk of a new prompt), runs the
model once, samples, appends, and ends the rounds that are over. Between steps the thread executes
commands; whoever sends them gets a future. Knows no wire, no text, no rewards.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from generator_service.prefixes import Piece, PrefixTree
from generator_service.sampling import sample
from generator_service.steps import OnStep, Tally
from inference.attention import DecodeSegment, PrefillSegment, Segment
from inference.kv import KVShape, PromptKV, SuffixKV
from inference.slots import SlotLedger
from specrej.contracts import FinishReason, Pruned, RoundEnd, Sampling, SlotGauge
from specrej.errors import (
    InternalError,
    InvalidRequest,
    OutOfOrder,
    Overloaded,
    SessionExpired,
    SpecrejError,
    Unavailable,
    Violation,
)
from specrej.threads import ComputeThread

log = logging.getLogger(__name__)

T = TypeVar("T")


class Model(Protocol):
    """What the engine needs of `generator_service.model.CausalLM`."""

    shape: KVShape
    eos_ids: frozenset[int]

    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """A session to be: `stops` tells from a candidate's tokens whether a stop text has ended it."""

    prompt_ids: Sequence[int]
    n: int
    sampling: Sampling
    first_round_tokens: int
    stops: Callable[[Sequence[int]], bool] | None = None
    cache_salt: str = ""
    first_candidate: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """An admitted session."""

    n: int
    slots: SlotGauge


@dataclass(frozen=True, slots=True)
class Prefix:
    """A candidate's tokens at a decision token; the last of them, `new_logprobs`, of this round."""

    id: int
    token_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]
    logprob: float
    finish: FinishReason | None

    @property
    def num_new(self) -> int:
        """Tokens of this round."""
        return len(self.new_logprobs)


@dataclass(frozen=True, slots=True)
class PrefixBatch:
    """What a round made."""

    prefixes: tuple[Prefix, ...]
    ended_by: RoundEnd
    num_tokens: int
    slots: SlotGauge


@dataclass(slots=True)
class _Candidate:
    id: int
    token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)  # since the last report
    logprob: float = 0.0
    finish: FinishReason | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """One prompt and its candidates; `rows[i]` is the candidate in row i of the suffix store."""

    id: int
    command: OpenCommand
    opened: Future[Opened]
    n: int = 0
    prompt: Piece[PromptKV] | None = None  # the last piece of its chain
    suffix: SuffixKV | None = None
    is_reading: bool = True  # until the first tokens are drawn
    last_step: int = 0
    rows: list[_Candidate] = field(default_factory=list)
    unreported: list[_Candidate] = field(default_factory=list)  # live when the round began
    num_tokens: int = 0  # tokens of every live candidate
    until: int = 0
    growing: Future[PrefixBatch] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.command.prompt_ids)

    @property
    def max_tokens(self) -> int:
        return self.command.sampling.max_tokens

    def unread(self) -> Piece[PromptKV]:
        """The first piece of the prompt that is not computed; the last one if all are."""
        assert self.prompt
        chain = self.prompt.chain()
        return next((piece for piece in chain if not piece.is_computed), self.prompt)

    def slots_for(self, rows: int, tokens: int) -> int:
        """Slots for `rows` candidates of `tokens` tokens, without the prompt.

        A candidate's newest token is not stored until the next step reads it.
        """
        return rows * max(0, tokens - 1)


class Engine:
    """Sessions over one model and one ledger of slots; methods may be called from any thread."""

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
        on_step: OnStep | None = None,
    ) -> None:
        """`auto_candidates` bounds N where it is left to the engine.

        A step takes at most `prefill_chunk` prompt tokens and the rows of `max_rows` candidates
        (or of one session, if it has more). Prompts that no session uses any more stay in up to
        `prefix_cache_slots` slots. `on_step` is called after every step, in the engine's thread.
        """
        self._model = model
        self._capacity_slots = capacity_slots
        self._prefix_cache_slots = prefix_cache_slots
        self._open_books()
        self._max_rows = max_rows
        self._num_steps = 0
        self._on_step = on_step
        self._tally = Tally()
        self._max_waiting = max_waiting
        self._auto_candidates = auto_candidates
        self._prefill_chunk = prefill_chunk
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[_Session] = deque()
        self._sessions: dict[int, _Session] = {}
        self._ids = itertools.count(1)
        self._stopping = False
        self._dead = False
        self._step_began: float | None = None
        self._thread = ComputeThread("engine", self._run)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what is open, waits or comes later fails with Unavailable.

        Waits `timeout_s` seconds for the step under way, which may never end.
        """
        self._commands.put(self._stop)
        self._thread.join(timeout_s)

    def open(self, command: OpenCommand) -> tuple[int, Future[Opened]]:
        """A session's id at once; the future waits for its slots.

        The future raises InvalidRequest (it can never fit) or Overloaded (too many wait).
        """
        session = _Session(next(self._ids), command, Future())
        return session.id, self._send(session.opened, lambda: self._open(session))

    def extend(self, session_id: int, until_tokens: int) -> Future[PrefixBatch]:
        """Grow all live candidates to `until_tokens` new tokens (at most max_tokens)."""
        future: Future[PrefixBatch] = Future()
        return self._send(future, lambda: self._extend(session_id, until_tokens, future))

    def prune(self, session_id: int, keep: Collection[int]) -> Future[Pruned]:
        """Free the slots of every live candidate not in `keep`; other ids in it are ignored."""
        future: Future[Pruned] = Future()
        return self._send(future, lambda: _resolve(future, self._prune(session_id, set(keep))))

    def close(self, session_id: int) -> Future[int]:
        """Free all that a session holds, waiting or running; slots freed, 0 if it is gone."""
        future: Future[int] = Future()
        return self._send(future, lambda: _resolve(future, self._close(session_id)))

    def gauge(self, session_id: int = 0) -> SlotGauge:
        """Slots now (session 0: of no session)."""
        ledger, session = self.ledger, self._sessions.get(session_id)
        prompt = session.prompt_tokens if session else 0
        own = prompt + ledger.owned_by(session_id)
        return SlotGauge(ledger.capacity, ledger.owned, own, ledger.cached)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def heartbeat_s(self) -> float:
        """Seconds that the step under way takes already; 0 between steps, infinite without a thread
        that could take one."""
        began = self._step_began
        if self._dead or (not self._thread.is_alive() and not self._stopping):
            return math.inf
        return time.monotonic() - began if began is not None else 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError if books, prompts and tensors disagree; while the engine idles."""
        self.ledger.check_integrity()
        self._prefixes.check_integrity()
        slot_bytes = self._model.shape.slot_bytes
        for piece in self._prefixes.pieces():
            assert piece.store.num_bytes == len(piece.tokens) * slot_bytes
        for session in self._sessions.values():
            assert session.suffix
            owned, share = self.ledger.owned_by(session.id), self.ledger.share_of(session.id)
            assert owned == session.suffix.live * session.suffix.length
            assert session.suffix.num_bytes <= share * slot_bytes

    # The thread

    def _open_books(self) -> None:
        """All slots free, no prompt kept."""
        self.ledger = SlotLedger(self._capacity_slots)
        self._prefixes: PrefixTree[PromptKV] = PrefixTree(
            self.ledger,
            lambda tokens: PromptKV(self._model.shape, tokens),
            self._prefix_cache_slots,
        )

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn_or_start_over()
        except BaseException:
            # Such as a SystemExit in somebody's hook. Whoever waits, or comes later, must be told.
            log.critical("the engine's thread ends", exc_info=True)
            self._start_over(_gone())
            self._dead = True  # from here on senders look after their commands themselves
            self._drain()

    def _turn_or_start_over(self) -> None:
        try:
            self._turn()
        except Exception:
            # A bug. Sessions in an unknown state are worth less than those still to come.
            log.exception("the engine starts over, without its sessions")
            self._start_over(InternalError("the generator had to start over"))

    def _turn(self) -> None:
        self._execute_commands()
        self._admit_waiting()
        if work := self._pick():
            self._step(work)
            self._admit_waiting()  # a session that failed has left room

    def _execute_commands(self) -> None:
        """Everything that was sent; blocks only when there is nothing else to do."""
        if not self._has_work():
            if self._sessions:
                self.ledger.check_integrity()
            else:
                self.check_integrity()
            self._commands.get()()
        self._drain()

    def _drain(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _has_work(self) -> bool:
        return any(s.growing or s.is_reading for s in self._sessions.values())

    def _pick(self) -> list[tuple[_Session, Segment]]:
        """Sessions that can grow by a token, longest waiting first, and prompts to be read."""
        work: list[tuple[_Session, Segment]] = []
        rows = 0
        growing = [s for s in self._sessions.values() if s.growing and not s.is_reading]
        for session in sorted(growing, key=lambda session: session.last_step):
            if work and rows + len(session.rows) > self._max_rows:
                continue
            if self._make_room(session):
                assert session.suffix
                work.append((session, DecodeSegment(_stores(session.prompt), session.suffix)))
                rows += len(session.rows)
        return work + self._pick_unread()

    def _pick_unread(self) -> list[tuple[_Session, Segment]]:
        """Chunks of the oldest unread prompts; what two have in common is read by one of them."""
        work: list[tuple[_Session, Segment]] = []
        room = self._prefill_chunk
        being_read: set[Piece[PromptKV]] = set()
        for session in self._sessions.values():
            if session.is_reading and room:
                piece = session.unread()
                if piece.is_computed or piece not in being_read:
                    being_read.add(piece)
                    segment = _chunk(piece, room, piece.end == session.prompt_tokens)
                    work.append((session, segment))
                    room -= segment.num_rows
        return work

    def _step(self, work: list[tuple[_Session, Segment]]) -> None:
        """One forward pass; a failure ends the sessions in it, never the thread."""
        self._num_steps += 1
        self._step_began = time.monotonic()
        try:
            logits = self._forward(work)
            for (session, segment), rows in zip(work, logits, strict=True):
                if isinstance(segment, PrefillSegment):
                    self._read_chunk(session, segment, rows)
                else:
                    self._grow(session, rows)
        except Exception as error:
            log.exception("step failed with %d sessions", len(work))
            failure = InternalError("the generator's step failed")
            failure.__cause__ = error
            for session, _ in work:
                self._fail(session, failure)
        finally:
            self._tell(work, time.monotonic() - self._step_began)
            self._step_began = None

    def _tell(self, work: list[tuple[_Session, Segment]], seconds: float) -> None:
        """What a step took and made, to whoever wants to know."""
        tally, self._tally = self._tally, Tally()
        if self._on_step:
            rows = sum(s.num_rows for _, s in work if not isinstance(s, PrefillSegment))
            self._on_step(tally.step(seconds, rows))

    def _forward(self, work: list[tuple[_Session, Segment]]) -> tuple[Tensor, ...]:
        """Float32 logits per session: of each live row, or of a chunk's last token."""
        token_ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for session, segment in work:
            if isinstance(segment, PrefillSegment):
                end = segment.start + segment.num_rows
                token_ids += session.command.prompt_ids[segment.start : end]
                positions += range(segment.start, end)
                last.append(len(token_ids) - 1)
            else:
                last += range(len(token_ids), len(token_ids) + segment.num_rows)
                token_ids += [candidate.token_ids[-1] for candidate in session.rows]
                positions += [segment.position] * segment.num_rows
        segments = [segment for _, segment in work]
        logits = self._model.forward(token_ids, positions, segments, last)
        rows = [1 if isinstance(s, PrefillSegment) else s.num_rows for s in segments]
        return torch.split(logits, rows)

    def _read_chunk(self, session: _Session, segment: PrefillSegment, logits: Tensor) -> None:
        """A chunk is stored; after the last one all candidates draw their first token from it."""
        if not segment.stored:
            session.unread().computed += segment.num_rows
            self._tally.prefilled += segment.num_rows
        if segment.start + segment.num_rows == session.prompt_tokens:
            session.is_reading = False
            if session.rows:  # a prune may have come before
                self._append(session, logits.expand(len(session.rows), -1))
            self._end_round_if_over(session)

    def _grow(self, session: _Session, logits: Tensor) -> None:
        """The rows' newest tokens are stored; append the next ones."""
        assert session.suffix
        session.last_step = self._num_steps
        session.suffix.advance()
        self.ledger.take(session.id, session.suffix.live)
        self._append(session, logits)
        self._end_round_if_over(session)

    def _append(self, session: _Session, logits: Tensor) -> None:
        """Draw each live candidate's next token; drop those that it finishes."""
        ids = [candidate.id for candidate in session.rows]
        sampling, step = session.command.sampling, session.num_tokens
        forbidden = self._model.eos_ids if step < sampling.min_tokens else ()
        tokens, logprobs = sample(logits, sampling, ids, step, forbidden)
        session.num_tokens += 1
        self._tally.generated += len(ids)
        for candidate, token, logprob in zip(
            session.rows, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            candidate.token_ids.append(token)
            candidate.new_logprobs.append(logprob)
            candidate.logprob += logprob
            candidate.finish = self._finish_of(session, candidate)
        for row in reversed(range(len(session.rows))):
            if session.rows[row].finish:
                self._drop(session, row)

    def _finish_of(self, session: _Session, candidate: _Candidate) -> FinishReason | None:
        sampling, stops = session.command.sampling, session.command.stops
        if not sampling.ignore_eos and candidate.token_ids[-1] in self._model.eos_ids:
            return FinishReason.STOP
        if stops and session.num_tokens >= sampling.min_tokens and stops(candidate.token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if session.num_tokens >= sampling.max_tokens else None

    def _drop(self, session: _Session, row: int) -> None:
        """A finished candidate holds no slots: the last row takes its place."""
        assert session.suffix
        session.suffix.drop(row)
        self.ledger.give_back(session.id, session.suffix.length)
        session.rows[row] = session.rows[-1]
        session.rows.pop()

    def _make_room(self, session: _Session) -> bool:
        """Room for one more token per row; without it the round ends here.

        Memory that cannot be had ends this session and no other.
        """
        assert session.suffix
        suffix = session.suffix
        if suffix.live > self.ledger.room_of(session.id):
            self._end_round(session, RoundEnd.SLOTS_FULL)
            return False
        if suffix.length == suffix.tokens_room:
            share = self.ledger.share_of(session.id)
            try:
                most = share // suffix.live
                wanted = min(session.until - 1, most)
                # Later rounds have fewer rows and more tokens in the same slots: all of them.
                suffix.reserve(wanted, slots=share if wanted == most else 0)
            except Exception:
                log.exception("no memory for a session's tokens")
                self._fail(session, InternalError("the generator cannot hold the session"))
                return False
        return True

    def _end_round_if_over(self, session: _Session) -> None:
        if not session.growing:
            return
        if not session.rows:
            self._end_round(session, RoundEnd.ALL_FINISHED)
        elif session.num_tokens >= session.until:
            self._end_round(session, RoundEnd.DECISION_TOKEN)

    def _end_round(self, session: _Session, ended_by: RoundEnd) -> None:
        prefixes = tuple(_report(candidate) for candidate in session.unreported)
        session.unreported = sorted(session.rows, key=lambda candidate: candidate.id)
        growing, session.growing = session.growing, None
        assert growing
        batch = PrefixBatch(prefixes, ended_by, session.num_tokens, self.gauge(session.id))
        _resolve(growing, batch)

    # Commands, executed by the thread

    def _send(self, future: Future[T], command: Callable[[], None]) -> Future[T]:
        self._commands.put(lambda: self._attempt(future, command))
        if self._stopping or self._dead:
            self._drain()  # the thread may have looked for the last time
        return future

    def _attempt(self, future: Future[T], command: Callable[[], None]) -> None:
        """A command's failure is its sender's, never the thread's."""
        try:
            command()
        except SpecrejError as error:
            _refuse(future, error)
        except Exception:
            log.exception("command failed")
            _refuse(future, InternalError("the generator's command failed"))

    def _open(self, session: _Session) -> None:
        if self._stopping or self._dead:
            raise _gone()
        needed = session.prompt_tokens + self._floor(session, max(1, session.command.n))
        if needed > self.ledger.capacity:
            raise InvalidRequest(
                [Violation("n", f"needs {needed} KV slots, capacity is {self.ledger.capacity}")],
                reason="SLOTS_EXCEEDED",
                metadata={
                    "needed": str(needed),
                    "capacity": str(self.ledger.capacity),
                    "candidates": str(self._most_candidates(session)),
                },
            )
        self._waiting.append(session)
        self._admit_waiting()
        if session in self._waiting and len(self._waiting) > self._max_waiting:
            self._waiting.remove(session)
            raise Overloaded(f"{self._max_waiting} sessions wait for slots already")

    def _admit_waiting(self) -> None:
        """First come, first served: nobody overtakes, so nobody starves."""
        while self._waiting and self._fits(self._waiting[0]):
            session = self._waiting.popleft()
            try:
                self._admit(session)
            except Exception:
                log.exception("cannot admit a session")
                self._close(session.id)
                _refuse(session.opened, InternalError("the generator cannot hold the session"))

    def _admit(self, session: _Session) -> None:
        command = session.command
        session.n = command.n or self._choose_n(session)
        session.prompt = self._prefixes.acquire(command.cache_salt, command.prompt_ids)
        self._sessions[session.id] = session  # from here on, closing it frees all it has
        found = (piece for piece in session.prompt.chain() if piece.computed or piece.users > 1)
        self._tally.reused += sum(len(piece.tokens) for piece in found)
        floor = self._floor(session, session.n)
        want = session.slots_for(session.n, session.max_tokens)
        self.ledger.admit(session.id, floor, want, len(self._waiting))
        self._prefixes.make_room()
        session.suffix = SuffixKV(self._model.shape, session.n)
        first = command.first_candidate
        session.rows = [_Candidate(number) for number in range(first, first + session.n)]
        session.unreported = list(session.rows)
        _resolve(session.opened, Opened(session.n, self.gauge(session.id)))

    def _fits(self, session: _Session) -> bool:
        """Whether a waiting session can have its prompt and the least useful share now."""
        missing = self._prefixes.missing(session.command.cache_salt, session.command.prompt_ids)
        return self.ledger.can_admit(missing + self._floor(session, max(1, session.command.n)))

    def _floor(self, session: _Session, n: int) -> int:
        """The least useful share: a first round for all, or the whole answer for one."""
        first = min(session.command.first_round_tokens, session.max_tokens)
        return max(session.slots_for(n, first), session.slots_for(1, session.max_tokens))

    def _most_candidates(self, session: _Session) -> int:
        """How many candidates of this prompt could ever be admitted; 0 if not even one."""
        room = self.ledger.capacity - session.prompt_tokens
        first = min(session.command.first_round_tokens, session.max_tokens)
        return room // max(1, first - 1) if room >= self._floor(session, 1) else 0

    def _choose_n(self, session: _Session) -> int:
        """As many candidates as the free slots take to the end of the first round."""
        first = min(session.command.first_round_tokens, session.max_tokens)
        missing = self._prefixes.missing(session.command.cache_salt, session.command.prompt_ids)
        room = self.ledger.unshared - missing
        return max(1, min(self._auto_candidates, room // max(1, first - 1)))

    def _extend(self, session_id: int, until: int, growing: Future[PrefixBatch]) -> None:
        session = self._idle(session_id)
        session.until = min(until, session.max_tokens)
        want = session.slots_for(len(session.rows), session.max_tokens)
        self.ledger.widen(session.id, want, len(self._waiting))
        self._prefixes.make_room()
        session.growing = growing
        if not session.is_reading:
            self._end_round_if_over(session)

    def _prune(self, session_id: int, keep: set[int]) -> Pruned:
        session = self._idle(session_id)
        assert session.suffix
        rows = [row for row, candidate in enumerate(session.rows) if candidate.id in keep]
        freed = (len(session.rows) - len(rows)) * session.suffix.length
        if len(rows) < len(session.rows):
            self.ledger.give_back(session_id, freed)
            session.suffix.keep(rows)
            session.rows = [session.rows[row] for row in rows]
            session.unreported = [c for c in session.unreported if c.finish or c.id in keep]
        self._narrow(session)
        return Pruned(freed, self.gauge(session_id))

    def _narrow(self, session: _Session) -> None:
        """Pass on what the session can no longer need, and its surplus if others wait."""
        assert session.suffix
        live = len(session.rows)
        ahead = session.num_tokens + session.command.first_round_tokens
        want = session.slots_for(live, session.max_tokens)
        floor = max(
            session.slots_for(min(live, 1), session.max_tokens),
            session.slots_for(live, min(ahead, session.max_tokens)),
        )
        self.ledger.narrow(session.id, floor, want, len(self._waiting))
        session.suffix.shrink(self.ledger.share_of(session.id))

    def _close(self, session_id: int) -> int:
        waiting = next((s for s in self._waiting if s.id == session_id), None)
        if waiting:
            self._waiting.remove(waiting)
        session = self._sessions.pop(session_id, None)
        if session is None:
            return 0
        if session.growing:
            session.growing.cancel()
        before = self.ledger.owned
        self.ledger.close(session_id)
        if session.prompt:
            self._prefixes.release(session.prompt)
        return before - self.ledger.owned

    def _idle(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise _gone() if self._dead else SessionExpired("the session is closed")
        if session.growing:
            raise OutOfOrder("the session's round is still running")
        return session

    def _fail(self, session: _Session, error: SpecrejError) -> None:
        growing, session.growing = session.growing, None
        try:
            self._close(session.id)
        finally:
            if growing:
                _refuse(growing, error)

    def _stop(self) -> None:
        self._stopping = True
        self._end_all(_gone())

    def _start_over(self, error: SpecrejError) -> None:
        """As on the first day: nothing of what there was can be relied on, not even to close it."""
        lost = [*self._waiting, *self._sessions.values()]
        self._waiting.clear()
        self._sessions.clear()
        self._open_books()
        for session in lost:
            _refuse(session.opened, error)
            if session.growing:
                _refuse(session.growing, error)

    def _end_all(self, error: SpecrejError) -> None:
        for session in [*self._waiting, *self._sessions.values()]:
            _refuse(session.opened, error)
            self._fail(session, error)


def _stores(leaf: Piece[PromptKV] | None) -> tuple[PromptKV, ...]:
    return tuple(piece.store for piece in leaf.chain()) if leaf else ()


def _chunk(piece: Piece[PromptKV], room: int, is_last: bool) -> PrefillSegment:
    """The next tokens of a piece to compute, at most `room`; its last token once more if none."""
    stored = piece.is_computed
    offset = len(piece.tokens) - 1 if stored else piece.computed
    left = len(piece.tokens) - offset
    count = min(room, left)
    if is_last and count == left > 1:
        # The token that first draws depend on is computed by itself, as it is where the prompt is
        # stored: among others it would come out a little different, and so might a close draw.
        count -= 1
    return PrefillSegment(_stores(piece), piece.start + offset, offset, count, stored)


def _report(candidate: _Candidate) -> Prefix:
    new_logprobs, candidate.new_logprobs = tuple(candidate.new_logprobs), []
    return Prefix(
        candidate.id,
        tuple(candidate.token_ids),
        new_logprobs,
        candidate.logprob,
        candidate.finish,
    )


def _gone() -> Unavailable:
    return Unavailable("the generator is shutting down")


def _resolve(future: Future[T], value: T) -> None:
    """Hand over a result, unless its sender has gone: at any moment, from another thread."""
    with suppress(InvalidStateError):
        future.set_result(value)


def _refuse(future: Future[T], error: SpecrejError) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
