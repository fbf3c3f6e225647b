"""What shadows say, on simulated requests whose whole truth is known.

Simulations are seeded: a test either always passes or never does.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import rejection
from orchestrator.shadow import (
    ALPHAS,
    End,
    Kind,
    Notes,
    Observation,
    Pairs,
    Sampled,
    Statistics,
    added,
    ended_after,
    ended_in_run,
    kind_of,
    observe,
    pairs,
    tau_b,
)
from specrej.contracts import (
    Candidate,
    FinishReason,
    Normalization,
    Round,
    RoundEnd,
    Schedule,
    SlotGauge,
    WeightedReward,
)

PLAIN = (WeightedReward("toy"),)
KIND = Kind("geometric 16x2", "toy")
ALPHA = 0.5


@dataclass(frozen=True)
class World:
    """All that a request's candidates would get: a final reward each, and partial ones that
    resemble it as much as `likeness` says, by decision token; `ends`: after how many of these."""

    finals: Sequence[float]
    partials: Sequence[Sequence[float]]  # by decision token, then by candidate
    ends: Sequence[int]

    @classmethod
    def drawn(
        cls, rng: random.Random, n: int, likeness: Sequence[float], end: float = 0.0
    ) -> World:
        """`end`: the share of those that grow which end before the next decision token."""
        finals = [rng.gauss(0, 1) for _ in range(n)]
        partials = [
            [like * final + math.sqrt(1 - like**2) * rng.gauss(0, 1) for final in finals]
            for like in likeness
        ]
        ends = [
            next((t for t in range(len(likeness)) if rng.random() < end), len(likeness))
            for _ in range(n)
        ]
        return cls(finals, partials, ends)

    def reward(self, number: int, index: int) -> float:
        grows = index < self.ends[number]
        return self.partials[index][number] if grows else self.finals[number]

    def candidate(self, number: int, index: int) -> Candidate:
        finish = None if index < self.ends[number] else FinishReason.STOP
        return Candidate(number, "", 2**index, 0.0, finish)


@dataclass(frozen=True)
class Outcome:
    """A run in a world: its notes, who was rejected in which round, and who was the answer."""

    world: World
    notes: Notes
    rejected_in: dict[int, int]
    answer: int

    @property
    def lost_its_best(self) -> bool:
        finals = self.world.finals
        return max(range(len(finals)), key=lambda number: finals[number]) != self.answer

    def sample(self) -> list[Sampled]:
        """Those that ended, and the shadows."""
        shadows = [self.shadow(index) for index in range(len(self.notes.shadows))]
        return [*ended_in_run(self.notes), *shadows]

    def shadow(self, index: int) -> Sampled:
        shadow = self.notes.shadows[index]
        number, world = shadow.candidate.id, self.world
        last = min(world.ends[number], len(self.notes.decisions))
        later = [(world.partials[t][number],) for t in range(shadow.round + 1, last)]
        return ended_after(self.notes, shadow, later, End((world.finals[number],), False))

    def observed(self) -> Observation:
        return observe(self.sample(), self.notes.decisions, PLAIN)


def outcome(rng: random.Random, world: World, alpha: float = ALPHA) -> Outcome:
    """Speculative Rejection in a world, as `run.py` does it."""
    notes = Notes(rng)
    rejected_in: dict[int, int] = {}
    live, ranked = set(range(len(world.finals))), set[int]()
    for index in range(len(world.partials) + 1):
        ended = [world.candidate(number, index) for number in sorted(live)]
        ranked |= {candidate.id for candidate in ended}
        live -= {candidate.id for candidate in ended if candidate.finish}
        rewards = {number: world.reward(number, index) for number in range(len(world.finals))}
        scores = {number: rewards[number] for number in ranked}
        kept = rejection.cut(scores, live, alpha, must_release=False).kept if live else ranked
        rejected_in |= dict.fromkeys(live - kept, index)
        ranked &= kept
        live &= kept
        over = RoundEnd.DECISION_TOKEN if live else RoundEnd.ALL_FINISHED
        notes.take(
            Round(tuple(ended), over, 2**index, SlotGauge(1, 0, 0)),
            {number: (reward,) for number, reward in rewards.items()},
            live,
        )
        if not live:
            break
    answer = max(notes.ends, key=lambda number: world.finals[number])
    return Outcome(world, notes, rejected_in, answer)


def outcomes(
    count: int, *, n: int = 16, likeness: Sequence[float] = (0.5, 0.8, 0.95), end: float = 0.1
) -> Iterator[Outcome]:
    rng = random.Random(6)
    for _ in range(count):
        yield outcome(rng, World.drawn(rng, n, likeness, end))


def statistics_of(
    observations: Iterable[Observation], target_regret: float = 0.05, window: int = 1000
) -> Statistics:
    known = Statistics(target_regret, window)
    assert known.admit(KIND)
    for each in observations:
        known.add(KIND, each)
    return known


def true_pairs(seen: Outcome, index: int) -> Pairs:
    """Of all that would grow at a decision token, but for pairs that were rejected together."""
    world = seen.world
    of_round: dict[int | None, list[tuple[float, float, float]]] = {}
    for number, end in enumerate(world.ends):
        if end > index:
            row = (1.0, world.partials[index][number], world.finals[number])
            of_round.setdefault(seen.rejected_in.get(number), []).append(row)
    everyone = pairs(row for rows in of_round.values() for row in rows)
    together = added(pairs(rows) for where, rows in of_round.items() if where is not None)
    return Pairs(*(every - some for every, some in zip(everyone, together, strict=True)))


# Rank correlation


def test_tau_is_kendalls() -> None:
    """By hand: three pairs agree, two do not, one is tied in the final reward."""
    rows = [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (1.0, 3.0, 3.0), (1.0, 4.0, 2.0)]
    assert pairs(rows) == Pairs(agreement=1, partial=6, final=5)
    assert tau_b(pairs(rows)) == pytest.approx(1 / math.sqrt(30))
    assert tau_b(pairs(rows[:1])) is None
    assert tau_b(pairs((weight, 1.0, final) for weight, _, final in rows)) is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), alpha=st.sampled_from([0.1, 0.5, 0.8]))
def test_the_sample_stands_for_everybody(seed: int, n: int, alpha: float) -> None:
    """At every cut: guards against candidates that count twice, or for nobody."""
    rng = random.Random(seed)
    seen = outcome(rng, World.drawn(rng, n, (0.5, 0.7, 0.9), 0.2), alpha)
    for index, decision in enumerate(seen.notes.decisions):
        growing = [each for each in seen.sample() if index < len(each.partial)]
        there = [each for each in growing if each.round is None or each.round >= index]
        assert sum(each.stands_for for each in there) == len(decision.values)
        for each in growing:
            assert each.values(index) == (seen.world.partials[index][each.id],)


def test_the_correlation_is_what_it_would_be_if_all_were_known() -> None:
    """Unbiased, at every decision token, though survivors alone say something else."""
    several = list(outcomes(600))
    observed = [each.observed() for each in several]
    for index in range(3):
        token = 2**index
        estimate = tau_b(added(each.pairs[token] for each in observed if token in each.pairs))
        truth = tau_b(
            added(true_pairs(each, index) for each in several if index < len(each.notes.decisions))
        )
        assert estimate == pytest.approx(truth, abs=0.03), token
    survivors = [[each for each in ended_in_run(seen.notes) if each.partial] for seen in several]
    naive = tau_b(
        added(pairs((1.0, e.partial[0][0], e.end.values[0]) for e in each) for each in survivors)
    )
    truth = tau_b(added(true_pairs(each, 0) for each in several))
    assert naive is not None and truth is not None and abs(naive - truth) > 0.1


# Regret


@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("likeness", [(0.3, 0.5, 0.8), (0.5, 0.8, 0.95), (0.9, 0.97, 0.99)])
def test_regret_is_about_how_often_the_best_was_rejected(
    n: int, likeness: tuple[float, ...]
) -> None:
    """From prefixes that foretell little to those that foretell all."""
    several = list(outcomes(500, n=n, likeness=likeness))
    observed = [each.observed() for each in several]
    known = statistics_of(observed)
    truth = statistics.mean(each.lost_its_best for each in several)
    seen = statistics.mean(each.regretted for each in observed)
    assert known.regret(KIND).value == pytest.approx(truth, rel=0.25, abs=0.03)
    # What is seen is too little: a round's shadow is seldom the one that would have won.
    assert seen <= known.regret(KIND).value


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), alpha=st.sampled_from(ALPHAS))
def test_at_the_alpha_of_the_run_lost_is_who_was_rejected(seed: int, n: int, alpha: float) -> None:
    """The policy as it is played again on the sample, against the policy itself."""
    rng = random.Random(seed)
    seen = outcome(rng, World.drawn(rng, n, (0.5, 0.7, 0.9), 0.2), alpha).observed()
    lost = seen.lost[ALPHAS.index(alpha)]
    assert lost == seen.best_stands_for * seen.regretted


def test_regret_at_other_alphas_is_about_what_runs_with_them_have() -> None:
    """From runs at one alpha. They err on the safe side, by little."""
    rng = random.Random(8)
    worlds = [World.drawn(rng, 16, (0.6, 0.85, 0.95), 0.1) for _ in range(400)]
    known = statistics_of(outcome(rng, world, 0.5).observed() for world in worlds)
    estimates = known.regrets_by_alpha(KIND)
    values = [estimate.value for estimate in estimates]
    assert values == sorted(values)
    for alpha, estimate in zip(ALPHAS, values, strict=True):
        truth = statistics.mean(outcome(rng, world, alpha).lost_its_best for world in worlds)
        assert truth - 0.03 < estimate < truth + 0.08, alpha


def test_the_error_of_a_regret_is_how_much_it_differs_between_draws() -> None:
    """Thirty times the same number of other requests."""
    estimates = []
    for seed in range(30):
        rng = random.Random(seed)
        worlds = [World.drawn(rng, 8, (0.5, 0.8, 0.95)) for _ in range(60)]
        estimates.append(statistics_of(outcome(rng, w).observed() for w in worlds).regret(KIND))
    told = statistics.mean(estimate.error for estimate in estimates)
    found = statistics.stdev(estimate.value for estimate in estimates)
    assert told == pytest.approx(found, rel=0.3)


def test_a_truncated_or_vetoed_shadow_would_not_have_been_the_answer() -> None:
    """Guards against a regret for what the run itself would not have returned."""
    notes = Notes(random.Random(0))
    complete = Sampled(0, 1, (), End((0.1,), truncated=False))
    shadow = Sampled(1, 3, ((0.0,),), End((0.9,), truncated=False), round=0)
    assert observe([complete, shadow], notes.decisions, PLAIN).regretted
    truncated = replace(shadow, end=replace(shadow.end, truncated=True))
    assert not observe([complete, truncated], notes.decisions, PLAIN).regretted
    assert not observe(
        [complete, replace(shadow, end=End((-0.9,), truncated=False))],
        notes.decisions,
        [WeightedReward("toy", weight=-1.0, veto_below=-0.5)],
    ).regretted


def test_values_of_several_rewards_are_combined_as_a_run_combines_them() -> None:
    """The second reward, seen alone, would make the shadow the best."""
    complete = Sampled(0, 1, ((1.0, 0.0),), End((1.0, 0.0), truncated=False))
    shadow = Sampled(1, 1, ((0.0, 1.0),), End((0.0, 1.0), truncated=False), round=0)
    for weights, regretted in (((2.0, 1.0), False), ((1.0, 2.0), True)):
        rewards = [WeightedReward(name, w) for name, w in zip("ab", weights, strict=True)]
        assert observe([complete, shadow], (), rewards).regretted is regretted
        batch = [replace(each, normalization=Normalization("batch")) for each in rewards]
        assert observe([complete, shadow], (), batch).regretted is regretted


# The recommended alpha


def test_the_recommended_alpha_is_the_largest_that_keeps_to_the_target() -> None:
    """Against the truth of the same worlds."""
    rng = random.Random(9)
    worlds = [World.drawn(rng, 8, (0.9, 0.95, 0.98)) for _ in range(600)]
    known = statistics_of(outcome(rng, world, 0.5).observed() for world in worlds)
    regrets = [
        statistics.mean(outcome(rng, world, alpha).lost_its_best for world in worlds)
        for alpha in ALPHAS
    ]
    best = max(alpha for alpha, regret in zip(ALPHAS, regrets, strict=True) if regret <= 0.05)
    recommended = known.recommended_alpha(KIND)
    assert recommended is not None and best - 0.15 < recommended <= best
    assert 0.1 < best < 0.9, "else this shows nothing"


@pytest.mark.parametrize("stand_for", [1, 8])
def test_none_is_recommended_before_there_is_enough_to_tell(stand_for: int) -> None:
    """By the rule of three: fewer than 60 requests cannot show a regret of 5 %; where one of eight
    rejected ones is looked at, fewer than 480."""
    never = Observation(
        {}, regretted=False, best_stands_for=1, most_stand_for=stand_for, lost=(0,) * len(ALPHAS)
    )
    enough = 60 * stand_for
    assert statistics_of([never] * (enough - 1)).recommended_alpha(KIND) is None
    assert statistics_of([never] * enough).recommended_alpha(KIND) == ALPHAS[-1]


def test_no_alpha_may_be_good_enough() -> None:
    always = Observation(
        {}, regretted=True, best_stands_for=4, most_stand_for=4, lost=(4,) * len(ALPHAS)
    )
    known = statistics_of([always] * 240)
    assert known.recommended_alpha(KIND) == 0.0
    assert known.regret(KIND).value == 1.0


def test_the_error_of_a_regret_counts_against_an_alpha() -> None:
    """Two of sixty are within 5 %, but could as well be more."""
    never = Observation({}, regretted=False, best_stands_for=1, most_stand_for=1, lost=(0,) * 9)
    known = statistics_of([never] * 58 + [replace(never, lost=(0, 0, *(1,) * 7))] * 2)
    assert max(estimate.value for estimate in known.regrets_by_alpha(KIND)) < 0.05
    assert known.recommended_alpha(KIND) == 0.2


# Bounds and names


def test_memory_is_bounded() -> None:
    """In requests of a kind and in kinds: callers choose schedules and rewards."""
    one = Observation(
        {1: Pairs(1, 1, 1)}, regretted=False, best_stands_for=1, most_stand_for=1, lost=(0,) * 9
    )
    other = replace(one, pairs={2: Pairs(-1, 1, 1)}, regretted=True)
    known = statistics_of([one, other, other, other], window=3)
    assert list(known.correlations(KIND)) == [(2, -1.0)]
    assert known.regret(KIND).value == 1.0
    admitted = [known.admit(Kind(f"tokens {number}", "toy")) for number in range(100)]
    assert sum(admitted) == 15 and known.admit(KIND)
    assert known.kinds == [KIND], "kinds that nothing is known of are not shown"


def test_full_slots_make_no_label_each() -> None:
    """They end rounds at any token; a power of two stands for those up to the next."""
    values = [(1.0,), (2.0,), (3.0,)]
    ended = [
        Sampled(number, 1, (value, value), End(value, truncated=False))
        for number, value in enumerate(values)
    ]
    notes = Notes(random.Random(0))
    for token in (33, 50):
        live = [Candidate(number, "", token, 0.0) for number in range(3)]
        notes.take(
            Round(tuple(live), RoundEnd.SLOTS_FULL, token, SlotGauge(1, 0, 0)),
            dict(enumerate(values)),
            {0, 1, 2},
        )
    assert observe(ended, notes.decisions, PLAIN).pairs == {32: Pairs(6, 6, 6)}


def test_kinds_have_readable_names() -> None:
    rewards = (WeightedReward("helpful"), WeightedReward("harmless", weight=0.5))
    assert kind_of(Schedule(), rewards) == ("geometric 16x2", "helpful+harmless")
    assert kind_of(Schedule("memory"), PLAIN) == ("memory", "toy")
    assert kind_of(Schedule("tokens", (8, 20)), PLAIN) == ("tokens 8,20", "toy")
    many = Schedule("tokens", tuple(range(1, 40)))
    assert kind_of(many, PLAIN) == ("tokens 1,2,3,4,5,6,7,8,...", "toy")
