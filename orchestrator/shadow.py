"""Shadows: rejected candidates that are run to their end after all, to learn what rejecting costs.

One of those rejected in a round, drawn at random, stands for all of them. Which they are, what they
say together with the candidates that ended, and what many requests say together. Pure: knows no
model, no wire and no clock. docs/telemetry.md has the formulas and their limits.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from orchestrator import rejection
from orchestrator.composition import Verdict
from orchestrator.scoring import judged
from specrej.contracts import Candidate, FinishReason, Round, RoundEnd, Schedule, WeightedReward

# Those that a recommendation is chosen from.
ALPHAS = tuple(tenth / 10 for tenth in range(1, 10))

_MAX_DECISIONS = 32  # of a request, that are looked at
_WINDOW = 4096  # latest requests of a kind, that statistics are made of; about 1 KB each
_MAX_KINDS = 16  # of schedule and reward, that are told apart
_MAX_NAMED = 8  # decision tokens in the name of a schedule

# Nothing seen in n requests: with 95 % confidence it happens in less than 3 / n of them.
_RULE_OF_THREE = 3.0


@dataclass(frozen=True, slots=True)
class Shadow:
    """A candidate as it was when it was rejected, in the round of that index (from 0), and how many
    were rejected there with it, itself included."""

    candidate: Candidate
    round: int
    stands_for: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision token and the raw values of all that grew on until its cut, by candidate."""

    token: int
    planned: bool  # by the schedule; else the slots were full
    values: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class End:
    """A candidate's end: its raw values, and whether it was cut off at max_tokens."""

    values: tuple[float, ...]
    truncated: bool

    @classmethod
    def of(cls, candidate: Candidate, values: tuple[float, ...]) -> End:
        return cls(values, candidate.finish is FinishReason.LENGTH)


@dataclass(slots=True)
class Notes:
    """What shadows need to know of a run. Taking notes changes nothing of it."""

    rng: random.Random
    decisions: list[Decision] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
    shadows: list[Shadow] = field(default_factory=list)

    def take(
        self, ended: Round, values: Mapping[int, tuple[float, ...]], live: Collection[int]
    ) -> None:
        """A round that ended, the latest raw values of all, and who lives on after its cut."""
        growing = [c for c in ended.candidates if c.finish is None and c.id in values]
        if rejected := [candidate for candidate in growing if candidate.id not in live]:
            drawn = self.rng.choice(rejected)
            self.shadows.append(Shadow(drawn, len(self.decisions), len(rejected)))
        if growing:
            planned = ended.ended_by is RoundEnd.DECISION_TOKEN
            partial = {candidate.id: values[candidate.id] for candidate in growing}
            self.decisions.append(Decision(ended.num_tokens, planned, partial))
        self.ends |= {c.id: End.of(c, values[c.id]) for c in ended.candidates if c.finish}


@dataclass(frozen=True, slots=True)
class Sampled:
    """A candidate whose end is known: one that ended in its run, or a shadow.

    All of a request together stand for all of its candidates, had none been rejected.

    `partial`: its raw values at the decision tokens that it grew through, from the first on.
    `round`: the index of the round that rejected it; None if it ended in its run.
    """

    id: int
    stands_for: int
    partial: tuple[tuple[float, ...], ...]
    end: End
    round: int | None = None

    def values(self, index: int) -> tuple[float, ...]:
        """Raw values at a decision token by its index, or of the end if that came before."""
        return self.partial[index] if index < len(self.partial) else self.end.values


def ended_in_run(notes: Notes) -> list[Sampled]:
    """The candidates of a run that ended, each standing for itself."""
    return [Sampled(number, 1, _partial(notes, number), end) for number, end in notes.ends.items()]


def ended_after(
    notes: Notes, shadow: Shadow, later: Sequence[tuple[float, ...]], end: End
) -> Sampled:
    """A shadow at its end; `later`: raw values at the decision tokens after its rejection."""
    number = shadow.candidate.id
    partial = (*_partial(notes, number), *later)
    return Sampled(number, shadow.stands_for, partial, end, shadow.round)


def _partial(notes: Notes, number: int) -> tuple[tuple[float, ...], ...]:
    return tuple(d.values[number] for d in notes.decisions if number in d.values)


class Pairs(NamedTuple):
    """Weighted pairs of candidates: concordant less discordant; that differ in their partial
    rewards; that differ in their final ones."""

    agreement: float = 0.0
    partial: float = 0.0
    final: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What one request says.

    `pairs`: by decision token. `regretted`: a shadow would have been the answer. `best_stands_for`:
    how many the best of the sample stands for. `lost`: of those, how many are rejected, by alpha.
    `most_stand_for`: the most that one of the sample stands for, so that about one regret in so
    many is seen.
    """

    pairs: Mapping[int, Pairs]
    regretted: bool
    best_stands_for: int
    most_stand_for: int
    lost: tuple[int, ...]


def observe(
    sample: Sequence[Sampled], decisions: Sequence[Decision], rewards: Sequence[WeightedReward]
) -> Observation:
    """What the ended candidates of a request and its shadows say; at least one of them ended.

    Raises:
        RewardInvalid: a weighted sum is too large for a float.
    """
    final = judged({each.id: each.end.values for each in sample}, rewards)
    best = min(sample, key=lambda each: _demerit(each, final[each.id]))
    decisions = decisions[:_MAX_DECISIONS]
    partial = [
        judged({each.id: each.values(index) for each in sample}, rewards)
        for index in range(len(decisions))
    ]
    return Observation(
        _pairs_by_token(sample, decisions, partial, final),
        best.round is not None,
        best.stands_for,
        max(each.stands_for for each in sample),
        tuple(_num_lost(best.id, sample, partial, alpha) for alpha in ALPHAS),
    )


def _demerit(each: Sampled, verdict: Verdict) -> tuple[bool, bool, float, int]:
    """Least for the answer: as a run ranks its answers."""
    return verdict.vetoed, each.end.truncated, -verdict.score, each.id


def _pairs_by_token(
    sample: Sequence[Sampled],
    decisions: Sequence[Decision],
    partial: Sequence[Mapping[int, Verdict]],
    final: Mapping[int, Verdict],
) -> dict[int, Pairs]:
    by_token: dict[int, Pairs] = {}
    for index, decision in enumerate(decisions):
        growing = [
            (each.stands_for, partial[index][each.id].score, final[each.id].score)
            for each in sample
            if index < len(each.partial)
        ]
        token = decision.token if decision.planned else _power_of_two(decision.token)
        by_token[token] = added([by_token.get(token, Pairs()), pairs(growing)])
    return by_token


def _power_of_two(token: int) -> int:
    """The last one: full slots end rounds anywhere, and a metric has only so many labels."""
    return 1 << max(0, token.bit_length() - 1)


def pairs(candidates: Iterable[tuple[float, float, float]]) -> Pairs:
    """All pairs of (how many it stands for, partial reward, final reward).

    A pair weighs the product of its weights, as the draws in two rounds do not depend on each
    other. Two that were rejected in one round are never both drawn: such pairs are not in.
    """
    agreement = of_partial = of_final = 0.0
    for (weight, partial, final), (other, partial_2, final_2) in combinations(candidates, 2):
        sign, sign_2 = _sign(partial - partial_2), _sign(final - final_2)
        agreement += weight * other * sign * sign_2
        of_partial += weight * other * abs(sign)
        of_final += weight * other * abs(sign_2)
    return Pairs(agreement, of_partial, of_final)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def added(several: Iterable[Pairs]) -> Pairs:
    """Pairs of several requests."""
    columns = zip(*several, strict=True)
    return Pairs(*(math.fsum(column) for column in columns))


def tau_b(of: Pairs) -> float | None:
    """Kendall's rank correlation with ties (tau-b); None where there is nothing to tell apart."""
    possible = math.sqrt(of.partial * of.final)
    return of.agreement / possible if possible else None


def _num_lost(
    best: int, sample: Sequence[Sampled], partial: Sequence[Mapping[int, Verdict]], alpha: float
) -> int:
    """Of those the best stands for, how many a run with this alpha rejects.

    The sample is taken for all candidates: each counts as many as it stands for.
    """
    standing = {each.id: each.stands_for for each in sample}
    growing = {each.id: len(each.partial) for each in sample}
    lost = 0
    for index, verdicts in enumerate(partial):
        if growing[best] <= index:
            break  # it has ended: it can be ranked out, and still be the answer
        kept = _cut(standing, verdicts, alpha)
        lost += standing[best] - kept[best]
        standing = kept
    return lost


def _cut(
    standing: Mapping[int, int], verdicts: Mapping[int, Verdict], alpha: float
) -> dict[int, int]:
    """How many of each stand after a cut."""
    vetoed = {number for number, verdict in verdicts.items() if verdict.vetoed}
    scores = {number: verdict.score for number, verdict in verdicts.items()}
    room = rejection.num_kept(sum(standing.values()), alpha)
    kept: dict[int, int] = {}
    for number in rejection.rank(scores, vetoed):
        kept[number] = 0 if number in vetoed else min(standing[number], room)
        room -= kept[number]
    return kept


class Kind(NamedTuple):
    """What statistics are kept apart for."""

    schedule: str
    reward: str


def kind_of(schedule: Schedule, rewards: Sequence[WeightedReward]) -> Kind:
    """The kind of a request, as labels show it."""
    return Kind(_name(schedule), "+".join(reward.name for reward in rewards))


def _name(schedule: Schedule) -> str:
    match schedule.kind:
        case "tokens":
            more = ",..." if len(schedule.tokens) > _MAX_NAMED else ""
            return f"tokens {','.join(map(str, schedule.tokens[:_MAX_NAMED]))}{more}"
        case "geometric":
            return f"geometric {schedule.first}x{schedule.factor:g}"
        case _:
            return schedule.kind


class Estimate(NamedTuple):
    """A share, and its standard error."""

    value: float
    error: float


class Statistics:
    """What the latest requests of each kind say together. Its memory is bounded.

    It may be asked from any thread while one adds to it: a list of a deque is made in one go.
    """

    def __init__(self, target_regret: float, window: int = _WINDOW) -> None:
        """`target_regret`: the share of requests that may lose their best candidate."""
        self._target = target_regret
        self._window = window
        self._kinds: dict[Kind, deque[Observation]] = {}

    @property
    def kinds(self) -> list[Kind]:
        """Those with an observation."""
        return [kind for kind, seen in list(self._kinds.items()) if seen]

    def admit(self, kind: Kind) -> bool:
        """Whether observations of this kind are taken: those of the first so many are."""
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            return False
        self._kinds.setdefault(kind, deque(maxlen=self._window))
        return True

    def add(self, kind: Kind, observation: Observation) -> None:
        """One more of a kind that was admitted."""
        self._kinds[kind].append(observation)

    def correlations(self, kind: Kind) -> Iterator[tuple[int, float]]:
        """Rank correlations of partial and final rewards, by decision token, ascending."""
        seen = list(self._kinds[kind])
        tokens = sorted({token for observation in seen for token in observation.pairs})
        for token in tokens[:_MAX_DECISIONS]:
            tau = tau_b(added(each.pairs[token] for each in seen if token in each.pairs))
            if tau is not None:
                yield token, tau

    def regret(self, kind: Kind) -> Estimate:
        """The share of requests whose best candidate was rejected."""
        seen = list(self._kinds[kind])
        return _share(seen, [each.best_stands_for * each.regretted for each in seen])

    def regrets_by_alpha(self, kind: Kind) -> tuple[Estimate, ...]:
        """The same, had the requests been made with each of `ALPHAS`."""
        seen = list(self._kinds[kind])
        by_alpha = zip(*(each.lost for each in seen), strict=True)
        return tuple(_share(seen, lost) for lost in by_alpha)

    def recommended_alpha(self, kind: Kind) -> float | None:
        """The largest alpha that meets the target, its error added, as all below do; 0 where none
        does.

        None: too few requests to tell.
        """
        would_have_shown = math.fsum(1 / each.most_stand_for for each in list(self._kinds[kind]))
        if would_have_shown < _RULE_OF_THREE / self._target:
            return None
        recommended = 0.0
        for alpha, regret in zip(ALPHAS, self.regrets_by_alpha(kind), strict=True):
            if regret.value + regret.error > self._target:
                break
            recommended = alpha
        return recommended


def _share(seen: Sequence[Observation], lost: Sequence[int]) -> Estimate:
    """The lost of all that the best ones stand for.

    The latter are about as many as requests, more where a shadow is the best of its sample but not
    of those it stands for; dividing by them mends most of that (Hajek's estimator, and the error
    that goes with it).
    """
    stand_for = [each.best_stands_for for each in seen]
    share = sum(lost) / sum(stand_for)
    off = (gone - share * all_ for gone, all_ in zip(lost, stand_for, strict=True))
    return Estimate(share, math.sqrt(math.fsum(each**2 for each in off)) / sum(stand_for))
