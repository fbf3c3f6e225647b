"""The state of one request's candidates: which live, their scores, and what they have cost.

The run loop updates it after every round; it makes no decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from orchestrator.loop import rejection
from orchestrator.loop.composition import LIKELIHOOD, Verdict
from orchestrator.loop.scoring import RawScores, fingerprint_of, judged
from orchestrator.loop.token_log import TokenLog
from specrej.contracts import (
    Candidate,
    CandidateTrace,
    Degradation,
    Fate,
    FinishReason,
    Fork,
    Forks,
    Generation,
    RankedCandidate,
    Round,
    RoundTrace,
    Timings,
    Usage,
    WeightedReward,
)
from specrej.contracts.errors import DeadlineExceeded, InternalError, Unavailable

# Candidates in the rounds of one answer, about 100 bytes each. A round beyond that is traced
# without its candidates.
MAX_TRACED = 16_384
# Forks of one answer: each stays in memory, and those that finish with their texts.
MAX_FORKS = 16_384


@dataclass(slots=True)
class RunState:
    """All candidates of one request, by id.

    `ranked`: those still in the ranking, finished or live. A finished candidate that is ranked out
    leaves the ranking but can still be the answer: it holds no slots.
    `verdicts`: of all ranked and all finished candidates, as of the last decision token.
    """

    n: int
    prompt_tokens: int
    rewards: tuple[WeightedReward, ...]
    tokens: TokenLog
    prefer_complete: bool  # whether a truncated answer ranks behind all complete ones
    live: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # with their generator, while they grew
    ranked: set[int] = field(default_factory=set)
    latest: dict[int, Candidate] = field(default_factory=dict)
    raw: dict[int, tuple[float, ...]] = field(default_factory=dict)  # one value per reward
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    rounds: list[RoundTrace] = field(default_factory=list)
    degradations: list[Degradation] = field(default_factory=list)
    compare: bool = False  # whether a reward compares the candidates of a batch only
    hurried: bool = False
    reduced: bool = False
    num_tokens: int = 0  # of every live candidate
    num_started: int = 0  # live when the latest round began
    num_traced: int = 0  # candidates in `rounds`
    next_id: int = 0  # of the next fork
    forks: dict[int, tuple[int, int]] = field(default_factory=dict)  # parent, its tokens then
    repeated_tokens: int = 0
    unused_tokens: int = 0  # grown while scores were under way, before the rounds ended early
    reward_tokens: int = 0
    made_by: set[str] = field(default_factory=set)  # fingerprints of generators
    judged_by: set[tuple[str, ...]] = field(default_factory=set)  # fingerprints of all rewards
    open_ms: float = 0.0
    first_round_ms: float = 0.0

    def __post_init__(self) -> None:
        self.live, self.next_id = set(range(self.n)), self.n

    def take(self, ended: Round, *, may_degrade: bool) -> None:
        """Add the tokens of a round.

        Raises:
            InternalError: a live candidate is missing; without it the loop might never end.
            Unavailable: a generator was lost with its candidates, and `may_degrade` is not set or
                none is left.
        """
        self.num_started = len(self.live)
        if missing := self.live - {*ended.lost, *(candidate.id for candidate in ended.candidates)}:
            raise InternalError(f"the generator lost {len(missing)} candidates")
        self.made_by |= ended.made_by
        self.repeated_tokens += ended.repeated_tokens
        self.prompt_tokens = self.prompt_tokens or ended.prompt_tokens
        self.num_tokens = max(self.num_tokens, ended.num_tokens)
        self.latest.update((candidate.id, candidate) for candidate in ended.candidates)
        self.live -= {c.id for c in ended.candidates if c.finish is not None}
        if ended.lost:
            self.lose(ended.lost, may_degrade=may_degrade)
        self.tokens.add(ended)

    def lose(self, lost: Collection[int], *, may_degrade: bool) -> None:
        """Remove live candidates that are lost with their generator; raises as `take` does."""
        if not may_degrade:
            raise Unavailable("a generator was lost, and with it some of the candidates")
        if Degradation.CANDIDATES not in self.degradations:
            self.degradations.append(Degradation.CANDIDATES)
        self.lost |= set(lost)
        self.live -= self.lost
        self.ranked -= self.lost
        if not (self.live or self.ended()):
            raise Unavailable("a generator was lost, and with it all candidates that were left")

    def judge(self, candidates: Sequence[Candidate], scored: RawScores, num_again: int = 0) -> None:
        """Store the raw scores of these candidates and compute their verdicts, and all others that
        depend on them. The last `num_again` had ended before, and are compared again.

        Other finished candidates keep theirs; after a fallback the likelihood replaces them all.
        """
        self.compare = scored.compare
        if scored.is_fallback and Degradation.REWARD not in self.degradations:
            self.degradations.append(Degradation.REWARD)
            self.rewards = (WeightedReward(LIKELIHOOD),)
            self.raw = {number: (known.mean_logprob,) for number, known in self.latest.items()}
            self.judged_by.clear()
            self.verdicts = {}
        if scored.fingerprints:
            self.judged_by.add(scored.fingerprints)
        fresh = {c.id: values for c, values in zip(candidates, scored.values, strict=True)}
        self.raw |= fresh
        self.ranked |= {c.id for c in candidates[: len(candidates) - num_again]}
        counting = {*self.ranked, *self.ended()}
        depends = any(reward.normalization.kind == "batch" for reward in self.rewards)
        known = {} if depends else {n: self.verdicts[n] for n in counting & self.verdicts.keys()}
        anew = sorted(counting - (known.keys() - fresh.keys()))
        self.verdicts = known | judged({number: self.raw[number] for number in anew}, self.rewards)
        self.reward_tokens += scored.computed_tokens

    def scores(self, numbers: Iterable[int]) -> dict[int, float]:
        """Scores of those with a verdict, as of the last decision token."""
        verdicts = self.verdicts
        return {number: verdicts[number].score for number in numbers if number in verdicts}

    @property
    def vetoed(self) -> set[int]:
        """Candidates that a reward vetoes, as of the last decision token."""
        return {number for number, verdict in self.verdicts.items() if verdict.vetoed}

    @property
    def forks_left(self) -> int:
        """How many more forks there may be."""
        return self.n + MAX_FORKS - self.next_id

    @property
    def has_answer(self) -> bool:
        """Whether there is a complete answer that no reward vetoes."""
        vetoed = self.vetoed
        return any(n not in vetoed and not self._is_truncated(n) for n in self.ended())

    def ranking(self, numbers: Iterable[int]) -> list[int]:
        """Those with a verdict, best first, as of the last decision token."""
        scores = self.scores(numbers)
        truncated = {n for n in scores if self.prefer_complete and self._is_truncated(n)}
        return rejection.rank(scores, self.vetoed, truncated)

    def lacks_answers(self, least: int) -> bool:
        """Whether the time ran out while fewer than `least` candidates were complete."""
        num_ended = len(self.ended())
        is_left = self.live and Degradation.GENERATOR not in self.degradations
        return not num_ended or bool(is_left and num_ended < least)

    def cut_short(self, *, may_degrade: bool) -> None:
        """End live candidates here, truncated, and drop forks without tokens of their own.

        Raises:
            DeadlineExceeded: `may_degrade` is not set, or there is no text yet.
        """
        if not may_degrade or not self.latest:
            raise DeadlineExceeded("too few answers were complete before the deadline")
        self.degradations.append(Degradation.DEADLINE)
        self.live -= {n for n, (_, at) in self.forks.items() if self.latest[n].num_tokens == at}
        for number in self.live:
            self.latest[number] = replace(self.latest[number], finish=FinishReason.LENGTH)
            # Scores of the last decision token; before the first one, the likelihood.
            self.raw.setdefault(number, (self.latest[number].mean_logprob,) * len(self.rewards))
        self.verdicts |= {
            number: Verdict(self.latest[number].mean_logprob, vetoed=False)
            for number in self.live - self.verdicts.keys()
        }
        self.ranked |= self.live
        self.live = set()

    def keep(self, kept: frozenset[int]) -> None:
        """Remove all others from the ranking, and the texts of live ones among them."""
        for number in self.live - kept:
            known = self.latest[number]
            self.latest[number] = Candidate(number, "", known.num_tokens, known.logprob)
            self.tokens.drop(number)
        self.ranked &= kept
        self.live &= kept

    def fork(self, forks: Forks) -> None:
        """Add new live candidates, which continue others: their texts, tokens and values so far."""
        for number, parent in forks.items():
            self.latest[number] = replace(self.latest[parent], id=number)
            self.raw[number], self.verdicts[number] = self.raw[parent], self.verdicts[parent]
            self.forks[number] = parent, self.latest[parent].num_tokens
            self.tokens.fork(number, parent)
        self.live |= forks.keys()

    def root(self, number: int) -> int:
        """The initial candidate that `number` descends from; itself if it is no fork."""
        while number in self.forks:
            number, _ = self.forks[number]
        return number

    def ended(self) -> list[int]:
        """Ids of the finished candidates, ranked out or not."""
        return [number for number, candidate in self.latest.items() if candidate.finish]

    def answers(self) -> list[int]:
        """Finished ids, best first."""
        return self.ranking(self.ended())

    def best_text(self) -> str:
        """The text with the highest score so far, finished or live; vetoed only if all are."""
        best = self._best()
        return self.latest[best].text if best is not None else ""

    def trace(
        self,
        number: int,
        ended: Round,
        freed: int,
        times_s: Sequence[float],
        alpha: float,
        forks: Forks,
        discarded_tokens: int,
    ) -> RoundTrace:
        """The record of a round. `times_s`: its begin, and the ends of extend, score and prune."""
        candidates, vetoed, best = ended.candidates, self.vetoed - self.lost, self._best()
        num_finished = sum(candidate.finish is not None for candidate in candidates)
        extend_ms, score_ms, prune_ms = ((end - begin) * 1e3 for begin, end in pairwise(times_s))
        has_room = self.num_traced + len(candidates) + len(forks) <= MAX_TRACED
        fates = self._fates(candidates) if has_room else ()
        made = tuple(Fork(*fork) for fork in sorted(forks.items())) if has_room else ()
        self.num_traced += len(fates) + len(made)
        num_lost = len(self.lost) - sum(trace.num_lost for trace in self.rounds)
        trace = RoundTrace(
            number=number,
            decision_token=ended.num_tokens,
            ended_by=ended.ended_by,
            num_started=self.num_started,
            num_finished=num_finished,
            num_rejected=self.num_started - num_finished - num_lost - len(self.live) + len(forks),
            num_live=len(self.live),
            best_score=self.verdicts[best].score if best is not None else 0.0,
            scores=tuple(fate.score for fate in fates),
            session_slots=ended.slots.session,
            freed_slots=freed,
            capacity_slots=ended.slots.capacity,
            generated_tokens=ended.num_new + ended.repeated_tokens + discarded_tokens,
            discarded_tokens=discarded_tokens,
            extend_ms=extend_ms,
            score_ms=score_ms,
            prune_ms=prune_ms,
            num_vetoed=sum(c.finish is None and c.id in vetoed for c in candidates),
            num_lost=num_lost,
            alpha=alpha,
            candidates=fates,
            forks=made,
        )
        self.rounds.append(trace)
        return trace

    def _fates(self, candidates: Sequence[Candidate]) -> tuple[CandidateTrace, ...]:
        """Scores and fates of a round's candidates after its cut, best first."""
        finished = {candidate.id for candidate in candidates if candidate.finish}
        vetoed, numbers = self.vetoed, [c.id for c in candidates if c.id not in self.lost]
        scores, lengths = self.scores(numbers), {c.id: c.num_tokens for c in candidates}

        def fate(number: int) -> Fate:
            if number in finished:
                return Fate.FINISHED
            if number in self.live:
                return Fate.KEPT
            return Fate.VETOED if number in vetoed else Fate.REJECTED

        return tuple(
            CandidateTrace(number, scores[number], fate(number), lengths[number])
            for number in self.ranking(numbers)
        )

    def generation(self, num_candidates: int, total_ms: float) -> Generation:
        chosen = tuple(self._ranked(number) for number in self.answers()[:num_candidates])
        return Generation(
            candidates=chosen,
            rounds=tuple(self.rounds),
            usage=_usage(self, chosen[0].num_tokens),
            timings=Timings(
                total_ms=total_ms,
                open_ms=self.open_ms,
                extend_ms=sum(trace.extend_ms for trace in self.rounds),
                score_ms=sum(trace.score_ms for trace in self.rounds),
                prune_ms=sum(trace.prune_ms for trace in self.rounds),
                first_round_ms=self.first_round_ms,
            ),
            n=self.n,
            # Several are joined: the request has moved to a backend of another version.
            generator_fingerprint="+".join(sorted(self.made_by)),
            reward_fingerprint="+".join(
                sorted(fingerprint_of(self.rewards, judges) for judges in self.judged_by)
            ),
            degradations=tuple(self.degradations),
            hurried=self.hurried,
            reduced=self.reduced,
            relative_scores=self.compare
            or any(reward.normalization.kind == "batch" for reward in self.rewards),
        )

    def _is_truncated(self, number: int) -> bool:
        return self.latest[number].finish is FinishReason.LENGTH

    def _best(self) -> int | None:
        return next(iter(self.ranking({*self.ranked, *self.ended()})), None)

    def _ranked(self, number: int) -> RankedCandidate:
        candidate = self.latest[number]
        assert candidate.finish
        ranked = RankedCandidate(
            id=number,
            text=candidate.text,
            score=self.verdicts[number].score,
            finish=candidate.finish,
            num_tokens=candidate.num_tokens,
            mean_logprob=candidate.mean_logprob,
            rewards=self.raw[number],
            vetoed=self.verdicts[number].vetoed,
        )
        return self.tokens.completed(ranked) if self.tokens.is_kept else ranked


def _usage(state: RunState, answer_tokens: int) -> Usage:
    candidates = state.latest.values()
    ended = [c.num_tokens for c in candidates if c.finish is not None]
    mean_ended = sum(ended) / len(ended)
    estimate = sum(
        c.num_tokens if c.finish else max(c.num_tokens, mean_ended)
        for c in candidates
        if c.id not in state.forks
    )
    inherited = sum(num_tokens for _, num_tokens in state.forks.values())
    discarded = sum(trace.discarded_tokens for trace in state.rounds) + state.unused_tokens
    generated = sum(c.num_tokens for c in candidates) - inherited + discarded
    return Usage(
        prompt_tokens=state.prompt_tokens,
        generated_tokens=generated + state.repeated_tokens,
        answer_tokens=answer_tokens,
        discarded_tokens=discarded,
        reward_tokens=state.reward_tokens,
        freed_slots=sum(trace.freed_slots for trace in state.rounds),
        best_of_n_tokens_estimate=round(estimate),
    )
