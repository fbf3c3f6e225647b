"""One request, one loop: extend, score, reject, prune, until no candidate is live.

The same loop drives remote backends in production, engines in one process in experiments, and toys
in tests. It does not depend on the wire, the cache or admission.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias, TypeVar

from orchestrator.loop import rejection, run_state, stopping
from orchestrator.loop.composition import is_vetoed
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from orchestrator.loop.rejection import forks_of, width_at
from orchestrator.loop.run_state import Extract, RunState
from orchestrator.loop.schedule import first_round_tokens, next_decision_token, schedule_of
from orchestrator.loop.scoring import LikelihoodScorer, RequestScorer, Wants
from specrej import contracts as c
from specrej import telemetry
from specrej.answer_form import answer_text
from specrej.contracts import errors
from specrej.telemetry import metrics, names
from specrej.telemetry.traces import Attribute

log = logging.getLogger(__name__)

T = TypeVar("T")

# The part of the time left in which rewards must open a session, if likelihoods may replace them.
_OPENING_PART = 0.25

# Most new tokens of all candidates in one message of a generator: with 16 bytes each, they are a
# quarter of the limit of messages.
_STRIDE_TOKENS = 2**20

# Tokens to grow before answers that have ended are scored, if they may end the request: where a
# pause costs nothing, and where each one computes up to a block of tokens again.
_WATCHED_TOKENS, _COSTLY_TOKENS = 16, 64

# The rewards of a request that names none: the scorer's values as they are.
_UNWEIGHTED = (c.WeightedReward(""),)


# Whether the calls of an answer that has ended are what its prompt allows.
AreValid: TypeAlias = Callable[[c.AnswerParts], Awaitable[bool]]


async def any_calls(_: c.AnswerParts) -> bool:
    """Calls of a prompt without tools."""
    return True


class OutOfTime(Exception):
    """A backend's answer did not arrive before the deadline."""


async def run(
    request: c.GenerationRequest,
    generator: c.Generator,
    scorers: c.Scorer | Sequence[c.Scorer],
    cache_salt: str = "",
    time_left_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    *,
    within: WithinRounds | None = None,
    weight: float = 1.0,
    cheap: frozenset[str] = frozenset(),
    extract: Extract = lambda _: None,
    are_valid: AreValid = any_calls,
) -> AsyncGenerator[c.Event, None]:
    """Events of one valid request, without a request id; the last one is `Finished`.

    `scorers` has one scorer per reward of the request, in the request's order. The generator shares
    prompt prefixes only between runs with equal `cache_salt`, and divides its work among the salts
    by `weight`. With `time_left_s` seconds to the deadline, cuts become deeper or earlier if a
    complete answer would otherwise be late. `clock` returns seconds. `within` receives the events
    within rounds. `cheap` rewards veto within rounds, too. `extract` returns what a complete text
    votes for, if there is a vote. Answers whose calls `are_valid` refuses are vetoed. Close the
    iterator with `contextlib.aclosing`: it owns the open sessions.

    If the generator is lost, the request starts again once, with as many candidates: their draws
    depend on the seed and their ids, so their tokens are the same at a generator of the same
    version, which is preferred. The events begin again with `Admitted`, but no text is sent twice.

    Raises:
        DeadlineExceeded: fewer than `min_answers` answers were complete in time, and the request
            allows no degradation.
        TimeoutError: a reward did not return in time, and the request allows no degradation.
        Unavailable: the generator was lost; no other one answers, or not with the text sent so far.
    """
    began, several = clock(), scorers if isinstance(scorers, Sequence) else [scorers]
    progress = ProgressReporter(within, request.sampling.stop) if within else None
    backends = generator, several, cache_salt, weight, cheap, extract, are_valid
    answering = _Run(request, *backends, time_left_s, began, clock, progress)
    try:
        async with aclosing(answering.events()) as events:
            async for event in events:
                yield event
    except OutOfTime:
        raise errors.DeadlineExceeded("no session was opened before the deadline") from None
    has_restarted, is_reduced = answering.is_lost, answering.state.reduced
    if has_restarted:
        log.warning("a generator was lost: the request starts again")
        again = replace(request, selection=replace(request.selection, n=answering.state.n))
        rest = time_left_s - (clock() - began), began, clock, progress
        second = _Run(again, *backends, *rest, answering.session.fingerprint)
        try:
            async with aclosing(second.events()) as events:
                async for event in events:
                    yield event
            answering = second
        except OutOfTime:
            pass
        except (errors.Unavailable, errors.Overloaded, errors.InvalidRequest) as error:
            answering.end_without_generator(error)
        finally:
            result = "answered" if answering is second and not second.is_lost else "failed"
            metrics.add(names.REQUESTS_RESTARTED, result=result)
        if second.is_lost:
            second.end_without_generator(None)
    answering.state.reduced |= is_reduced
    generation = answering.generation()
    if progress and has_restarted and not generation.best.text.startswith(progress.sent):
        raise errors.Unavailable("a generator was lost, and the text of the other one differs")
    if progress:
        progress.end(generation.best)
    yield c.Finished(generation)


def spec_of(request: c.GenerationRequest, cache_salt: str) -> c.SessionSpec:
    """The session of a request, as one wave."""
    return c.SessionSpec(
        request.prompt,
        request.selection.n,
        sampling_of(request),
        first_round_tokens(schedule_of(request.selection), request.sampling.max_tokens),
        cache_salt,
        request.model,
        request.fits_context,
    )


def uses_confidence(selection: c.Selection) -> bool:
    """Whether the loop needs the most probable tokens of each step."""
    is_weight = selection.vote is not None and selection.vote.weight == "confidence"
    return is_weight or selection.confidence_cut is not None


def reads_likelihood(request: c.GenerationRequest, scorers: Sequence[c.Scorer]) -> bool:
    """Whether anybody needs the log-probabilities of a request's candidates."""
    is_reward = any(isinstance(scorer, LikelihoodScorer) for scorer in scorers)
    return is_reward or request.allow_degraded or sampling_of(request).logprobs


def sampling_of(request: c.GenerationRequest) -> c.Sampling:
    """The request's, with the log-probabilities that confidences need."""
    sampling = request.sampling
    if not uses_confidence(request.selection):
        return sampling
    most = max(stopping.TOP_LOGPROBS, sampling.top_logprobs)
    return replace(sampling, logprobs=True, top_logprobs=most)


@dataclass(slots=True)
class _Run:
    """One request at one generator, and its sessions from their opening to their end."""

    request: c.GenerationRequest
    generator: c.Generator
    scorers: Sequence[c.Scorer]
    cache_salt: str
    weight: float
    cheap: frozenset[str]
    extract: Extract
    are_valid: AreValid
    time_left_s: float
    began: float  # the request, by the clock
    clock: Callable[[], float]
    progress: ProgressReporter | None
    like: str = ""  # the fingerprint of the generator that was lost
    deadline: DeadlineController = field(init=False)
    session: c.Session = field(init=False)
    scorer: RequestScorer = field(init=False)
    state: RunState = field(init=False)
    is_lost: bool = False  # whether the generator was lost before the end
    _failure: OutOfTime | errors.SpecrejError | None = None  # of the next round
    _is_open: bool = False  # whether the session was
    _spared: set[int] = field(default_factory=set)  # that the round's cut leaves alone
    _is_check: bool = False  # whether the round under way only scores what has ended, and vetoes

    def __post_init__(self) -> None:
        selection = self.request.selection
        self.deadline = DeadlineController(
            *self._ends(self.request.sampling.max_tokens),
            self.time_left_s,
            self.clock,
            selection.min_answers,
            can_reject=selection.algorithm is not c.Algorithm.BEST_OF_N and selection.cuts_by_rank,
        )

    @property
    def rewards(self) -> tuple[c.WeightedReward, ...]:
        return self.request.selection.rewards or _UNWEIGHTED

    def _ends(
        self, max_tokens: int, cached_prompt_tokens: int = 0
    ) -> tuple[Callable[[int], int], int]:
        """The next decision token after a position, and the last one."""
        following = partial(
            next_decision_token,
            schedule_of(self.request.selection),
            max_tokens=max_tokens,
            cached_prompt_tokens=cached_prompt_tokens,
        )
        # Cached: the controller extrapolates over all decision tokens, often in a round.
        return cache(following), max_tokens

    async def events(self) -> AsyncGenerator[c.Admitted | c.RoundCompleted, None]:
        """Open the sessions, and run until no candidate is live, the time is over, or the generator
        is lost.

        Raises:
            OutOfTime: the generator opened no session in time.
        """
        selection, wave_s = self.request.selection, 0.0
        ids = stopping.next_wave(selection, 0, [])
        async with AsyncExitStack() as scoring:
            try:
                while True:
                    began, stack = self.clock(), AsyncExitStack()
                    if ids.start and not await self._continues(stack, ids, wave_s):
                        await self._close(scoring)
                        break
                    if not ids.start:
                        await self._open_first(stack, scoring, ids)
                    async with stack:
                        with self._degradable():
                            async with aclosing(self._wave()) as events:
                                async for event in events:
                                    yield event
                        state = self.state
                        ends = (state.live, state.stopped_by, state.degradations, self.is_lost)
                        is_last = ids.stop in (0, selection.n) or any(map(bool, ends))
                        await self._close(stack, *((scoring,) if is_last else ()))
                    wave_s = self.clock() - began
                    if is_last:
                        break
                    ids = stopping.next_wave(selection, ids.stop, state.choices())
            finally:
                if self._is_open:
                    _count_fates(self.state)

    async def _wave(self) -> AsyncGenerator[c.Admitted | c.RoundCompleted, None]:
        """The rounds of one wave."""
        state = self.state
        if state.wave == 1:
            yield c.Admitted(state.n, state.prompt_tokens)
        while state.live and not (self.deadline.is_over or state.stopped_by):
            completed = await self._round()
            if len(state.rounds) == 1:
                state.first_round_ms = (self.clock() - self.began) * 1e3
            self._consider_stopping()
            yield completed

    def _consider_stopping(self) -> None:
        """End the request if enough is known."""
        state, selection = self.state, self.request.selection
        if not selection.may_stop:
            return
        if c.Degradation.REWARD in state.degradations:
            selection = replace(selection, stop_at=None)  # likelihoods do not compare with it
        scores = [row.final.score for row in state.rows.values() if row.is_complete and row.final]
        left = state.num_left
        state.stopped_by = stopping.reason_to_stop(selection, scores, state.choices(), left)

    def end_without_generator(self, error: errors.SpecrejError | None) -> None:
        """Leave it at the answers that were complete when the generator was lost; `error`: why no
        other generator answers the request.

        Raises:
            Unavailable: there are none, or the request allows no degradation.
        """
        if not (self.request.allow_degraded and self.state.ended):
            reason = "a generator was lost, and no other one could answer the request"
            raise errors.Unavailable(reason) from error
        self.state.degradations.append(c.Degradation.GENERATOR)

    def generation(self) -> c.Generation:
        """The answer, once the rounds are over.

        Raises:
            DeadlineExceeded: too few answers are complete, and the request allows no degradation.
        """
        state, selection = self.state, self.request.selection
        num_ended = len(state.ended)
        is_whole = c.Degradation.GENERATOR in state.degradations or state.stopped_by
        is_late = bool(state.live) and not is_whole
        if not num_ended or (is_late and num_ended < selection.min_answers):
            state.cut_short(may_degrade=self.request.allow_degraded)
        is_cut = is_late and bool(state.live)
        state.hurried = self.deadline.hurried or self.scorer.is_late or is_cut
        return state.generation(selection.return_candidates, (self.clock() - self.began) * 1e3)

    async def _open_first(self, stack: AsyncExitStack, scoring: AsyncExitStack, ids: range) -> None:
        """Open the generator's session in `stack` and the rewards' in `scoring`.

        Raises:
            OutOfTime: the generator opened no session in time.
        """
        request, began = self.request, self.clock()
        selection, session = request.selection, await self._open(stack, ids)
        cached = session.prompt_tokens if session.costly_rounds else 0
        ends = self._ends(session.max_tokens, cached)
        self.deadline.next_token, self.deadline.max_tokens = ends
        self.deadline.pauses_freely = not session.costly_rounds
        is_lenient = request.allow_degraded
        patience_s = self.deadline.patience_s * (_OPENING_PART if is_lenient else 1.0)
        form = session.answer_form
        reads_part = form.thinking_end and not selection.score_thinking
        self.scorer = RequestScorer(
            self.scorers,
            request.prompt,
            read=partial(answer_text, form=form) if reads_part else None,
            may_fall_back=is_lenient,
            patience_s=patience_s,
        )
        try:
            await scoring.enter_async_context(self.scorer)
        except BaseException as error:
            metrics.add(names.CANDIDATES, session.n, fate="abandoned")
            # With the error: the session ends without a final exchange.
            await stack.__aexit__(type(error), error, error.__traceback__)
            raise
        self.state = RunState(
            selection.n if selection.waves else session.n,
            session.prompt_tokens,
            self.rewards,
            form,
            keeps_tokens=request.sampling.logprobs,
            keeps_confidences=uses_confidence(selection),
            prefer_complete=selection.prefer_complete,
            vote=selection.vote,
            extract=self.extract,
            reduced=session.reduced,
            generator_fingerprint=session.fingerprint,
            open_ms=(self.clock() - began) * 1e3,
        )
        self.state.begin_wave(range(session.n))
        self._is_open = True
        if self.progress:
            self.progress.begin(form)

    async def _open(self, stack: AsyncExitStack, ids: range) -> c.Session:
        spec = spec_of(self.request, self.cache_salt)
        like = self.state.generator_fingerprint if ids.start else self.like
        without = not reads_likelihood(self.request, self.scorers)
        spec = replace(spec, n=len(ids), first_id=ids.start, like=like, weight=self.weight)
        spec = replace(spec, without_likelihood=without)
        with telemetry.span(names.SPAN_OPEN):
            opening = stack.enter_async_context(self.generator.open(spec))
            self.session = await _in_time(opening, self.deadline.patience_s)
        if spec.sampling.max_thinking_tokens and not self.session.answer_form.thinking_end:
            await stack.aclose()
            text = "must be 0: the model does not mark its reasoning"
            raise errors.InvalidRequest([errors.Violation("sampling.max_thinking_tokens", text)])
        return self.session

    async def _continues(self, stack: AsyncExitStack, ids: range, wave_s: float) -> bool:
        """Open another wave in `stack`, or leave it at the answers that are complete.

        So it does if the generators of this version are away or full, or if the time would not be
        enough for a wave as long as the one before.
        """
        state, began = self.state, self.clock()
        if state.ended and wave_s > self.deadline.left_s:
            self.deadline.hurried = True
            return False
        try:
            session = await self._open(stack, ids)
            if session.fingerprint != state.generator_fingerprint:
                await stack.aclose()
                raise errors.Unavailable("a generator of this version is needed")
        except (OutOfTime, errors.Overloaded, errors.Unavailable) as error:
            if not state.ended:
                raise
            state.reduced = True
            self.deadline.hurried = self.deadline.hurried or isinstance(error, OutOfTime)
            return False
        state.open_ms += (self.clock() - began) * 1e3
        state.begin_wave(ids)
        self._failure = None
        return True

    async def _close(self, *stacks: AsyncExitStack) -> None:
        """End sessions. The answer does not wait beyond the deadline for their end: the calls to
        them are cancelled."""
        with telemetry.span(names.SPAN_CLOSE), suppress(TimeoutError):
            async with asyncio.timeout(self.deadline.score_patience_s):
                for stack in stacks:
                    await stack.aclose()

    @contextmanager
    def _degradable(self) -> Iterator[None]:
        """End the rounds early after errors that leave an answer, and count candidates' fates."""
        try:
            yield
        except OutOfTime:
            pass
        except c.GeneratorLost:
            self.is_lost = True
        except (errors.Unavailable, errors.InternalError) as error:
            has_answer = self.request.allow_degraded and self.state.ended
            if isinstance(error, errors.RewardInvalid) or not has_answer:
                raise
            self.state.degradations.append(c.Degradation.GENERATOR)

    async def _round(self) -> c.RoundCompleted:
        """Extend all live candidates, score them, reject the lowest, free their slots."""
        state, times, self._is_check = self.state, [self.clock()], False
        with telemetry.span(names.SPAN_ROUND, {names.ROUND_NUMBER: len(state.rounds) + 1}) as span:
            with telemetry.span(names.SPAN_EXTEND):
                ended = await self._extend()
            state.take(ended)
            await self._divide(ended)
            times.append(self.clock())
            try:
                await self._score(ended)
            except OutOfTime as error:
                self._failure = error  # of the next round, if there is one: this one is traced
            times.append(self.clock())
            with telemetry.span(names.SPAN_PRUNE):
                alpha, forks, freed = await self._reject(ended)
            times.append(self.clock())
            trace = state.trace(ended, freed, times, alpha, forks, is_check=self._is_check)
            span.set_attributes(_attributes(trace))
        survivors = tuple(sorted(state.live))
        if self.progress and self.progress.sent:  # the deltas have the best text
            return c.RoundCompleted(trace, survivors, "")
        texts = self.progress.texts(ended, trace) if self.progress else ()
        return c.RoundCompleted(trace, survivors, state.best_text(), texts)

    async def _divide(self, ended: c.Round) -> None:
        """Find the parts of answers that have ended, those that are not valid, and the candidates
        that still reason."""
        self._spared = self._reasoning(ended)
        for candidate in ended.candidates:
            row = self.state.rows[candidate.id]
            if candidate.finish:
                self.state.divide(row)
                parts = row.parts or c.AnswerParts(candidate.text)
                row.is_invalid = row.is_invalid or not await self.are_valid(parts)

    def _reasoning(self, grown: c.Round) -> set[int]:
        """The live candidates that cuts leave alone: they still reason and have no text to score.
        All are cut where slots or time are short, and with branching, which counts all."""
        form, selection = self.state.form, self.request.selection
        is_short = self.deadline.hurried or grown.ended_by is c.RoundEnd.SLOTS_FULL
        are_ranked = selection.score_thinking or selection.branching or is_short
        if are_ranked or not form.thinking_end:
            return set()
        live = (one for one in grown.candidates if not one.finish)
        return {one.id for one in live if not answer_text(one.text, form)}

    async def _extend(self) -> c.Round:
        """Grow to the next decision token, in strides short enough to notice a near deadline.

        A stride that fails ends the round with what was reported before, and the next round raises
        its error.

        Raises:
            OutOfTime, SpecrejError: the first stride failed.
        """
        if self._failure:
            raise self._failure
        position, rows = self.state.num_tokens, len(self.state.live)
        until = self.deadline.next_token(position)
        # Forks of the last candidate, too, could win.
        selection = self.request.selection
        others = selection.branching or selection.waves or selection.vote
        is_certain = rows == 1 and not self.state.ended and not others
        growing = _GrowingRound(self.progress, is_certain)
        while True:
            num_tokens = self.deadline.stride_tokens(position, until, rows)
            unwatched = self._grid - position % self._grid
            num_tokens = min(num_tokens, max(1, _STRIDE_TOKENS // rows), unwatched)
            try:
                part = await self._stride(position, position + num_tokens, rows, growing)
            except (OutOfTime, errors.SpecrejError) as error:
                if not growing.whole:
                    raise
                self._failure = error
                return growing.whole
            position, rows = part.num_tokens, rows - _num_ended(part)
            whole = growing.add(part, rows)
            if part.ended_by is not c.RoundEnd.DECISION_TOKEN or position >= until or not rows:
                return whole
            if self.deadline.is_over or self.deadline.must_cut(position, until, rows):
                self.deadline.hurried = True
                return whole
            if position % self._grid == 0 and await self._is_notable(whole):
                self._is_check = True
                return whole

    @property
    def _grid(self) -> int:
        """Positions, by their distance, at which what has ended, and vetoes, are looked at. Strides
        depend on the time left, these do not: equal requests stop at equal positions."""
        is_watched = self.request.selection.may_stop or self._vetoing
        tokens = _COSTLY_TOKENS if self.session.costly_rounds else _WATCHED_TOKENS
        return tokens if is_watched else _STRIDE_TOKENS

    @property
    def _vetoing(self) -> set[int]:
        """The indices of rewards that veto within rounds."""
        if c.Degradation.REWARD in self.state.degradations:
            return set()
        rewards = enumerate(self.rewards)
        return {i for i, r in rewards if r.veto_below is not None and r.name in self.cheap}

    async def _is_notable(self, grown: c.Round) -> bool:
        """Whether the round should end here, for an answer that may end the request, or a veto."""
        if self.request.selection.may_stop and _num_ended(grown):
            return True
        if not (vetoing := self._vetoing):
            return False
        candidates, patience_s = grown.candidates, self.deadline.score_patience_s
        try:
            scored = await self.scorer.score(candidates, patience_s, lambda i, _: i in vetoing)
        except TimeoutError:
            return False
        return scored.is_fallback or any(is_vetoed(raw, self.rewards) for raw in scored.values)

    async def _stride(
        self, position: int, until: int, rows: int, growing: _GrowingRound
    ) -> c.Round:
        began, report = self.clock(), growing.receive if growing.progress else None
        part = await _in_time(self.session.extend(until, report), self.deadline.patience_s)
        _check(part, until, self.deadline.max_tokens)
        if rows == 1 and part.ended_by is c.RoundEnd.SLOTS_FULL and part.num_tokens == position:
            raise errors.InternalError("a generator has no slot for the last candidate")
        num_tokens, seconds = part.num_tokens - position, self.clock() - began
        self.deadline.note_stride(rows, num_tokens, _num_ended(part), seconds)
        return part

    async def _score(self, ended: c.Round) -> None:
        """Score the round's candidates, unless time has run out and none of them has just ended.

        A candidate that has just ended can be the answer only if it is scored.

        Raises:
            OutOfTime: the scores are late, and there are enough answers without them.
        """
        fresh = ended.candidates
        has_ended = any(candidate.finish for candidate in fresh)
        if not (has_ended or (fresh and not self.deadline.is_over)):
            return
        vetoing = self._vetoing

        def comes_first(index: int, candidate: c.Candidate) -> bool:
            if self.rewards[index].stage == "end" or candidate.id in self._spared:
                return False
            return bool(candidate.finish) or not self._is_check or index in vetoing

        compared = [*fresh, *self._compared_again(fresh)]
        await self._score_by(compared, fresh, comes_first)
        rows = self.state.rows
        last = [one for one in compared if one.finish and not rows[one.id].is_vetoed]
        await self._score_by(last, fresh, lambda index, _: self.rewards[index].stage == "end")

    async def _score_by(
        self, candidates: Sequence[c.Candidate], fresh: Sequence[c.Candidate], wants: Wants
    ) -> None:
        """Score those of the candidates that a reward wants; `fresh`: of this round. Others by the
        rewards that compare, and by those that lack their score since a veto was taken back."""
        began, rewards, new = self.clock(), range(len(self.rewards)), {one.id for one in fresh}
        rows, compare = self.state.rows, self.state.compare  # which a fallback leaves empty

        def lacks(index: int, one: c.Candidate) -> bool:
            is_new = one.id in new or bool(compare and math.isnan(rows[one.id].raw[index]))
            return is_new and wants(index, one)

        def wanted(index: int, one: c.Candidate) -> bool:
            return lacks(index, one) or (index in compare and wants(index, one))

        if not any(lacks(index, one) for index in rewards for one in candidates):
            return
        candidates = [one for one in candidates if any(wanted(index, one) for index in rewards)]
        with telemetry.span(names.SPAN_SCORE):
            try:
                patience_s = self.deadline.score_patience_s
                scored = await self.scorer.score(candidates, patience_s, wanted)
            except TimeoutError as error:
                if self._ends_without(fresh):
                    raise OutOfTime from None
                scored = self.scorer.replaced(candidates, error)
            try:
                self.state.judge(candidates, scored)
            except errors.RewardInvalid as error:  # a sum is not finite
                self.state.judge(candidates, self.scorer.replaced(candidates, error))
        self.deadline.note_scoring(len(candidates), self.clock() - began)

    def _compared_again(self, fresh: Sequence[c.Candidate]) -> list[c.Candidate]:
        """The best that ended earlier, if a reward only compares the candidates of one batch: their
        scores of earlier batches cannot be compared with those of `fresh`. The batch is no larger
        than the planned ones."""
        state, branching = self.state, self.request.selection.branching
        if not state.compare:
            return []
        most = max(state.n, branching.width if branching else 0)
        earlier = state.ended - {candidate.id for candidate in fresh}
        best = [n for n in state.answers() if n in earlier][: max(0, most - len(fresh))]
        return [state.rows[number].latest for number in best]

    def _ends_without(self, fresh: Sequence[c.Candidate]) -> bool:
        """Whether enough complete candidates are scored without those that ended in this round,
        whose scores are late. If so, these become no answers: their verdicts are of prefixes."""
        late = {candidate.id for candidate in fresh if candidate.finish}
        if len({*self.state.answers()} - late) < self.request.selection.min_answers:
            return False
        for number in late:
            self.state.rows[number].verdict = self.state.rows[number].final = None
        self.deadline.hurried = True
        return True

    async def _reject(self, ended: c.Round) -> tuple[float, c.Forks, int]:
        """Cut the ranking, then fork; returns the fraction rejected, the forks and freed slots."""
        state, selection, live = self.state, self.request.selection, self.state.live
        alpha = selection.alpha if self.deadline.can_reject and not selection.branching else 0.0
        if live <= self._spared or self.deadline.is_over or self._failure:
            return alpha, {}, 0  # a cut elsewhere than planned could give another answer
        if self._is_check:
            alpha = 0.0
        elif selection.cuts_by_rank and not selection.branching:
            alpha = self.deadline.alpha(state.num_tokens, len(state.ranked), len(live), alpha)
        kept = self._cut(ended, alpha, live)
        state.keep(kept)
        rejected = live - kept
        forks: c.Forks = {}
        if selection.branching and not self._is_check:
            alpha = len(rejected) / len(live)
            forks = self._forks(ended)
        if not rejected and not forks:
            return alpha, {}, 0
        try:
            pruning = self.session.prune(state.live, forks)
            pruned = await _in_time(pruning, self.deadline.patience_s)
        except (OutOfTime, errors.SpecrejError) as error:
            # The round is complete. The error is raised only if a candidate is still to grow.
            self._failure = error
            return alpha, {}, 0
        forks = {n: parent for n, parent in forks.items() if n not in pruned.refused}
        state.fork(forks)
        state.discarded_tokens += pruned.discarded_tokens
        return alpha, forks, pruned.freed_slots

    def _cut(self, ended: c.Round, alpha: float, live: set[int]) -> set[int]:
        state, selection = self.state, self.request.selection
        live = live - self._spared
        branching, release = None if self._is_check else selection.branching, 0
        if ended.ended_by is c.RoundEnd.SLOTS_FULL:
            here = [trace for trace in state.rounds if trace.decision_token == ended.num_tokens]
            num_stalled = sum(trace.ended_by is c.RoundEnd.SLOTS_FULL for trace in here)
            release = rejection.num_released(len(live), ended.num_tokens, num_stalled)
        # With branching no finished candidate is ranked out, and there may be thousands.
        scores = state.scores(live if branching else state.ranked)
        cut = selection.confidence_cut
        return self._spared | rejection.cut(
            dict.fromkeys(live, 0.0) | scores,  # without a reward that counts in cuts
            live,
            alpha,
            least=selection.min_answers,
            release=max(release, len(live) - branching.keep) if branching else release,
            vetoed=state.vetoed | (state.unconfident(cut) if cut else set()),
            has_answer=state.has_answer,
        )

    def _forks(self, ended: c.Round) -> c.Forks:
        """New candidates from the survivors: as many as branching plans and the time allows."""
        state, branching = self.state, self.request.selection.branching
        survivors = state.ranking(state.live)
        if not branching or not survivors or ended.ended_by is c.RoundEnd.SLOTS_FULL:
            return {}
        position, most = state.num_tokens, len(survivors) + state.n + run_state.MAX_FORKS
        growth = self.deadline.next_token(position) - position
        width = width_at(branching, self.deadline.next_token(0), growth)
        width = min(width, most - state.next_id)
        if width > len(survivors) and not self.deadline.has_time_for(position, width):
            return {}
        forks = forks_of(survivors, width, state.next_id)
        state.next_id += len(forks)
        return forks


async def _in_time(answer: Awaitable[T], patience_s: float) -> T:
    """What a backend answers within `patience_s` seconds.

    Raises:
        OutOfTime: it has not answered until then.
    """
    try:
        async with asyncio.timeout(patience_s):
            return await answer
    except TimeoutError:
        raise OutOfTime from None


def _check(part: c.Round, until: int, max_tokens: int) -> None:
    """Raise InternalError where a generator's answers could keep the loop running for ever."""
    is_planned = part.ended_by is c.RoundEnd.DECISION_TOKEN
    live = [candidate.num_tokens for candidate in part.candidates if candidate.finish is None]
    if is_planned and part.num_tokens != until:
        raise errors.InternalError(
            f"a generator ended at token {part.num_tokens} instead of {until}"
        )
    if live and (max(live) >= max_tokens or (is_planned and until >= max_tokens)):
        raise errors.InternalError("a generator goes on at max_tokens")
    if live and part.ended_by is c.RoundEnd.ALL_FINISHED:
        raise errors.InternalError("a generator reports ALL_FINISHED with live candidates")


def _num_ended(part: c.Round) -> int:
    return sum(candidate.finish is not None for candidate in part.candidates)


@dataclass(slots=True)
class _GrowingRound:
    """A round's strides and their parts, reported as they arrive; `whole` is all of them so far."""

    progress: ProgressReporter | None
    is_certain: bool
    whole: c.Round | None = None

    def receive(self, part: c.Round) -> None:
        """Add a part of a stride."""
        if part.candidates:
            self.whole = _joined(self.whole, part)
        if self.progress:
            self.progress.report(part, is_certain=self.is_certain)

    def add(self, stride: c.Round, num_live: int) -> c.Round:
        """The round so far, with the rest of a stride."""
        self.whole = whole = _joined(self.whole, stride)
        if self.progress:
            grown = replace(whole, num_live=num_live)
            self.progress.report(grown, is_certain=self.is_certain)
        return whole


def _joined(first: c.Round | None, second: c.Round) -> c.Round:
    """Two parts of a round as one."""
    if not first:
        return second
    candidates = {candidate.id: candidate for candidate in first.candidates}
    for later in second.candidates:
        if before := candidates.get(later.id):
            later = replace(
                later,
                new_token_ids=before.new_token_ids + later.new_token_ids,
                new_logprobs=before.new_logprobs + later.new_logprobs,
                new_top_token_ids=before.new_top_token_ids + later.new_top_token_ids,
                new_top_logprobs=before.new_top_logprobs + later.new_top_logprobs,
            )
        candidates[later.id] = later
    return replace(
        second,
        candidates=tuple(candidates[number] for number in sorted(candidates)),
        token_texts=tuple(dict.fromkeys(first.token_texts + second.token_texts)),
        prompt_tokens=first.prompt_tokens or second.prompt_tokens,
        prefilled_tokens=first.prefilled_tokens + second.prefilled_tokens,
    )


def _attributes(trace: c.RoundTrace) -> Mapping[str, Attribute]:
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
        names.SCORES: [traced.score for traced in trace.candidates[: names.MAX_SCORES]],
        names.ALPHA: trace.alpha,
    }


def _count_fates(state: RunState) -> None:
    """Count the candidates of a run that has ended: finished, truncated, rejected or abandoned."""
    fates: Counter[str] = Counter()
    for row in state.rows.values():
        if row.has_ended:
            fates["truncated" if row.is_truncated else "finished"] += 1
        else:
            live = "stopped" if state.stopped_by else "abandoned"
            fates[live if row.is_live else "rejected"] += 1
    for fate, count in fates.items():
        metrics.add(names.CANDIDATES, count, fate=fate)
