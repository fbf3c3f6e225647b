"""Estimates from shadows, on simulated requests with candidates of known ends.

Simulations are seeded: a test either always passes or always fails.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop import rejection
from orchestrator.observe.shadows import (
    ALPHAS,
    Kind,
    Observation,
    Pairs,
    Shadow,
    Shadows,
    Statistics,
    WatchedRun,
    observe,
    pairs,
    tau_b,
)
from specrej.contracts import (
    Candidate,
    FinishReason,
    GenerationRequest,
    Normalization,
    Prompt,
    Round,
    RoundEnd,
    Sampling,
    Schedule,
    Selection,
    SlotGauge,
    WeightedReward,
)

PLAIN = (WeightedReward("toy"),)
ALPHA = 0.5


def watched(
    rng: random.Random | None = None,
    rewards: Sequence[WeightedReward] = PLAIN,
    schedule: Schedule | None = None,
    least: int = 1,
) -> WatchedRun:
    """A run without backends."""
    selection = Selection(
        rewards=tuple(rewards), schedule=schedule or Schedule(), min_answers=least
    )
    request = GenerationRequest(Prompt(text="?"), Sampling(), selection)
    generator: Any = None
    return WatchedRun(request, generator, (), "", rng or random.Random(0))


@dataclass(frozen=True)
class World:
    """The rewards that all candidates of a request would get.

    `finals` has one per candidate; `partials` one per decision token and candidate, with the
    correlations `likeness`; `ends` the number of decision tokens that a candidate reaches.
    """

    finals: Sequence[float]
    partials: Sequence[Sequence[float]]
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
    """A run in a world: its record, the rounds that rejected candidates, and its regret."""

    world: World
    run: WatchedRun
    rejected_in: dict[int, int]
    lost_its_best: bool

    @property
    def observation(self) -> Observation:
        return observe(self.run)


def outcome(rng: random.Random, world: World, alpha: float = ALPHA, least: int = 1) -> Outcome:
    """Speculative Rejection in a world, and the ends of its shadows."""
    run = watched(rng, least=least)
    rejected_in: dict[int, int] = {}
    live, ranked = set(range(len(world.finals))), set[int]()
    for index in range(len(world.partials) + 1):
        candidates = tuple(world.candidate(number, index) for number in sorted(live))
        ranked |= live
        live -= {candidate.id for candidate in candidates if candidate.finish}
        rewards = {number: world.reward(number, index) for number in range(len(world.finals))}
        scores = {number: rewards[number] for number in ranked}
        kept = rejection.cut(scores, live, alpha, least=least).kept if live else ranked
        rejected_in |= dict.fromkeys(live - kept, index)
        ranked &= kept
        live &= kept
        ended_by = RoundEnd.DECISION_TOKEN if live else RoundEnd.ALL_FINISHED
        raw = {number: (reward,) for number, reward in rewards.items()}
        run.take(Round(candidates, ended_by, 2**index, SlotGauge(1, 0, 0)), raw, live)
        if not live:
            break
    lost_its_best = max(world.finals) > max(world.finals[number] for number in run.ends)
    for number, shadow in run.shadows.items():
        for index in range(shadow.decision + 1, len(run.decisions)):
            if index < world.ends[number]:
                run.partial[number].append((world.partials[index][number],))
        run.ends[number] = (world.finals[number],), False
    return Outcome(world, run, rejected_in, lost_its_best)


def outcomes(
    count: int, *, n: int = 16, likeness: Sequence[float] = (0.5, 0.8, 0.95), end: float = 0.1
) -> list[Outcome]:
    rng = random.Random(6)
    return [outcome(rng, World.drawn(rng, n, likeness, end)) for _ in range(count)]


def statistics_of(observations: Iterable[Observation], window: int = 1000) -> Statistics:
    known = Statistics(target_regret=0.05, window=window)
    known.latest.extend(observations)
    return known


def regret_of(known: Statistics) -> float:
    return known.regrets()[0][0]


def true_pairs(outcome: Outcome, index: int) -> Pairs:
    """Of all that would grow at a decision token, but for pairs that were rejected together."""
    world, round_of = outcome.world, outcome.rejected_in
    growing = [number for number, end in enumerate(world.ends) if end > index]
    apart = [
        pairs((1.0, world.partials[index][number], world.finals[number]) for number in pair)
        for pair in combinations(growing, 2)
        if len({round_of.get(number, -number - 1) for number in pair}) == 2
    ]
    agreement, partial, final = (sum(column) for column in zip(*apart, strict=True))
    return agreement, partial, final


# Rank correlation


def test_tau_is_kendalls() -> None:
    """By hand: three pairs agree, two do not, one is tied in the final reward."""
    rows = [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (1.0, 3.0, 3.0), (1.0, 4.0, 2.0)]
    assert pairs(rows) == (1, 6, 5)
    assert tau_b([pairs(rows)]) == pytest.approx(1 / math.sqrt(30))
    assert tau_b([pairs(rows[:1])]) is None
    assert tau_b([pairs((weight, 1.0, final) for weight, _, final in rows)]) is None


@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), alpha=st.sampled_from([0.1, 0.5, 0.8]))
def test_the_weights_of_the_sample_add_up_to_all_candidates(
    seed: int, n: int, alpha: float
) -> None:
    """At every decision: guards against candidates that count twice, or not at all."""
    rng = random.Random(seed)
    simulated = outcome(rng, World.drawn(rng, n, (0.5, 0.7, 0.9), 0.2), alpha)
    run, world = simulated.run, simulated.world
    for index in range(len(run.decisions)):
        growing = [number for number in run.ends if index < len(run.partial[number])]
        present = [i for i in growing if i not in run.shadows or run.shadows[i].decision >= index]
        weights = [run.shadows[i].weight if i in run.shadows else 1 for i in present]
        rejected_before = {i for i, round_ in simulated.rejected_in.items() if round_ < index}
        ends = [end for i, end in enumerate(world.ends) if i not in rejected_before]
        assert sum(weights) == sum(end > index for end in ends)
        for number in growing:
            assert run.partial[number][index] == (world.partials[index][number],)


def test_the_correlation_is_that_of_all_candidates() -> None:
    """Guards against an estimate from survivors alone, which is lower by more than 0.1."""
    simulated = outcomes(600)
    estimates = statistics_of(one.observation for one in simulated).correlations()
    truths = {}
    for index in range(3):
        reached = [one for one in simulated if index < len(one.run.decisions)]
        truths[2**index] = tau_b(true_pairs(one, index) for one in reached)
    assert estimates == pytest.approx(truths, abs=0.03)


# Regret


@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("likeness", [(0.3, 0.5, 0.8), (0.5, 0.8, 0.95), (0.9, 0.97, 0.99)])
def test_regret_is_about_how_often_the_best_was_rejected(
    n: int, likeness: tuple[float, ...]
) -> None:
    """From prefixes that predict little to prefixes that predict everything."""
    simulated = outcomes(500, n=n, likeness=likeness)
    observations = [one.observation for one in simulated]
    estimate = regret_of(statistics_of(observations))
    truth = statistics.mean(one.lost_its_best for one in simulated)
    assert estimate == pytest.approx(truth, rel=0.25, abs=0.03)
    # The observed share is smaller: a round's shadow is seldom the one that would have won.
    assert statistics.mean(observation.lost[0] > 0 for observation in observations) <= estimate


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    alpha=st.sampled_from(ALPHAS),
    least=st.sampled_from((1, 1, 4)),
)
def test_replaying_the_alpha_of_the_run_rejects_the_same(
    seed: int, n: int, alpha: float, least: int
) -> None:
    """The policy replayed on the sample, against the policy itself."""
    rng = random.Random(seed)
    world = World.drawn(rng, n, (0.5, 0.7, 0.9), 0.2)
    lost = outcome(rng, world, alpha, least).observation.lost
    assert lost[1 + ALPHAS.index(alpha)] == lost[0]


def test_of_vetoed_candidates_the_best_one_is_kept() -> None:
    """Guards against a recommended alpha of 0 where prefixes are vetoed whatever alpha is."""
    run = watched(rewards=(WeightedReward("toy", veto_below=0.0),))
    growing = tuple(Candidate(number, "", 1, 0.0) for number in range(4))
    raw: dict[int, tuple[float, ...]] = {number: (-4.0 + number,) for number in range(4)}
    run.take(Round(growing, RoundEnd.DECISION_TOKEN, 1, SlotGauge(1, 0, 0)), raw, {3})
    ended = (Candidate(3, "", 2, 0.0, FinishReason.STOP),)
    run.take(Round(ended, RoundEnd.ALL_FINISHED, 2, SlotGauge(1, 0, 0)), {3: (1.0,)}, set())
    run.ends |= dict.fromkeys(run.shadows, ((-1.0,), False))
    assert set(observe(run).lost) == {0}


@pytest.mark.parametrize(
    ("n", "likeness", "margin"), [(16, (0.6, 0.85, 0.95), 0.35), (8, (0.9, 0.95, 0.98), 0.15)]
)
def test_regret_at_other_alphas_is_about_that_of_runs_with_them(
    n: int, likeness: Sequence[float], margin: float
) -> None:
    """From runs at one alpha; the error is small and on the safe side.

    The recommended alpha is below the largest whose runs meet the target, by less than `margin`.
    """
    rng = random.Random(8)
    worlds = [World.drawn(rng, n, likeness) for _ in range(500)]
    known = statistics_of(outcome(rng, world, 0.5).observation for world in worlds)
    estimates = [estimate for estimate, _ in known.regrets()[1:]]
    assert estimates == sorted(estimates)
    best = 0.0
    for alpha, estimate in zip(ALPHAS, estimates, strict=True):
        truth = statistics.mean(outcome(rng, world, alpha).lost_its_best for world in worlds)
        assert truth - 0.03 < estimate < truth + 0.08, alpha
        best = alpha if truth <= 0.05 else best
    recommended = known.recommended_alpha()
    assert recommended is not None and best - margin < recommended <= best
    assert 0.1 < best < 0.9, "otherwise the worlds do not test this"


def test_the_error_of_a_regret_is_its_deviation_between_draws() -> None:
    """Of thirty draws of sixty requests."""
    estimates = []
    for seed in range(30):
        rng = random.Random(seed)
        worlds = [World.drawn(rng, 8, (0.5, 0.8, 0.95)) for _ in range(60)]
        estimates.append(statistics_of(outcome(rng, w).observation for w in worlds).regrets()[0])
    error = statistics.mean(error for _, error in estimates)
    assert error == pytest.approx(statistics.stdev(value for value, _ in estimates), rel=0.3)


def two_ends(
    rewards: Sequence[WeightedReward],
    complete: tuple[float, ...],
    shadow: tuple[float, ...],
    *,
    is_truncated: bool = False,
) -> bool:
    """Whether a shadow with these values would have been the answer, instead of a complete one."""
    run = watched(rewards=rewards)
    run.shadows[1] = Shadow(Candidate(1, "", 1, 0.0), 0, 3)
    run.ends = {0: (complete, False), 1: (shadow, is_truncated)}
    return observe(run).lost[0] == 3


def test_a_truncated_or_vetoed_shadow_would_not_have_been_the_answer() -> None:
    """Guards against a regret for a candidate that the run itself would not have returned."""
    assert two_ends(PLAIN, (0.1,), (0.9,))
    assert not two_ends(PLAIN, (0.1,), (0.9,), is_truncated=True)
    vetoing = [WeightedReward("toy", weight=-1.0, veto_below=-0.5)]
    assert not two_ends(vetoing, (0.1,), (-0.9,))


@pytest.mark.parametrize(("weights", "regretted"), [((2.0, 1.0), False), ((1.0, 2.0), True)])
@pytest.mark.parametrize("kind", ["none", "batch"])
def test_several_rewards_are_combined_as_in_a_run(
    weights: tuple[float, float], regretted: bool, kind: Literal["none", "batch"]
) -> None:
    """The second reward alone would make the shadow the best."""
    rewards = [
        WeightedReward(name, weight, Normalization(kind))
        for name, weight in zip("ab", weights, strict=True)
    ]
    assert two_ends(rewards, (1.0, 0.0), (0.0, 1.0)) is regretted


# The recommended alpha


NEVER = Observation([], best_weight=1, max_weight=1, lost=(0,) * 10)
NEVER_OF_EIGHT = NEVER._replace(max_weight=8)
ALWAYS = Observation([], best_weight=4, max_weight=4, lost=(4,) * 10)
AT_03 = NEVER._replace(lost=(0, 0, 0, *(1,) * 7))


@pytest.mark.parametrize(
    ("observations", "recommended"),
    [
        # By the rule of three, fewer than 60 requests cannot show a regret of 5 %; with one shadow
        # of eight rejected candidates, fewer than 480.
        ([NEVER] * 59, None),
        ([NEVER] * 60, ALPHAS[-1]),
        ([NEVER_OF_EIGHT] * 479, None),
        ([NEVER_OF_EIGHT] * 480, ALPHAS[-1]),
        ([ALWAYS] * 240, 0.0),
        # Two of sixty are within 5 %; with the standard error they are not.
        ([NEVER] * 58 + [AT_03] * 2, 0.2),
    ],
    ids=["59", "60", "479 of eight", "480 of eight", "always", "two of sixty"],
)
def test_the_recommended_alpha_meets_the_target_with_enough_requests(
    observations: list[Observation], recommended: float | None
) -> None:
    assert statistics_of(observations).recommended_alpha() == recommended


# Bounds and names


def test_memory_is_bounded() -> None:
    """In requests of a kind and in kinds: callers choose schedules and rewards."""
    one = Observation([(1, (1, 1, 1))], best_weight=1, max_weight=1, lost=(0,) * 10)
    other = Observation([(2, (-1, 1, 1))], best_weight=1, max_weight=1, lost=(1,) * 10)
    known = statistics_of([one, other, other, other], window=3)
    assert known.correlations() == {2: -1.0}
    assert regret_of(known) == 1.0
    shadows = Shadows(share=1.0)
    requests = [
        watched(schedule=Schedule("tokens", tokens=(number,))).request for number in range(1, 100)
    ]
    generator: Any = None
    admitted = [shadows.watch(request, generator, (), "") is not None for request in requests]
    assert admitted == [True] * 16 + [False] * 83
    assert shadows.watch(requests[0], generator, (), "")


def test_full_slots_share_labels() -> None:
    """They end rounds at any token; the label is the last power of two."""
    run = watched()
    values = {number: (float(number),) for number in range(3)}
    for token in (33, 50):
        live = tuple(Candidate(number, "", token, 0.0) for number in range(3))
        run.take(Round(live, RoundEnd.SLOTS_FULL, token, SlotGauge(1, 0, 0)), values, {0, 1, 2})
    run.ends = {number: (raw, False) for number, raw in values.items()}
    assert list(observe(run).pairs) == [(32, (3, 3, 3)), (32, (3, 3, 3))]


def test_pairs_are_of_the_first_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a core that is busy for seconds after a request of a thousand candidates."""
    monkeypatch.setattr("orchestrator.observe.shadows._MAX_COMPARED", 2)
    run = watched()
    values = {number: (float(number),) for number in range(3)}
    live = tuple(Candidate(number, "", 32, 0.0) for number in reversed(range(3)))
    run.take(Round(live, RoundEnd.DECISION_TOKEN, 32, SlotGauge(1, 0, 0)), values, {0, 1, 2})
    run.ends = {number: (raw, False) for number, raw in values.items()}
    assert list(observe(run).pairs) == [(32, (1, 1, 1))]


def test_kinds_have_readable_names() -> None:
    def kind(schedule: Schedule, *rewards: WeightedReward) -> Kind:
        return Kind.of(watched(rewards=rewards, schedule=schedule).request)

    rewards = (WeightedReward("helpful"), WeightedReward("harmless", weight=0.5))
    assert kind(Schedule(), *rewards) == ("geometric 16x2", "helpful+harmless")
    assert kind(Schedule("memory"), *PLAIN) == ("memory", "toy")
    assert kind(Schedule("tokens", tokens=(8, 20)), *PLAIN) == ("tokens 8,20", "toy")
    many = Schedule("tokens", tokens=tuple(range(1, 40)))
    assert kind(many, *PLAIN) == ("tokens 1,2,3,4,5,6,7,8,...", "toy")
