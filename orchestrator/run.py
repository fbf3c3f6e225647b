"""One request, one loop: extend, score, cut, prune, until nothing is live.

The same loop runs over gRPC in production, in one process in experiments, and on toys in tests.
Knows no wire, no cache, no admission.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator import rejection
from orchestrator.composition import Verdict
from orchestrator.schedule import next_decision_token
from orchestrator.scoring import Panel, PanelSession, Ratings, judged
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    Candidate,
    Event,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    Generator,
    RankedCandidate,
    Round,
    RoundCompleted,
    RoundEnd,
    RoundTrace,
    Scorer,
    Session,
    Timings,
    Usage,
    WeightedReward,
)
from specrej.errors import InternalError

# For a request that names no reward: what the scorer says, as it is.
_PLAIN = (WeightedReward(""),)


async def run(
    request: GenerationRequest, generator: Generator, scorer: Scorer | Panel, cache_salt: str = ""
) -> AsyncGenerator[Event, None]:
    """Events of one valid request, the last one `Finished`; ids and fingerprints are the caller's.

    `scorer` judges by the request's reward; for several it is a panel, with a scorer for each in
    the request's order. Names are the caller's business: none is looked up, no composite known.

    The generator shares prompt prefixes only between runs with equal salts.
    Close the iterator (`contextlib.aclosing`): its sessions live as long as it does.
    """
    began = time.perf_counter()
    sampling, selection = request.sampling, request.selection
    panel = scorer if isinstance(scorer, Panel) else Panel([scorer])
    async with (
        generator.open(
            request.prompt, selection.n, sampling, first_round_tokens(request), cache_salt
        ) as session,
        panel.open(request.prompt) as judges,
    ):
        board = _Board(
            session.n, session.prompt_tokens, selection.rewards or _PLAIN, sampling.logprobs
        )
        open_ms = _ms_since(began)
        yield Admitted(session.n, session.prompt_tokens)
        while board.live:
            completed = await _round(request, session, judges, board)
            if len(board.rounds) == 1:
                board.first_round_ms = _ms_since(began)
            yield completed
    yield Finished(board.generation(selection.return_candidates, open_ms, _ms_since(began)))


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
    request: GenerationRequest, session: Session, judges: PanelSession, board: _Board
) -> RoundCompleted:
    """Extend all live candidates, score them, reject the lowest, free their slots."""
    number = len(board.rounds) + 1
    with telemetry.span("round", round=number, live=len(board.live)) as span:
        clock = _Clock()
        until = _decision_token(request, board.num_tokens)
        ended = await session.extend(until)
        extend_ms = clock.lap_ms()
        board.take(ended)
        if ended.candidates:
            board.judge(ended.candidates, await judges.rate(ended.candidates))
        score_ms = clock.lap_ms()
        freed = await _reject(request, session, board, ended)
        trace = board.trace(number, ended, freed, (extend_ms, score_ms, clock.lap_ms()))
        telemetry.set_attributes(span, decision_token=trace.decision_token, kept=trace.num_live)
    return RoundCompleted(trace, tuple(sorted(board.live)), board.best_text())


def _decision_token(request: GenerationRequest, num_tokens: int) -> int:
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        return request.sampling.max_tokens
    return next_decision_token(request.selection.schedule, num_tokens, request.sampling.max_tokens)


async def _reject(request: GenerationRequest, session: Session, board: _Board, ended: Round) -> int:
    """Cut the ranking; returns the slots freed."""
    if not board.live:
        return 0
    best_of_n = request.selection.algorithm is Algorithm.BEST_OF_N
    outcome = rejection.cut(
        board.scores(board.ranked),
        board.live,
        0.0 if best_of_n else request.selection.alpha,
        must_release=ended.ended_by is RoundEnd.SLOTS_FULL,
        vetoed=board.vetoed,
        has_answer=board.has_answer,
    )
    rejected = board.live & outcome.rejected
    board.keep(outcome.kept)
    return (await session.prune(board.live)).freed_slots if rejected else 0


@dataclass(slots=True)
class _Board:
    """Everything known of a request's candidates.

    `ranked`: those still in the ranking, finished or live. A finished candidate that is ranked out
    leaves the ranking but can still be the answer: it holds no slots.
    `verdicts`: on all that count, ranked or finished, as of the last decision token.
    """

    n: int
    prompt_tokens: int
    rewards: tuple[WeightedReward, ...]
    keeps_tokens: bool  # whether the answers show their tokens and logprobs
    live: set[int] = field(default_factory=set)
    ranked: set[int] = field(default_factory=set)
    latest: dict[int, Candidate] = field(default_factory=dict)
    raw: dict[int, tuple[float, ...]] = field(default_factory=dict)  # a value per reward
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: list[RoundTrace] = field(default_factory=list)
    num_tokens: int = 0
    num_started: int = 0
    reward_tokens: int = 0
    first_round_ms: float = 0.0

    def __post_init__(self) -> None:
        self.live = set(range(self.n))

    def take(self, ended: Round) -> None:
        """What a round made.

        Raises:
            InternalError: the generator lost a candidate; without it the loop might never end.
        """
        if lost := self.live - {candidate.id for candidate in ended.candidates}:
            raise InternalError(f"the generator lost {len(lost)} candidates")
        self.num_started = len(self.live)
        self.num_tokens = max(self.num_tokens, ended.num_tokens)
        self.latest.update((candidate.id, candidate) for candidate in ended.candidates)
        self.live -= {c.id for c in ended.candidates if c.finish is not None}
        if self.keeps_tokens:
            self._add_tokens(ended.candidates)

    def judge(self, candidates: Sequence[Candidate], ratings: Ratings) -> None:
        """The values of the newest prefixes and answers, and what follows for all that count.

        A finished candidate keeps its values. Its score may still change, where it is held against
        those of others.
        """
        fresh = {c.id: values for c, values in zip(candidates, ratings.values, strict=True)}
        self.raw |= fresh
        self.ranked |= fresh.keys()
        counting = sorted({*self.ranked, *self._ended()})
        self.verdicts = judged({number: self.raw[number] for number in counting}, self.rewards)
        self.reward_tokens += ratings.computed_tokens

    def scores(self, numbers: Iterable[int]) -> dict[int, float]:
        """Scores of some that count, as of the last decision token."""
        return {number: self.verdicts[number].score for number in numbers}

    @property
    def vetoed(self) -> set[int]:
        """Those that count and are vetoed, as of the last decision token."""
        return {number for number, verdict in self.verdicts.items() if verdict.vetoed}

    @property
    def has_answer(self) -> bool:
        """Whether there is a complete answer that no reward vetoes."""
        vetoed = self.vetoed
        return any(n not in vetoed and not self._is_truncated(n) for n in self._ended())

    def keep(self, kept: frozenset[int]) -> None:
        """Who stays in the ranking after a cut."""
        self.ranked &= kept
        self.live &= kept

    def answers(self) -> list[int]:
        """Ids by merit: complete answers by score; truncated ones only where none is complete.

        All vetoed ones follow, in the same order.
        """
        vetoed = self.vetoed
        by_score = rejection.rank(self.scores(self._ended()), vetoed)
        return sorted(by_score, key=lambda n: (n in vetoed, self._is_truncated(n)))

    def best_text(self) -> str:
        """The text with the highest reward so far, finished or live; a vetoed one if all are."""
        best = self._best()
        return self.latest[best].text if best is not None else ""

    def trace(
        self, number: int, ended: Round, freed: int, laps_ms: tuple[float, float, float]
    ) -> RoundTrace:
        """The record of a round; laps are extend, score, prune."""
        finished = sum(candidate.finish is not None for candidate in ended.candidates)
        vetoed = self.vetoed
        best = self._best()
        round_scores = self.scores(c.id for c in ended.candidates).values()
        trace = RoundTrace(
            number=number,
            decision_token=ended.num_tokens,
            ended_by=ended.ended_by,
            num_started=self.num_started,
            num_finished=finished,
            num_rejected=self.num_started - finished - len(self.live),
            num_live=len(self.live),
            best_score=self.verdicts[best].score if best is not None else 0.0,
            scores=tuple(sorted(round_scores, reverse=True)),
            session_slots=ended.slots.session,
            freed_slots=freed,
            capacity_slots=ended.slots.capacity,
            generated_tokens=sum(len(c.new_token_ids) for c in ended.candidates),
            extend_ms=laps_ms[0],
            score_ms=laps_ms[1],
            prune_ms=laps_ms[2],
            num_vetoed=sum(c.finish is None and c.id in vetoed for c in ended.candidates),
        )
        self.rounds.append(trace)
        return trace

    def generation(self, num_candidates: int, open_ms: float, total_ms: float) -> Generation:
        """The answer."""
        chosen = tuple(self._ranked(number) for number in self.answers()[:num_candidates])
        return Generation(
            candidates=chosen,
            rounds=tuple(self.rounds),
            usage=self._usage(chosen[0].num_tokens),
            timings=Timings(
                total_ms=total_ms,
                open_ms=open_ms,
                extend_ms=sum(trace.extend_ms for trace in self.rounds),
                score_ms=sum(trace.score_ms for trace in self.rounds),
                prune_ms=sum(trace.prune_ms for trace in self.rounds),
                first_round_ms=self.first_round_ms,
            ),
            n=self.n,
        )

    def _add_tokens(self, candidates: Sequence[Candidate]) -> None:
        # A round tells of its own tokens only.
        for candidate in candidates:
            self.token_ids[candidate.id] += candidate.new_token_ids
            self.logprobs[candidate.id] += candidate.new_logprobs

    def _ended(self) -> list[int]:
        """Ids of the candidates that ended, ranked out or not."""
        return [number for number, candidate in self.latest.items() if candidate.finish]

    def _is_truncated(self, number: int) -> bool:
        return self.latest[number].finish is FinishReason.LENGTH

    def _best(self) -> int | None:
        ranking = rejection.rank(self.scores({*self.ranked, *self._ended()}), self.vetoed)
        return ranking[0] if ranking else None

    def _ranked(self, number: int) -> RankedCandidate:
        candidate = self.latest[number]
        assert candidate.finish
        return RankedCandidate(
            id=number,
            text=candidate.text,
            score=self.verdicts[number].score,
            finish=candidate.finish,
            num_tokens=candidate.num_tokens,
            mean_logprob=candidate.mean_logprob,
            token_ids=tuple(self.token_ids[number]),
            logprobs=tuple(self.logprobs[number]),
            rewards=self.raw[number],
            vetoed=self.verdicts[number].vetoed,
        )

    def _usage(self, answer_tokens: int) -> Usage:
        ended = [c.num_tokens for c in self.latest.values() if c.finish is not None]
        rejected = [c.num_tokens for c in self.latest.values() if c.finish is None]
        mean_ended = sum(ended) / len(ended)
        estimate = sum(ended) + sum(max(tokens, mean_ended) for tokens in rejected)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=sum(ended) + sum(rejected),
            answer_tokens=answer_tokens,
            reward_tokens=self.reward_tokens,
            freed_slots=sum(trace.freed_slots for trace in self.rounds),
            best_of_n_tokens_estimate=round(estimate),
        )


class _Clock:
    """Laps on a monotonic clock."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        lap, self._at = _ms_since(self._at), time.perf_counter()
        return lap


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
