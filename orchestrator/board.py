"""What is known of one request's candidates: who lives, what they are worth, what it has cost.

The run loop tells it of every round and asks it who is best; it decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator import rejection
from orchestrator.composition import LIKELIHOOD, Verdict
from orchestrator.scoring import Ratings, fingerprint_of, judged
from orchestrator.shadow import Notes
from specrej.contracts import (
    Candidate,
    CandidateTrace,
    Degradation,
    Fate,
    FinishReason,
    Generation,
    RankedCandidate,
    Round,
    RoundTrace,
    Timings,
    Usage,
    WeightedReward,
)
from specrej.errors import DeadlineExceeded, InternalError, Unavailable


@dataclass(slots=True)
class Board:
    """Everything known of a request's candidates.

    `ranked`: those still in the ranking, finished or live. A finished candidate that is ranked out
    leaves the ranking but can still be the answer: it holds no slots.
    `verdicts`: on all that count, ranked or finished, as of the last decision token.
    """

    n: int
    prompt_tokens: int
    rewards: tuple[WeightedReward, ...]
    keeps_tokens: bool  # whether the answers show their tokens and logprobs
    notes: Notes | None = None  # for shadows
    live: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # while they grew
    ranked: set[int] = field(default_factory=set)
    latest: dict[int, Candidate] = field(default_factory=dict)
    raw: dict[int, tuple[float, ...]] = field(default_factory=dict)  # a value per reward
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: list[RoundTrace] = field(default_factory=list)
    degradations: list[Degradation] = field(default_factory=list)
    hurried: bool = False
    num_tokens: int = 0
    num_started: int = 0
    repeated_tokens: int = 0
    reward_tokens: int = 0
    made_by: set[str] = field(default_factory=set)  # fingerprints of generators
    judged_by: set[tuple[str, ...]] = field(default_factory=set)  # of rewards, together
    first_round_ms: float = 0.0

    def __post_init__(self) -> None:
        self.live = set(range(self.n))

    def take(self, ended: Round, *, may_degrade: bool) -> None:
        """What a round made.

        Raises:
            InternalError: the generator lost a candidate; without it the loop might never end.
            Unavailable: one of several generators was lost, and the caller wants nothing weaker.
        """
        self.num_started = len(self.live)
        if ended.lost:
            self._lose(ended.lost, may_degrade=may_degrade)
        if lost := self.live - {candidate.id for candidate in ended.candidates}:
            raise InternalError(f"the generator lost {len(lost)} candidates")
        self.made_by |= ended.made_by
        self.repeated_tokens += ended.repeated_tokens
        self.num_tokens = max(self.num_tokens, ended.num_tokens)
        self.latest.update((candidate.id, candidate) for candidate in ended.candidates)
        self.live -= {c.id for c in ended.candidates if c.finish is not None}
        if self.keeps_tokens:
            self._add_tokens(ended.candidates)

    def _lose(self, lost: Collection[int], *, may_degrade: bool) -> None:
        """Candidates are gone with their generator; what is left may be less than was asked for."""
        if not may_degrade:
            raise Unavailable("a generator was lost, and with it some of the candidates")
        if Degradation.CANDIDATES not in self.degradations:
            self.degradations.append(Degradation.CANDIDATES)
        self.lost |= set(lost)
        self.live -= self.lost
        self.ranked -= self.lost

    def judge(self, candidates: Sequence[Candidate], ratings: Ratings) -> None:
        """The values of the newest prefixes and answers, and what follows for all that count.

        A finished candidate keeps its values. Its score may still change, where it is held against
        those of others; and all are judged anew by what stood in for a reward that is gone.
        """
        if ratings.instead is not None and Degradation.REWARD not in self.degradations:
            self.degradations.append(Degradation.REWARD)
            self.rewards = (WeightedReward(LIKELIHOOD),)
            self.raw = dict(ratings.instead)
            self.judged_by.clear()
        if ratings.fingerprints:
            self.judged_by.add(ratings.fingerprints)
        fresh = {c.id: values for c, values in zip(candidates, ratings.values, strict=True)}
        self.raw |= fresh
        self.ranked |= fresh.keys()
        counting = sorted({*self.ranked, *self.ended()})
        self.verdicts = judged({number: self.raw[number] for number in counting}, self.rewards)
        self.reward_tokens += ratings.computed_tokens

    def scores(self, numbers: Iterable[int]) -> dict[int, float]:
        """Scores of some that count, as of the last decision token."""
        verdicts = self.verdicts
        return {number: verdicts[number].score for number in numbers if number in verdicts}

    @property
    def vetoed(self) -> set[int]:
        """Those that count and are vetoed, as of the last decision token."""
        return {number for number, verdict in self.verdicts.items() if verdict.vetoed}

    @property
    def has_answer(self) -> bool:
        """Whether there is a complete answer that no reward vetoes."""
        vetoed = self.vetoed
        return any(n not in vetoed and not self._is_truncated(n) for n in self.ended())

    def cut_short(self, *, may_degrade: bool) -> None:
        """Time ran out before any answer was complete: all that live end here, truncated.

        Raises:
            DeadlineExceeded: the caller does not want that, or there is no text yet.
        """
        if not may_degrade or not self.latest:
            raise DeadlineExceeded("no answer was complete before the deadline")
        self.degradations.append(Degradation.DEADLINE)
        for number in self.live:
            self.latest[number] = replace(self.latest[number], finish=FinishReason.LENGTH)
            # Of the last decision token; without one, nothing tells them apart but the likelihood.
            self.raw.setdefault(number, (self.latest[number].mean_logprob,) * len(self.rewards))
        unjudged = self.live - self.verdicts.keys()
        self.verdicts |= {
            number: Verdict(self.latest[number].mean_logprob, vetoed=False) for number in unjudged
        }
        self.ranked |= self.live
        self.live = set()

    def keep(self, kept: frozenset[int]) -> None:
        """Who stays in the ranking after a cut."""
        self.ranked &= kept
        self.live &= kept

    def answers(self) -> list[int]:
        """Ids by merit: complete answers by score; truncated ones only where none is complete.

        All vetoed ones follow, in the same order.
        """
        vetoed = self.vetoed
        by_score = rejection.rank(self.scores(self.ended()), vetoed)
        return sorted(by_score, key=lambda n: (n in vetoed, self._is_truncated(n)))

    def best_text(self) -> str:
        """The text with the highest reward so far, finished or live; a vetoed one if all are."""
        best = self._best()
        return self.latest[best].text if best is not None else ""

    def trace(
        self,
        number: int,
        ended: Round,
        freed: int,
        laps_ms: tuple[float, float, float],
        alpha: float,
    ) -> RoundTrace:
        """The record of a round; laps are extend, score, prune."""
        finished = sum(candidate.finish is not None for candidate in ended.candidates)
        vetoed = self.vetoed
        best = self._best()
        candidates = self._fates(ended.candidates)
        lost = len(ended.lost)
        trace = RoundTrace(
            number=number,
            decision_token=ended.num_tokens,
            ended_by=ended.ended_by,
            num_started=self.num_started,
            num_finished=finished,
            num_rejected=self.num_started - finished - len(self.live) - lost,
            num_live=len(self.live),
            best_score=self.verdicts[best].score if best is not None else 0.0,
            scores=tuple(each.score for each in candidates),
            session_slots=ended.slots.session,
            freed_slots=freed,
            capacity_slots=ended.slots.capacity,
            generated_tokens=ended.repeated_tokens
            + sum(len(c.new_token_ids) for c in ended.candidates),
            extend_ms=laps_ms[0],
            score_ms=laps_ms[1],
            prune_ms=laps_ms[2],
            num_vetoed=sum(c.finish is None and c.id in vetoed for c in ended.candidates),
            num_lost=lost,
            alpha=alpha,
            candidates=candidates,
        )
        self.rounds.append(trace)
        return trace

    def _fates(self, candidates: Sequence[Candidate]) -> tuple[CandidateTrace, ...]:
        """What became of those that were scored in a round, after its cut, best first."""
        finished = {candidate.id for candidate in candidates if candidate.finish}
        vetoed, scores = self.vetoed, self.scores(candidate.id for candidate in candidates)

        def fate(number: int) -> Fate:
            if number in finished:
                return Fate.FINISHED
            if number in self.live:
                return Fate.KEPT
            return Fate.VETOED if number in vetoed else Fate.REJECTED

        by_score = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        return tuple(CandidateTrace(number, score, fate(number)) for number, score in by_score)

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
            # One each, unless there was a change half-way.
            generator_fingerprint="+".join(sorted(self.made_by)),
            reward_fingerprint="+".join(
                sorted(fingerprint_of(self.rewards, each) for each in self.judged_by)
            ),
            degradations=tuple(self.degradations),
            hurried=self.hurried,
        )

    def _add_tokens(self, candidates: Sequence[Candidate]) -> None:
        # A round tells of its own tokens only.
        for candidate in candidates:
            self.token_ids[candidate.id] += candidate.new_token_ids
            self.logprobs[candidate.id] += candidate.new_logprobs

    def ended(self) -> list[int]:
        """Ids of the candidates that ended, ranked out or not."""
        return [number for number, candidate in self.latest.items() if candidate.finish]

    def _is_truncated(self, number: int) -> bool:
        return self.latest[number].finish is FinishReason.LENGTH

    def _best(self) -> int | None:
        ranking = rejection.rank(self.scores({*self.ranked, *self.ended()}), self.vetoed)
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
            generated_tokens=sum(ended) + sum(rejected) + self.repeated_tokens,
            answer_tokens=answer_tokens,
            reward_tokens=self.reward_tokens,
            freed_slots=sum(trace.freed_slots for trace in self.rounds),
            best_of_n_tokens_estimate=round(estimate),
        )
