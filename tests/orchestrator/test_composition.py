"""Several rewards into one score: normalisation, weights and vetoes; composites by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.composition import (
    Composite,
    Verdict,
    check_composites,
    check_expansion,
    combine,
    expanded,
)
from orchestrator.scoring import judged
from specrej.contracts import Normalization, WeightedReward
from specrej.errors import RewardInvalid
from specrej.validation import MAX_REWARDS

BATCH = Normalization("batch")
VALUES = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(-1e6, 1e6).filter(lambda weight: abs(weight) > 1e-9)
NORMALIZATIONS = st.one_of(
    st.just(Normalization()),
    st.builds(Normalization, st.just("fixed"), st.floats(-1e12, 1e12), st.floats(1e-12, 1e12)),
    st.just(BATCH),
)


@st.composite
def panels(
    draw: st.DrawFn, values: st.SearchStrategy[float] = VALUES
) -> tuple[dict[int, tuple[float, ...]], list[WeightedReward]]:
    """Up to 12 candidates' raw values of up to 4 rewards."""
    count = draw(st.integers(1, 4))
    rewards = [
        WeightedReward(
            f"r{index}", draw(WEIGHTS), draw(NORMALIZATIONS), draw(st.none() | st.floats(-1e6, 1e6))
        )
        for index in range(count)
    ]
    rows = st.tuples(*[values] * count)
    return draw(st.dictionaries(st.integers(0, 99), rows, min_size=1, max_size=12)), rewards


def single(values: Sequence[float], reward: WeightedReward | None = None) -> list[float]:
    """The scores that one reward's values make."""
    rows = {number: (value,) for number, value in enumerate(values)}
    verdicts = combine(rows, [reward or WeightedReward("r", normalization=BATCH)])
    return [verdicts[number].score for number in rows]


@given(panels(), st.randoms())
def test_the_order_of_rewards_and_candidates_does_not_matter(
    panel: tuple[dict[int, tuple[float, ...]], list[WeightedReward]], random: Random
) -> None:
    """Guards against equal requests, and equal cache keys, with different answers."""
    values, rewards = panel
    order = random.sample(range(len(rewards)), len(rewards))
    numbers = random.sample(sorted(values), len(values))
    swapped = {number: [values[number][index] for index in order] for number in numbers}
    assert combine(swapped, [rewards[index] for index in order]) == combine(values, rewards)


@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=30),
    st.integers(-(10**6), 10**6),
    st.sampled_from([2.0**-30, 0.25, 1.0, 3.0, 1e3, 1e100]),
)
def test_batch_normalisation_knows_no_unit_and_no_origin(
    values: list[int], shift: int, scale: float
) -> None:
    """Guards against a reward that decides by its unit: what "batch" is for."""
    moved = single([scale * (value + shift) for value in values])
    assert moved == pytest.approx(single([float(value) for value in values]), abs=1e-6)


@given(st.lists(VALUES, min_size=2, max_size=30))
def test_batch_normalised_values_have_mean_0_and_deviation_1(values: list[float]) -> None:
    """Guards against the deviation of a sample, and sums that are off by a factor."""
    scores = single(values)
    if len(set(values)) == 1:
        assert scores == [0.0] * len(values)
        return
    assert math.fsum(scores) / len(scores) == pytest.approx(0, abs=1e-6)
    assert math.fsum(score**2 for score in scores) / len(scores) == pytest.approx(1)


@given(st.lists(VALUES, min_size=1, max_size=30))
def test_batch_normalisation_keeps_the_order(values: list[float]) -> None:
    """Guards against a sole reward whose ranking changes with its unit."""
    scores = single(values)
    by_value = sorted(range(len(values)), key=lambda index: values[index])
    assert [scores[index] for index in by_value] == sorted(scores)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 40))
def test_equal_values_all_count_0(value: float, count: int) -> None:
    """Guards against a division by zero, or by what rounding has left of it."""
    assert single([value] * count) == [0.0] * count


@given(
    st.lists(VALUES, min_size=1, max_size=10),
    WEIGHTS,
    st.floats(-1e12, 1e12),
    st.floats(1e-12, 1e12),
)
def test_fixed_normalisation_is_exact(
    values: list[float], weight: float, mean: float, deviation: float
) -> None:
    """Guards against a shortcut that rounds otherwise than the documented formula."""
    reward = WeightedReward("r", weight, Normalization("fixed", mean, deviation))
    assert single(values, reward) == [weight * ((value - mean) / deviation) for value in values]


@given(st.lists(VALUES, min_size=1, max_size=10), WEIGHTS)
def test_a_sole_reward_counts_as_it_is_times_its_weight(values: list[float], weight: float) -> None:
    """Guards against a weight that is dropped where there is nothing to add up."""
    assert single(values, WeightedReward("r", weight)) == [weight * value for value in values]


@given(panels())
def test_vetoes_look_at_raw_values(
    panel: tuple[dict[int, tuple[float, ...]], list[WeightedReward]],
) -> None:
    """Guards against thresholds held against normalised or weighted values, or another reward's."""
    values, rewards = panel
    verdicts = combine(values, rewards)
    for number, raw in values.items():
        below = [
            each.veto_below is not None and value < each.veto_below
            for value, each in zip(raw, rewards, strict=True)
        ]
        assert verdicts[number].vetoed == any(below)


def test_a_value_at_its_threshold_is_not_vetoed() -> None:
    """Guards against "below" read as "at or below"."""
    rewards = [WeightedReward("r", -2.0, BATCH, veto_below=0.5)]
    verdicts = combine({0: (0.5,), 1: (0.4999,)}, rewards)
    assert [verdicts[number].vetoed for number in (0, 1)] == [False, True]


@given(panels(st.floats(-1e280, 1e280)))
def test_large_values_stay_finite(
    panel: tuple[dict[int, tuple[float, ...]], list[WeightedReward]],
) -> None:
    """Guards against squares and sums that overflow on their way to a small result."""
    assert all(math.isfinite(each.score) for each in judged(*panel).values())


@given(st.lists(st.floats(-1.7e308, 1.7e308), min_size=1, max_size=20))
def test_batch_normalisation_takes_every_float(values: list[float]) -> None:
    """Guards against overflow and underflow at either end of the range, subnormals included."""
    bound = math.sqrt(len(values)) + 1e-9
    assert all(abs(score) <= bound for score in single(values))


@pytest.mark.parametrize(
    "values",
    [
        {0: (1e303, 0.0)},  # times a million: infinite
        {0: (1.7e302, 1.7e302)},  # both terms are finite, their sum is not
        {0: (1e303, -1e303)},  # infinities of both signs
    ],
)
def test_a_sum_that_is_not_finite_is_refused(values: Mapping[int, Sequence[float]]) -> None:
    """Guards against ranking by infinity, and OverflowError as INTERNAL without a name."""
    with pytest.raises(RewardInvalid, match="not finite"):
        judged(values, [WeightedReward("a", 1e6), WeightedReward("b", 1e6)])


def test_nobody_has_no_verdict() -> None:
    assert combine({}, [WeightedReward("a")]) == {}


def test_values_of_too_few_rewards_are_a_bug() -> None:
    """Guards against a panel that is not the request's: values would meet others' weights."""
    with pytest.raises(ValueError):
        combine({0: (1.0,)}, [WeightedReward("a"), WeightedReward("b")])


def test_an_example_by_hand() -> None:
    """Guards against all of the above being wrong in the same way."""
    rewards = [
        WeightedReward("helpful", 2.0, Normalization("fixed", 1.0, 0.5)),
        WeightedReward("harmless", 0.5, BATCH, veto_below=-1.0),
    ]
    values = {3: (2.0, -3.0), 7: (1.0, 1.0)}
    assert combine(values, rewards) == {3: Verdict(4.0 - 0.5, True), 7: Verdict(0.0 + 0.5, False)}


# Composites

HELPFUL = WeightedReward("helpful", 0.5, Normalization("fixed", 0.2, 1.1))
HARMLESS = WeightedReward("harmless", -3.0, BATCH, veto_below=-1.0)
BALANCED = Composite("balanced", (HELPFUL, HARMLESS))
KNOWN = {"balanced": BALANCED, "strict": Composite("strict", (WeightedReward("harmless"),))}


def test_a_composite_stands_for_its_rewards() -> None:
    """Guards against lost weights, and rewards blamed on another's place in the request."""
    asked = [WeightedReward("likelihood"), WeightedReward("balanced", 2.0), WeightedReward("other")]
    assert expanded(asked, KNOWN) == [
        (0, asked[0]),
        (1, replace(HELPFUL, weight=1.0)),
        (1, replace(HARMLESS, weight=-6.0)),
        (2, asked[2]),
    ]
    assert list(check_expansion(asked, KNOWN, "rewards")) == []


@given(panels(), st.sampled_from([-2.0, 0.25, 1.0, 1024.0]))
def test_a_composites_weight_scales_its_sum(
    panel: tuple[dict[int, tuple[float, ...]], list[WeightedReward]], weight: float
) -> None:
    """Guards against a weight that reaches some of the rewards, or their vetoes."""
    values, rewards = panel
    plain = combine(values, rewards)
    composites = {"c": Composite("c", tuple(rewards))}
    parts = [part for _, part in expanded([WeightedReward("c", weight)], composites)]
    for number, verdict in combine(values, parts).items():
        # Exact for powers of two, but where a smallest number, that loses digits, breaks a tie.
        assert verdict.score == pytest.approx(weight * plain[number].score, rel=1e-15, abs=1e-290)
        assert verdict.vetoed == plain[number].vetoed


@pytest.mark.parametrize(
    ("asked", "fields", "told"),
    [
        ([WeightedReward("balanced", normalization=BATCH)], ["rewards[0].normalization"], "absent"),
        (
            [WeightedReward("other"), WeightedReward("balanced", veto_below=0.0)],
            ["rewards[1].veto_below"],
            "composite balanced",
        ),
        ([WeightedReward("balanced"), WeightedReward("helpful")], ["rewards"], "helpful"),
        ([WeightedReward("balanced"), WeightedReward("strict")], ["rewards"], "harmless"),
        (
            [WeightedReward("balanced"), *(WeightedReward(str(n)) for n in range(MAX_REWARDS - 1))],
            ["rewards"],
            "at most 8",
        ),
    ],
)
def test_what_cannot_be_said_beside_a_composite(
    asked: list[WeightedReward], fields: list[str], told: str
) -> None:
    """Guards against a veto that is dropped, a reward counted twice, and sums without a bound."""
    violations = list(check_expansion(asked, KNOWN, "rewards"))
    assert [violation.field for violation in violations] == fields
    assert told in violations[0].description


@pytest.mark.parametrize(
    ("composite", "field"),
    [
        (Composite("", (HELPFUL,)), "''.name"),
        (Composite("Balanced", (HELPFUL,)), "'Balanced'.name"),
        (Composite("b\n", (HELPFUL,)), "'b\\n'.name"),
        (Composite("b" * 65, (HELPFUL,)), f"'{'b' * 65}'.name"),
        (Composite("likelihood", (HELPFUL,)), "'likelihood'.name"),
        (Composite("strict", (HELPFUL,)), "'strict'.name"),
        (Composite("b", ()), "'b'.rewards"),
        (Composite("b", (HELPFUL, HELPFUL)), "'b'.rewards"),
        (Composite("b", tuple(WeightedReward(str(n)) for n in range(9))), "'b'.rewards"),
        (Composite("b", (HELPFUL, WeightedReward("c", 0.0))), "'b'.rewards[1].weight"),
        (Composite("b", (WeightedReward("c", veto_below=math.nan),)), "'b'.rewards[0].veto_below"),
        (Composite("b", (WeightedReward("strict"),)), "'b'.rewards[0].name"),
        (Composite("b", (WeightedReward("b"),)), "'b'.rewards[0].name"),
    ],
)
def test_bad_composites(composite: Composite, field: str) -> None:
    """Guards against a composite that only fails once a request names it."""
    there = Composite("strict", (HARMLESS,))
    fields = {violation.field for violation in check_composites([there, composite])}
    assert fields == {field}


def test_good_composites() -> None:
    """Guards against checks that refuse what the manual promises."""
    longest = Composite("9" + "b._-" * 15 + "abc", (WeightedReward("likelihood"), HELPFUL))
    assert list(check_composites([BALANCED, longest, KNOWN["strict"]])) == []
