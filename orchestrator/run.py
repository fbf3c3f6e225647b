"""One request, one loop: extend, score, cut, prune, until nothing is live.

The same loop runs over gRPC in production, in one process in experiments, and on toys in tests.
Knows no wire, no cache, no admission.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from orchestrator import instruments, rejection
from orchestrator.board import Board
from orchestrator.pacing import Pace
from orchestrator.schedule import next_decision_token
from orchestrator.scoring import Jury, Panel
from orchestrator.shadow import Notes
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    Degradation,
    Event,
    Finished,
    GenerationRequest,
    Generator,
    Round,
    RoundCompleted,
    RoundEnd,
    Scorer,
    Session,
    WeightedReward,
)
from specrej.errors import InternalError, RewardInvalid, Unavailable
from specrej.telemetry import names


class _OutOfTime(Exception):
    """The generator did not answer while there was time."""


# For a request that names no reward: what the scorer says, as it is.
_PLAIN = (WeightedReward(""),)


async def run(
    request: GenerationRequest,
    generator: Generator,
    scorer: Scorer | Panel,
    cache_salt: str = "",
    time_left_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    notes: Notes | None = None,
) -> AsyncGenerator[Event, None]:
    """Events of one valid request, the last one `Finished`; its id is the caller's business.

    `scorer` judges by the request's reward; for several it is a panel, with a scorer for each in
    the request's order. Names are the caller's business: none is looked up, no composite known.

    With `time_left_s` seconds to the deadline, cuts are made deeper or earlier where that is what
    it takes to have a complete answer in time. `clock` tells seconds.
    `notes` are taken for shadows.

    The generator shares prompt prefixes only between runs with equal salts.
    Close the iterator (`contextlib.aclosing`): its sessions live as long as it does.

    Raises:
        DeadlineExceeded: no answer was complete in time, and the request allows nothing weaker.
        TimeoutError: a reward did not answer in time, and the same.
    """
    began = time.perf_counter()
    sampling, selection = request.sampling, request.selection
    panel = scorer if isinstance(scorer, Panel) else Panel([scorer])
    pace = Pace(partial(_decision_token, request), sampling.max_tokens, time_left_s, clock)
    opening = generator.open(
        request.prompt, selection.n, sampling, first_round_tokens(request), cache_salt
    )
    judging = Jury(panel, request.prompt, may_fall_back=request.allow_degraded)
    async with _opened(opening, judging) as (session, jury):
        board = Board(
            session.n, session.prompt_tokens, selection.rewards or _PLAIN, sampling.logprobs, notes
        )
        open_ms = _ms_since(began)
        try:
            yield Admitted(session.n, session.prompt_tokens)
            while board.live and not pace.is_over:
                completed = await _round(request, session, jury, board, pace)
                if len(board.rounds) == 1:
                    board.first_round_ms = _ms_since(began)
                yield completed
        except _OutOfTime:
            pass  # what there is will do, or not
        except (Unavailable, InternalError) as error:
            is_generator = not isinstance(error, RewardInvalid)
            if not (is_generator and request.allow_degraded and board.ended()):
                raise
            board.degradations.append(Degradation.GENERATOR)
        finally:
            instruments.count_fates(session.n, board.latest, board.live | board.lost)
    if not board.ended():
        board.cut_short(may_degrade=request.allow_degraded)
    board.hurried = pace.hurried or bool(board.live)
    yield Finished(board.generation(selection.return_candidates, open_ms, _ms_since(began)))


@asynccontextmanager
async def _opened(
    opening: AbstractAsyncContextManager[Session], judging: Jury
) -> AsyncIterator[tuple[Session, Jury]]:
    """A session and those who judge it; how long opening and closing take is shown."""
    async with AsyncExitStack() as stack:
        with telemetry.span(names.SPAN_OPEN):
            session = await stack.enter_async_context(opening)
            jury = await stack.enter_async_context(judging)
        yield session, jury
        with telemetry.span(names.SPAN_CLOSE):
            await stack.aclose()


def first_round_tokens(request: GenerationRequest) -> int:
    """Tokens that every candidate must be able to reach before the first cut.

    Best-of-N never cuts: all candidates must reach their end.
    """
    schedule, max_tokens = request.selection.schedule, request.sampling.max_tokens
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        return max_tokens
    if schedule.kind == "memory":
        # Any cut needs prefixes long enough to judge.
        return min(schedule.first, max_tokens)
    return next_decision_token(schedule, 0, max_tokens)


async def _round(
    request: GenerationRequest, session: Session, jury: Jury, board: Board, pace: Pace
) -> RoundCompleted:
    """Extend all live candidates, score them, reject the lowest, free their slots."""
    number = len(board.rounds) + 1
    with telemetry.span(names.SPAN_ROUND, {names.ROUND_NUMBER: number}) as span:
        laps = _Laps(pace.clock)
        with telemetry.span(names.SPAN_EXTEND):
            ended = await _extend(request, session, board, pace)
        extend_ms = laps.lap_ms()
        board.take(ended, may_degrade=request.allow_degraded)
        # What has just ended can be the answer only if it is scored, however late it is.
        if any(c.finish for c in ended.candidates) or (ended.candidates and not pace.is_over):
            with telemetry.span(names.SPAN_SCORE):
                ratings = await jury.rate(
                    ended.candidates, board.latest.values(), pace.score_patience_s
                )
                board.judge(ended.candidates, ratings)
        score_ms = laps.lap_ms()
        pace.note_scoring(len(ended.candidates), score_ms / 1e3)
        with telemetry.span(names.SPAN_PRUNE):
            alpha, freed = await _reject(request, session, board, ended, pace)
        if board.notes:
            board.notes.take(ended, board.raw, board.live)
        laps_ms = (extend_ms, score_ms, laps.lap_ms())
        trace = board.trace(number, ended, freed, laps_ms, alpha)
        span.set_attributes(instruments.of_round(trace))
    return RoundCompleted(trace, tuple(sorted(board.live)), board.best_text())


async def _extend(request: GenerationRequest, session: Session, board: Board, pace: Pace) -> Round:
    """To the next decision token, in strides that end early enough to notice that time is short."""
    position, rows = board.num_tokens, len(board.live)
    until = _decision_token(request, position)
    whole: Round | None = None
    while True:
        laps = _Laps(pace.clock)
        stride = pace.stride_tokens(position, until, rows)
        try:
            async with asyncio.timeout(pace.patience_s):
                part = await session.extend(position + stride)
        except TimeoutError:
            raise _OutOfTime from None
        num_ended = sum(candidate.finish is not None for candidate in part.candidates)
        grown = part.num_tokens - position
        pace.note_stride(rows, grown, num_ended, laps.lap_ms() / 1e3)
        whole = part if whole is None else _joined(whole, part)
        position, rows = part.num_tokens, rows - num_ended
        if part.ended_by is not RoundEnd.DECISION_TOKEN or position >= until or not rows:
            return whole
        if pace.is_over or pace.must_cut(position, until, rows):
            return whole


def _joined(first: Round, second: Round) -> Round:
    """Two strides as one round."""
    candidates = {candidate.id: candidate for candidate in first.candidates}
    for later in second.candidates:
        before = candidates.get(later.id)
        if before:
            later = replace(
                later,
                new_token_ids=before.new_token_ids + later.new_token_ids,
                new_logprobs=before.new_logprobs + later.new_logprobs,
            )
        candidates[later.id] = later
    return replace(
        second,
        candidates=tuple(candidates[number] for number in sorted(candidates)),
        repeated_tokens=first.repeated_tokens + second.repeated_tokens,
        lost=first.lost + second.lost,
        made_by=first.made_by | second.made_by,
    )


def _decision_token(request: GenerationRequest, num_tokens: int) -> int:
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        return request.sampling.max_tokens
    return next_decision_token(request.selection.schedule, num_tokens, request.sampling.max_tokens)


async def _reject(
    request: GenerationRequest, session: Session, board: Board, ended: Round, pace: Pace
) -> tuple[float, int]:
    """Cut the ranking; returns the fraction rejected and the slots freed."""
    best_of_n = request.selection.algorithm is Algorithm.BEST_OF_N
    alpha = 0.0 if best_of_n else request.selection.alpha
    if not board.live or pace.is_over:
        return alpha, 0
    alpha = pace.alpha(board.num_tokens, len(board.ranked), alpha)
    outcome = rejection.cut(
        board.scores(board.ranked),
        board.live,
        alpha,
        must_release=ended.ended_by is RoundEnd.SLOTS_FULL,
        vetoed=board.vetoed,
        has_answer=board.has_answer,
    )
    rejected = board.live & outcome.rejected
    board.keep(outcome.kept)
    return alpha, (await session.prune(board.live)).freed_slots if rejected else 0


class _Laps:
    """Laps on a monotonic clock of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        before, self._at = self._at, self._clock()
        return (self._at - before) * 1e3


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
