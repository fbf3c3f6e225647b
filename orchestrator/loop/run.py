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
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial

from orchestrator.loop import rejection, schedule
from orchestrator.loop.branching import forks_of, width_at
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.growth import Growth, OutOfTime, in_time
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from orchestrator.loop.run_state import RunState
from orchestrator.loop.scoring import RawScores, RequestScorer
from orchestrator.loop.token_log import TokenLog
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    Candidate,
    Degradation,
    Event,
    Finished,
    FinishReason,
    Forks,
    Generation,
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
from specrej.contracts.errors import InternalError, RewardInvalid, SpecrejError, Unavailable
from specrej.telemetry import metrics, names
from specrej.telemetry.traces import Attribute

# Receives a round, the latest raw scores by candidate, and the candidates live after the cut.
OnRound = Callable[[Round, Mapping[int, tuple[float, ...]], Collection[int]], None]

# The part of the time left in which rewards must open a session, if likelihoods may replace them.
_OPENING_PART = 0.25

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
    *,
    overlaps: bool = False,
    within: WithinRounds | None = None,
) -> AsyncGenerator[Event, None]:
    """Events of one valid request, without a request id; the last one is `Finished`.

    `scorers` has one scorer per reward of the request, in the request's order. The generator shares
    prompt prefixes only between runs with equal `cache_salt`. With `time_left_s` seconds to the
    deadline, cuts become deeper or earlier if a complete answer would otherwise be late. `clock`
    returns seconds. If it `overlaps`, live candidates grow on while scores are under way, as long
    as no other session holds slots of their generator. `within` receives the events within rounds,
    which are not among those of the iterator. Close the iterator with
    `contextlib.aclosing`: it owns the open sessions.

    Raises:
        DeadlineExceeded: fewer than `min_answers` answers were complete in time, and the request
            allows no degradation.
        TimeoutError: a reward did not return in time, and the request allows no degradation.
    """
    began = clock()
    # Cached: the controller extrapolates over all decision tokens, several times per round.
    next_token, least = cache(partial(_decision_token, request)), request.selection.min_answers
    deadline = DeadlineController(
        *(next_token, request.sampling.max_tokens, time_left_s, clock, least),
        can_reject=not is_best_of_n(request.selection),
    )
    async with _opened(request, generator, scorers, cache_salt, deadline) as (session, scorer):
        rewards = request.selection.rewards or _UNWEIGHTED
        state = RunState(
            session.n,
            session.prompt_tokens,
            rewards,
            TokenLog(is_kept=request.sampling.logprobs),
            prefer_complete=request.selection.prefer_complete,
        )
        state.open_ms, state.reduced = (clock() - began) * 1e3, session.reduced
        growth = Growth(session, deadline, clock)
        progress = ProgressReporter(within, request.sampling.stop) if within else None
        options = (clock, on_round, overlaps, progress)
        current = _Run(request, session, scorer, state, growth, deadline, *options)
        with current.degradable():
            yield Admitted(session.n, session.prompt_tokens)
            while state.live and not deadline.is_over:
                completed = await current.round()
                if len(state.rounds) == 1:
                    state.first_round_ms = (clock() - began) * 1e3
                yield completed
    yield Finished(current.generation(began))


@asynccontextmanager
async def _opened(
    request: GenerationRequest,
    generator: Generator,
    scorers: Scorer | Sequence[Scorer],
    cache_salt: str,
    deadline: DeadlineController,
) -> AsyncIterator[tuple[Session, RequestScorer]]:
    """A generator session and the rewards' sessions, with spans of their opening and closing.

    The answer does not wait beyond the deadline for their end: the calls to them are cancelled.
    """
    n, first_tokens = request.selection.n, first_round_tokens(request)
    spec = SessionSpec(
        request.prompt,
        n,
        request.sampling,
        first_tokens,
        cache_salt,
        adapter=request.model,
        min_answers=request.selection.min_answers,
    )
    several = scorers if isinstance(scorers, Sequence) else [scorers]
    async with AsyncExitStack() as stack:
        with telemetry.span(names.SPAN_OPEN):
            session = await stack.enter_async_context(generator.open(spec))
            patience_s, is_lenient = deadline.patience_s, request.allow_degraded
            if patience_s is not None and is_lenient:
                patience_s *= _OPENING_PART
            scoring = RequestScorer(
                several, request.prompt, may_fall_back=is_lenient, patience_s=patience_s
            )
            try:
                scorer = await stack.enter_async_context(scoring)
            except BaseException:
                metrics.add(names.CANDIDATES, session.n, fate="abandoned")
                raise
        yield session, scorer
        with telemetry.span(names.SPAN_CLOSE), suppress(TimeoutError):
            async with asyncio.timeout(deadline.score_patience_s):
                await stack.aclose()


@dataclass(frozen=True, slots=True)
class _Run:
    """One request while its sessions are open."""

    request: GenerationRequest
    session: Session
    scorer: RequestScorer
    state: RunState
    growth: Growth
    deadline: DeadlineController
    clock: Callable[[], float]
    on_round: OnRound | None
    overlaps: bool
    progress: ProgressReporter | None

    @contextmanager
    def degradable(self) -> Iterator[None]:
        """End the rounds early after errors that leave an answer, and count candidates' fates."""
        try:
            yield
        except OutOfTime:
            pass
        except (Unavailable, InternalError) as error:
            has_answer = self.request.allow_degraded and self.state.ended()
            if isinstance(error, RewardInvalid) or not has_answer:
                raise
            self.state.degradations.append(Degradation.GENERATOR)
        finally:
            _count_fates(self.state)

    def generation(self, began: float) -> Generation:
        """The answer, once the rounds are over; `began`: the run, by its clock.

        Raises:
            DeadlineExceeded: too few answers are complete, and the request allows no degradation.
        """
        state, selection = self.state, self.request.selection
        state.unused_tokens = self.growth.discard(())
        if state.lacks_answers(selection.min_answers):
            state.cut_short(may_degrade=self.request.allow_degraded)
        is_cut = bool(state.live) and Degradation.GENERATOR not in state.degradations
        state.hurried = self.deadline.hurried or self.scorer.is_late or is_cut
        made = state.generation(selection.return_candidates, (self.clock() - began) * 1e3)
        if self.progress:
            self.progress.end(made.best)
        return made

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
            discarded = self.growth.discard(state.live)
            if self.on_round:
                self.on_round(ended, state.raw, state.live)
            trace = state.trace(number, ended, freed, times, alpha, forks, discarded)
            span.set_attributes(_attributes(trace))
        texts = self.progress.texts(ended, trace) if self.progress else ()
        return RoundCompleted(trace, tuple(sorted(state.live)), state.best_text(), texts)

    async def _extend(self) -> Round:
        """Grow to the next decision token."""
        position = self.state.num_tokens
        until, rows = _decision_token(self.request, position), len(self.state.live)
        if not self.progress:
            return await self.growth.extend(position, until, rows)
        # Forks of the last candidate, too, could win.
        is_certain = rows == 1 and not self.state.ended() and not self.request.selection.branching
        most_tokens = self.progress.stride_tokens(rows, is_certain=is_certain)
        report = partial(self.progress.report, is_certain=is_certain)
        return await self.growth.extend(position, until, rows, most_tokens, report)

    async def _score(self, ended: Round) -> None:
        """Score the round's candidates, unless time has run out and none of them has just ended.

        A candidate that has just ended can be the answer only if it is scored.
        """
        began, candidates = self.clock(), ended.candidates
        if any(c.finish for c in candidates) or (candidates and not self.deadline.is_over):
            earlier = self._compared_again(candidates)
            candidates = (*candidates, *earlier)
            with telemetry.span(names.SPAN_SCORE):
                scores = self.scorer.score(candidates, self.deadline.score_patience_s)
                try:
                    scored = await self._growing_ahead(ended, scores)
                except TimeoutError as error:
                    if self._ends_without(ended):
                        raise OutOfTime from None
                    scored = self.scorer.replaced(candidates, error)
                try:
                    self.state.judge(candidates, scored, len(earlier))
                except RewardInvalid as error:  # a sum is not finite
                    replaced = self.scorer.replaced(candidates, error)
                    self.state.judge(candidates, replaced, len(earlier))
            self.deadline.note_scoring(len(candidates), self.clock() - began)

    def _compared_again(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that ended before, if a reward compares the candidates of a batch only: their
        scores of earlier batches are no measure beside these candidates. The best of them, so that
        the batch is no larger than the planned ones."""
        if not self.state.compare:
            return []
        branching = self.request.selection.branching
        most = max(self.state.n, branching.width if branching else 0)
        new = {candidate.id for candidate in candidates}
        again = [self.state.latest[n] for n in self.state.answers() if n not in new]
        return again[: max(0, most - len(candidates))]

    def _ends_without(self, ended: Round) -> bool:
        """Whether enough complete candidates are scored without those that ended in this round,
        whose scores are late. If so, these become no answers: their verdicts are of prefixes."""
        late = {candidate.id for candidate in ended.candidates if candidate.finish}
        if len({*self.state.ended()} - late) < self.request.selection.min_answers:
            return False
        for number in late:
            self.state.verdicts.pop(number, None)
        self.deadline.hurried = True
        return True

    async def _growing_ahead(self, ended: Round, scores: Awaitable[RawScores]) -> RawScores:
        """Await the scores while live candidates grow ahead. Not with branching: forks must begin
        at the decision token."""
        state, is_alone = self.state, ended.slots.owned <= ended.slots.session
        planned = ended.ended_by is RoundEnd.DECISION_TOKEN
        if not (self.overlaps and is_alone and planned and not self.request.selection.branching):
            return await scores
        until = _decision_token(self.request, state.num_tokens)
        return await self.growth.while_waiting(scores, state.num_tokens, until, len(state.live))

    async def _reject(self, ended: Round) -> tuple[float, Forks, int]:
        """Cut the ranking, then fork; returns the fraction rejected, the forks and freed slots."""
        state, selection, live = self.state, self.request.selection, len(self.state.live)
        branching = selection.branching
        alpha = 0.0 if branching or is_best_of_n(selection) else selection.alpha
        if not live or self.deadline.is_over or self.growth.is_broken:
            return alpha, {}, 0  # a cut elsewhere than planned could give another answer
        if not branching:
            alpha = self.deadline.alpha(state.num_tokens, len(state.ranked), live, alpha)
        cut = self._cut(ended, alpha)
        rejected = state.live & cut.rejected
        if branching:
            alpha = len(rejected) / live
        state.keep(cut.kept)
        forks: Forks = {}
        if branching and state.live and ended.ended_by is not RoundEnd.SLOTS_FULL:
            survivors = state.ranking(state.live)
            position, until = state.num_tokens, _decision_token(self.request, state.num_tokens)
            width = width_at(branching, _decision_token(self.request, 0), until - position)
            width = min(width, len(survivors) + state.forks_left)
            width = self.deadline.width(position, width, len(survivors))
            forks = forks_of(survivors, width, state.next_id)
            state.next_id += len(forks)
            metrics.record(names.BRANCH_ROOTS, len({*map(state.root, survivors)}))
        if not rejected and not forks:
            return alpha, {}, 0
        try:
            pruned = await in_time(self.session.prune(state.live, forks), self.deadline.patience_s)
        except (OutOfTime, SpecrejError) as error:
            # The round is complete. The error is raised only if a candidate is still to grow.
            self.growth.fail(error)
            return alpha, {}, 0
        forks = {n: parent for n, parent in forks.items() if n not in pruned.refused}
        state.fork(forks)
        return alpha, forks, pruned.freed_slots

    def _cut(self, ended: Round, alpha: float) -> rejection.Cut:
        """The cut of the ranking, again without lost candidates if it keeps some of them."""
        state, selection, live = self.state, self.request.selection, len(self.state.live)
        branching = selection.branching
        release = self._num_released(ended, live) if ended.ended_by is RoundEnd.SLOTS_FULL else 0
        cut = rejection.cut(
            # With branching no finished candidate is ranked out, and there may be thousands.
            state.scores(state.live if branching else state.ranked),
            state.live,
            alpha,
            least=selection.min_answers,
            release=max(release, live - branching.keep) if branching else release,
            vetoed=state.vetoed,
            has_answer=state.has_answer,
        )
        if cut.kept & self.growth.lost:
            state.lose(self.growth.lost, may_degrade=self.request.allow_degraded)
            return self._cut(ended, alpha)
        return cut

    def _num_released(self, ended: Round, live: int) -> int:
        """Live candidates to reject because all slots are full."""
        here = [trace for trace in self.state.rounds if trace.decision_token == ended.num_tokens]
        num_stalled = sum(trace.ended_by is RoundEnd.SLOTS_FULL for trace in here)
        return rejection.num_released(live, ended.num_tokens, num_stalled)


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


def _attributes(trace: RoundTrace) -> Mapping[str, Attribute]:
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
