"""How several rewards become one score: normalisation, weights and vetoes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop.composition import combine
from specrej.contracts import Normalization, WeightedReward
from specrej.contracts.errors import RewardInvalid

# Raw values of each candidate, one per reward, and the rewards.
ScoredValues = tuple[dict[int, tuple[float, ...]], list[WeightedReward]]
BATCH = Normalization("batch")
VALUES = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(-1e6, 1e6).filter(lambda weight: abs(weight) > 1e-9)
LINEAR = st.just(Normalization()) | st.builds(
    Normalization, st.just("fixed"), st.floats(-1e12, 1e12), st.floats(1e-12, 1e12)
)


@st.composite
def scored(draw: st.DrawFn, values: st.SearchStrategy[float] = VALUES) -> ScoredValues:
    """Up to 12 candidates' raw values of up to 4 rewards."""
    count = draw(st.integers(1, 4))
    rewards = [
        WeightedReward(
            f"r{index}",
            draw(WEIGHTS),
            draw(LINEAR | st.just(BATCH)),
            draw(st.none() | st.floats(-1e6, 1e6)),
        )
        for index in range(count)
    ]
    rows = st.tuples(*[values] * count)
    return draw(st.dictionaries(st.integers(0, 99), rows, min_size=1, max_size=12)), rewards


def single(values: Sequence[float], reward: WeightedReward | None = None) -> list[float]:
    """The scores from one reward's values."""
    rows = {number: (value,) for number, value in enumerate(values)}
    verdicts = combine(rows, [reward or WeightedReward("r", normalization=BATCH)])
    return [verdicts[number].score for number in rows]


@given(scored(), st.randoms())
def test_the_order_of_rewards_and_candidates_changes_no_score(
    values_and_rewards: ScoredValues, random: Random
) -> None:
    """Guards against equal requests, and equal cache keys, with different answers."""
    values, rewards = values_and_rewards
    order = random.sample(range(len(rewards)), len(rewards))
    numbers = random.sample(sorted(values), len(values))
    swapped = {number: [values[number][index] for index in order] for number in numbers}
    assert combine(swapped, [rewards[index] for index in order]) == combine(values, rewards)


@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=30),
    st.integers(-(10**6), 10**6),
    st.sampled_from([2.0**-30, 0.25, 1.0, 3.0, 1e3, 1e100]),
)
def test_batch_normalisation_is_independent_of_unit_and_origin(
    values: list[int], shift: int, scale: float
) -> None:
    """Guards against a reward that dominates a sum because of its unit."""
    moved = single([scale * (value + shift) for value in values])
    assert moved == pytest.approx(single([float(value) for value in values]), abs=1e-6)


@given(st.lists(VALUES, min_size=2, max_size=30, unique=True))
def test_batch_normalised_values_have_mean_0_deviation_1_and_the_same_order(
    values: list[float],
) -> None:
    """Guards against the deviation of a sample instead of that of the whole batch."""
    scores = single(values)
    assert math.fsum(scores) / len(scores) == pytest.approx(0, abs=1e-6)
    assert math.fsum(score**2 for score in scores) / len(scores) == pytest.approx(1)
    assert [score for _, score in sorted(zip(values, scores, strict=True))] == sorted(scores)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 40))
def test_equal_values_are_normalised_to_0(value: float, count: int) -> None:
    """Guards against a division by zero or by a rounding error."""
    assert single([value] * count) == [0.0] * count


@given(st.lists(VALUES, min_size=1, max_size=10), WEIGHTS, LINEAR)
def test_a_single_reward_scores_by_the_documented_formula(
    values: list[float], weight: float, by: Normalization
) -> None:
    """Guards against other rounding, and a weight that applies only among several rewards."""
    scores = [weight * ((value - by.mean) / by.deviation) for value in values]
    assert single(values, WeightedReward("r", weight, by)) == scores


@given(scored())
def test_vetoes_compare_raw_values(
    values_and_rewards: ScoredValues,
) -> None:
    """Guards against thresholds for normalised or weighted values, or for another reward."""
    values, rewards = values_and_rewards
    verdicts = combine(values, rewards)
    for number, raw in values.items():
        below = [
            reward.veto_below is not None and value < reward.veto_below
            for value, reward in zip(raw, rewards, strict=True)
        ]
        assert verdicts[number].vetoed == any(below)


@given(st.lists(st.floats(-1.7e308, 1.7e308), min_size=1, max_size=20))
def test_batch_normalisation_accepts_every_float(values: list[float]) -> None:
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
    """Guards against ranking by infinity, and against OverflowError as INTERNAL."""
    with pytest.raises(RewardInvalid, match="not finite"):
        combine(values, [WeightedReward("a", 1e6), WeightedReward("b", 1e6)])
