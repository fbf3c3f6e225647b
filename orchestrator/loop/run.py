"""One request, one loop: extend, score, reject, prune, until no candidate is live.

The same loop drives remote backends in production, engines in one process in experiments, and toys
in tests. It does not depend on the wire, the cache or admission.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.loop import rejection, schedule
from orchestrator.loop.branching import forks_of
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.run_state import RunState
from orchestrator.loop.scoring import RequestScorer
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    Degradation,
    Event,
    Finished,
    FinishReason,
    Forks,
    GenerationRequest,
    Generator,
    Round,
    RoundCompleted,
    RoundEnd,
    RoundTrace,
    Scorer,
    Selection,
    Session,
    SessionSpec,
    WeightedReward,
)
from specrej.errors import InternalError, RewardInvalid, Unavailable
from specrej.telemetry import metrics, names
from specrej.telemetry.traces import Attribute


class _OutOfTime(Exception):
    """The generator's answer did not arrive before the deadline."""


# Receives a round, the latest raw scores by candidate, and the candidates live after the cut.
OnRound = Callable[[Round, Mapping[int, tuple[float, ...]], Collection[int]], None]

# The rewards of a request that names none: the scorer's values as they are.
_UNWEIGHTED = (WeightedReward(""),)


async def run(
    request: GenerationRequest,
    generator: Generator,
    scorers: Scorer | Sequence[Scorer],
    cache_salt: str = "",
    time_left_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_round: OnRound | None = None,
) -> AsyncGenerator[Event, None]:
    """Events of one valid request, without a request id; the last one is `Finished`.

    `scorers` has one scorer per reward of the request, in the request's order. The generator shares
    prompt prefixes only between runs with equal `cache_salt`. With `time_left_s` seconds to the
    deadline, cuts become deeper or earlier if a complete answer would otherwise be late. `clock`
    returns seconds. Close the iterator with `contextlib.aclosing`: it owns the open sessions.

    Raises:
        DeadlineExceeded: no answer was complete in time, and the request allows no degradation.
        TimeoutError: a reward did not return in time, and the request allows no degradation.
    """
    began = clock()
    deadline = DeadlineController(
        partial(_decision_token, request), request.sampling.max_tokens, time_left_s, clock
    )
    async with _opened(request, generator, scorers, cache_salt) as (session, scorer):
        rewards = request.selection.rewards or _UNWEIGHTED
        state = RunState(
            session.n,
            session.prompt_tokens,
            rewards,
            keeps_tokens=request.sampling.logprobs,
            prefer_complete=request.selection.prefer_complete,
        )
        state.open_ms, state.reduced = (clock() - began) * 1e3, session.reduced
        current = _Run(request, session, scorer, state, deadline, clock, on_round)
        with current.degradable():
            yield Admitted(session.n, session.prompt_tokens)
            while state.live and not deadline.is_over:
                completed = await current.round()
                if len(state.rounds) == 1:
                    state.first_round_ms = (clock() - began) * 1e3
                yield completed
    if not state.ended():
        state.cut_short(may_degrade=request.allow_degraded)
    state.hurried = deadline.hurried or bool(state.live)
    total_ms = (clock() - began) * 1e3
    yield Finished(state.generation(request.selection.return_candidates, total_ms))


@asynccontextmanager
async def _opened(
    request: GenerationRequest,
    generator: Generator,
    scorers: Scorer | Sequence[Scorer],
    cache_salt: str,
) -> AsyncIterator[tuple[Session, RequestScorer]]:
    """A generator session and the rewards' sessions, with spans of their opening and closing."""
    n, first_tokens = request.selection.n, first_round_tokens(request)
    spec = SessionSpec(
        request.prompt, n, request.sampling, first_tokens, cache_salt, adapter=request.model
    )
    several = scorers if isinstance(scorers, Sequence) else [scorers]
    scoring = RequestScorer(several, request.prompt, may_fall_back=request.allow_degraded)
    async with AsyncExitStack() as stack:
        with telemetry.span(names.SPAN_OPEN):
            session = await stack.enter_async_context(generator.open(spec))
            scorer = await stack.enter_async_context(scoring)
        yield session, scorer
        with telemetry.span(names.SPAN_CLOSE):
            await stack.aclose()


@dataclass(frozen=True, slots=True)
class _Run:
    """One request while its sessions are open."""

    request: GenerationRequest
    session: Session
    scorer: RequestScorer
    state: RunState
    deadline: DeadlineController
    clock: Callable[[], float]
    on_round: OnRound | None

    @contextmanager
    def degradable(self) -> Iterator[None]:
        """End the rounds early after errors that leave an answer, and count candidates' fates."""
        try:
            yield
        except _OutOfTime:
            pass
        except (Unavailable, InternalError) as error:
            has_answer = self.request.allow_degraded and self.state.ended()
            if isinstance(error, RewardInvalid) or not has_answer:
                raise
            self.state.degradations.append(Degradation.GENERATOR)
        finally:
            _count_fates(self.state)

    async def round(self) -> RoundCompleted:
        """Extend all live candidates, score them, reject the lowest, free their slots."""
        state, number = self.state, len(self.state.rounds) + 1
        with telemetry.span(names.SPAN_ROUND, {names.ROUND_NUMBER: number}) as span:
            times = [self.clock()]
            with telemetry.span(names.SPAN_EXTEND):
                ended = await self._extend()
            state.take(ended, may_degrade=self.request.allow_degraded)
            times.append(self.clock())
            await self._score(ended)
            times.append(self.clock())
            with telemetry.span(names.SPAN_PRUNE):
                alpha, forks, freed = await self._reject(ended)
            times.append(self.clock())
            if self.on_round:
                self.on_round(ended, state.raw, state.live)
            trace = state.trace(number, ended, freed, times, alpha, forks)
            span.set_attributes(_attributes(trace))
        return RoundCompleted(trace, tuple(sorted(state.live)), state.best_text())

    async def _extend(self) -> Round:
        """Grow to the next decision token, in strides short enough to notice a near deadline."""
        position, rows = self.state.num_tokens, len(self.state.live)
        until = _decision_token(self.request, position)
        whole: Round | None = None
        while True:
            began = self.clock()
            stride_tokens = self.deadline.stride_tokens(position, until, rows)
            try:
                async with asyncio.timeout(self.deadline.patience_s):
                    part = await self.session.extend(position + stride_tokens)
            except TimeoutError:
                raise _OutOfTime from None
            num_ended = sum(candidate.finish is not None for candidate in part.candidates)
            grown = part.num_tokens - position
            self.deadline.note_stride(rows, grown, num_ended, self.clock() - began)
            whole = part if whole is None else _joined(whole, part)
            position, rows = part.num_tokens, rows - num_ended
            if part.ended_by is not RoundEnd.DECISION_TOKEN or position >= until or not rows:
                return whole
            if self.deadline.is_over or self.deadline.must_cut(position, until, rows):
                return whole

    async def _score(self, ended: Round) -> None:
        """Score what is live and what has just ended; live candidates only while there is time.

        A candidate that has just ended can be the answer only if it is scored.
        """
        began, candidates = self.clock(), ended.candidates
        if any(c.finish for c in candidates) or (candidates and not self.deadline.is_over):
            with telemetry.span(names.SPAN_SCORE):
                raw = await self.scorer.score(candidates, self.deadline.score_patience_s)
                self.state.judge(candidates, raw)
        self.deadline.note_scoring(len(candidates), self.clock() - began)

    async def _reject(self, ended: Round) -> tuple[float, Forks, int]:
        """Cut the ranking, then fork; returns the fraction rejected, the forks and freed slots."""
        state, selection, live = self.state, self.request.selection, len(self.state.live)
        branching = selection.branching
        alpha = 0.0 if branching or is_best_of_n(selection) else selection.alpha
        if not live or self.deadline.is_over:
            return alpha, {}, 0
        if not branching:
            alpha = self.deadline.alpha(state.num_tokens, len(state.ranked), alpha)
        is_full = ended.ended_by is RoundEnd.SLOTS_FULL
        release = rejection.num_released(live, ended.num_tokens) if is_full else 0
        cut = rejection.cut(
            state.scores(state.ranked),
            state.live,
            alpha,
            release=max(release, live - branching.keep) if branching else release,
            vetoed=state.vetoed,
            has_answer=state.has_answer,
        )
        rejected = state.live & cut.rejected
        state.keep(cut.kept)
        forks: Forks = {}
        if branching and not is_full:
            survivors = state.ranking(state.live)
            width = self.deadline.width(state.num_tokens, branching.width, len(survivors))
            forks = forks_of(survivors, width, state.next_id)
            state.next_id += len(forks)
            metrics.record(names.BRANCH_ROOTS, len({*map(state.root, survivors)}))
        if not rejected and not forks:
            return alpha, {}, 0
        pruned = await self.session.prune(state.live, forks)
        forks = {n: parent for n, parent in forks.items() if n not in pruned.refused}
        state.fork(forks)
        return alpha, forks, pruned.freed_slots


def is_best_of_n(selection: Selection) -> bool:
    """Whether nothing is rejected."""
    return selection.algorithm is Algorithm.BEST_OF_N


def first_round_tokens(request: GenerationRequest) -> int:
    """Tokens that every candidate must be able to reach before the first cut.

    Best-of-N never cuts: all candidates must reach their end.
    """
    if is_best_of_n(request.selection):
        return request.sampling.max_tokens
    return schedule.first_round_tokens(request.selection.schedule, request.sampling.max_tokens)


def _decision_token(request: GenerationRequest, num_tokens: int) -> int:
    planned, max_tokens = request.selection.schedule, request.sampling.max_tokens
    if is_best_of_n(request.selection):
        return max_tokens
    return schedule.next_decision_token(planned, num_tokens, max_tokens)


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


def _attributes(trace: RoundTrace) -> Mapping[str, Attribute]:
    """Attributes of a round's span."""
    return {
        names.NUM_STARTED: trace.num_started,
        names.NUM_FINISHED: trace.num_finished,
        names.NUM_REJECTED: trace.num_rejected,
        names.NUM_LIVE: trace.num_live,
        names.DECISION_TOKEN: trace.decision_token,
        names.ENDED_BY: trace.ended_by.value,
        names.ROUND_TOKENS: trace.generated_tokens,
        names.SESSION_SLOTS: trace.session_slots,
        names.FREED_SLOTS: trace.freed_slots,
        names.BEST_SCORE: trace.best_score,
        names.SCORES: trace.scores[: names.MAX_SCORES],
        names.ALPHA: trace.alpha,
    }


def _count_fates(state: RunState) -> None:
    """Count the candidates of a run that has ended: finished, truncated, rejected or abandoned."""
    fates: Counter[str] = Counter()
    for number in {*range(state.n), *state.latest}:
        candidate = state.latest.get(number)
        if candidate and candidate.finish:
            is_truncated = candidate.finish is FinishReason.LENGTH
            fates["truncated" if is_truncated else "finished"] += 1
        else:
            is_abandoned = candidate is None or number in state.live | state.lost
            fates["abandoned" if is_abandoned else "rejected"] += 1
    for fate, count in fates.items():
        metrics.add(names.CANDIDATES, count, fate=fate)
