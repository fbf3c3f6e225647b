"""The adaptive policy: its forecasts, its chances, and the comparison that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.adaptive import (
    Kind,
    against,
    as_table,
    at_cost,
    compare,
    lower_hull,
    together,
)
from experiments.policy import (
    Forecast,
    Outlook,
    PricePolicy,
    RiskPolicy,
    best_chances,
    fit,
)
from experiments.recommend import drawn
from experiments.replay import Policy, Seen, Setting, replay
from experiments.replay_speed import made_up
from experiments.sweep import Swept
from experiments.trajectories import FloatArray, PrefixScores
from orchestrator.rejection import num_kept
from specrej.contracts import Schedule

REWARD = "made-up"
KEPT = [made_up(96, 64, seed) for seed in range(4)]
KNOWING = Outlook(slope=1.0, drift=0.0, deviation=0.1, correlation=0.99)
GUESSING = Outlook(slope=0.1, drift=0.0, deviation=1.0, correlation=0.1)


def forecast(outlook: Outlook) -> Forecast:
    return Forecast((1, 1000), (outlook, outlook))


def seen(live: Sequence[float], finished: Sequence[float] = (), position: int = 16) -> Seen:
    best = max(finished, default=-np.inf)
    ranked = np.array([*finished, *live])
    return Seen(1, position, 2 * position, 128, ranked, np.array(live), best, 0.5)


def rejected(policy: Policy, now: Seen) -> int:
    return len(now.ranked) - num_kept(len(now.ranked), policy.alpha(now))


def test_a_forecast_finds_the_line_that_made_the_finals() -> None:
    """Per position: slope, drift and deviation of made-up scores, with less noise the later."""
    chance = np.random.default_rng(0)
    kept = []
    for each in KEPT:
        partial = chance.normal(size=each.rewards[REWARD].partial.shape)
        column = list(each.positions).index(16)
        final = 3 + 0.5 * partial[:, column] + chance.normal(0, 0.2, each.n)
        kept.append(replace(each, rewards={REWARD: PrefixScores(partial, final)}))
    outlook = fit(kept, REWARD).at(16)
    assert outlook.slope == pytest.approx(0.5, abs=0.05)
    assert outlook.drift == pytest.approx(3, abs=0.15)
    assert outlook.deviation == pytest.approx(0.2, abs=0.03)
    assert outlook.correlation == pytest.approx(0.93, abs=0.04)
    later = fit(KEPT, REWARD)
    assert later.at(48).deviation < later.at(16).deviation < later.at(8).deviation


def test_between_positions_a_forecast_is_in_proportion() -> None:
    between = Forecast((10, 20), (Outlook(0, 0, 2, 0), Outlook(1, 4, 1, 1))).at(15)
    assert between == Outlook(0.5, 2, 1.5, 0.5)
    assert forecast(KNOWING).at(5000) == KNOWING


def test_too_little_to_learn_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit([made_up(3, 64, 1)], REWARD)


@settings(max_examples=60, deadline=None)
@given(
    live=st.lists(st.floats(-3, 3), min_size=1, max_size=40),
    slope=st.floats(0, 2),
    deviation=st.floats(0.01, 3),
    finished=st.none() | st.floats(-4, 4),
)
def test_chances_are_chances(
    live: list[float], slope: float, deviation: float, finished: float | None
) -> None:
    """Not negative; together 1 at most, and 1 where nothing is finished; higher for the higher."""
    ordered = np.sort(np.array(live))
    best = -np.inf if finished is None else finished
    chances = best_chances(ordered, Outlook(slope, 0, deviation, 0), best)
    assert (chances >= 0).all()
    assert chances.sum() <= 1.02
    if finished is None:
        assert chances.sum() == pytest.approx(1, abs=0.02)
    assert (np.diff(chances) >= -1e-9).all()


def test_chances_are_those_of_a_simulation() -> None:
    """0.01 is five deviations of the simulation: no false alarm in millions."""
    live = np.array([-1.0, 0.0, 0.2, 0.5, 1.0])
    outlook = Outlook(0.8, 0.3, 0.6, 0)
    draws = np.random.default_rng(2).normal(0, 0.6, (200_000, 5))
    finals = live.mean() + 0.3 + 0.8 * (live - live.mean()) + draws
    winners = np.where(finals.max(axis=1) > 0.9, finals.argmax(axis=1), -1)
    shares = [(winners == row).mean() for row in range(5)]
    np.testing.assert_allclose(best_chances(live, outlook, 0.9), shares, atol=0.01)


@pytest.mark.parametrize("make", [RiskPolicy, PricePolicy])
def test_it_rejects_many_where_prefixes_tell_much_and_few_where_they_do_not(
    make: type[RiskPolicy | PricePolicy],
) -> None:
    """And many where scores are far apart, few where they are alike."""
    apart, alike = seen(np.linspace(-3, 3, 40).tolist()), seen(np.linspace(0, 0.01, 40).tolist())
    knob = 0.05
    knowing, guessing = make(forecast(KNOWING), knob), make(forecast(GUESSING), knob)
    assert rejected(knowing, apart) > 35
    assert rejected(guessing, apart) < rejected(knowing, apart)
    assert rejected(knowing, alike) < rejected(knowing, apart)


def test_whoever_cannot_beat_a_finished_answer_is_rejected_but_one() -> None:
    now = seen([0.0, 0.1, 0.2], finished=[9.0])
    policy = RiskPolicy(forecast(KNOWING), 0.01)
    assert rejected(policy, now) == 2
    assert rejected(policy, seen([0.0, 0.1, 0.2])) < 3


@settings(max_examples=60, deadline=None)
@given(
    live=st.lists(st.floats(-3, 3), min_size=1, max_size=30),
    finished=st.lists(st.floats(-3, 3), max_size=10),
    knob=st.floats(0, 0.99),
    position=st.integers(1, 200),
)
def test_alpha_is_always_a_fraction_that_keeps_somebody_live(
    live: list[float], finished: list[float], knob: float, position: int
) -> None:
    now = seen(live, finished, position)
    for policy in (RiskPolicy(forecast(KNOWING), knob), PricePolicy(forecast(KNOWING), knob)):
        alpha = policy.alpha(now)
        assert 0 <= alpha < 1
        assert num_kept(len(now.ranked), alpha) > sum(x > max(live) for x in finished)


def test_more_risk_is_fewer_tokens() -> None:
    learnt = fit(KEPT[1:], REWARD)
    setting = Setting(0, 0.5, Schedule(first=8), REWARD)
    for make in (RiskPolicy, PricePolicy):
        tokens = [
            replay(KEPT[0], setting, make(learnt, knob)).generated_tokens
            for knob in (0.0005, 0.02, 0.5)
        ]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] > tokens[-1]


def test_knobs_out_of_range_are_refused() -> None:
    for risk in (-0.1, 1.0):
        with pytest.raises(ValueError, match="risk"):
            RiskPolicy(forecast(KNOWING), risk)
    with pytest.raises(ValueError, match="price"):
        PricePolicy(forecast(KNOWING), -1)


def _swept(cost: float, regret: float) -> Swept:
    values: FloatArray = np.array([regret - 0.1, regret + 0.1])
    return Swept(Setting(), -values, values, values, np.full(2, cost), np.zeros(2))


def test_the_hull_is_what_fixed_settings_give_by_turns() -> None:
    """Points above a line between two others are no part of it; nor is what is dearer and worse."""
    points = [_swept(*each) for each in ((0.1, 1.0), (0.2, 0.9), (0.3, 0.2), (0.5, 0.4), (1, 0))]
    hull = lower_hull(points)
    assert [float(each.costs[0]) for each in hull] == [0.1, 0.3, 1]
    for cost, regrets in ((0.2, [0.5, 0.7]), (0.3, [0.1, 0.3]), (2.0, [-0.1, 0.1])):
        found = at_cost(hull, cost)
        assert found is not None
        assert found.tolist() == pytest.approx(regrets)
    assert at_cost(hull, 0.05) is None


class _Fixed:
    """What a policy must beat: an alpha in every round, whatever the forecast."""

    def __init__(self, _: Forecast, alpha: float) -> None:
        self._alpha = alpha

    def alpha(self, now: Seen) -> float:
        return self._alpha


def test_a_fixed_alpha_does_not_beat_the_best_fixed_alpha() -> None:
    """The comparison must not hand out gains: the same alphas as the hull's gain nothing."""
    alphas = (0.25, 0.5, 0.75)
    kind = Kind("fixed", _Fixed, alphas)
    (found,) = compare(
        KEPT, REWARD, [Schedule(first=8)], 32, kinds=[kind], alphas=(0.0, *alphas, 0.9)
    )
    assert all(point.gain.mean <= 1e-9 and not point.wins for point in found.points)


class _Clairvoyant:
    """Rejects everybody but the best prefix from token 40 on: prefixes tell nearly all by then."""

    def __init__(self, _: Forecast, knob: float) -> None:
        self._knob = knob

    def alpha(self, now: Seen) -> float:
        return 0.95 if now.decision_token >= self._knob else 0.0


def test_a_policy_that_is_better_wins() -> None:
    """Against alphas that are all bad ideas: cutting hard from the first token on, or never."""
    kind = Kind("late", _Clairvoyant, (40.0,))
    schedule = Schedule("tokens", tokens=(8, 40))
    (found,) = compare(KEPT, REWARD, [schedule], 32, kinds=[kind], alphas=(0.0, 0.97))
    assert found.best.gain.mean > 0
    (row,) = as_table([found])
    assert (row["knob"], row["best"], row["wins"]) == (40.0, True, found.best.wins)


def test_a_knob_that_is_far_off_takes_nothing_from_one_that_wins() -> None:
    """Guards against a verdict on the mean over knobs, most of which may be bad ideas. Of one that
    wins and one that looks better but may be luck, the one that wins is the best."""
    chance = np.random.default_rng(6)
    fixed = _random_swept(50, chance)

    def shifted(gain: float, luck: float) -> Swept:
        return replace(fixed, regrets=fixed.regrets - gain + chance.normal(0, luck, 20))

    made = {0.1: shifted(0.1, 0.02), 0.2: shifted(0.3, 2.0), 0.8: shifted(-5.0, 0.02)}
    tried = {("one", Schedule(), knob): swept for knob, swept in made.items()}
    (found,) = against([fixed], tried, drawn(20, 400, 0))
    assert np.mean([point.gain.mean for point in found.points]) < 0
    assert [point.wins for point in found.points] == [True, False, False]
    assert found.best.knob == 0.1
    assert [row["best"] for row in as_table([found])] == [True, False, False]


def test_intervals_of_several_comparisons_hold_together() -> None:
    """Four comparisons of 20 prompts that are worth nothing, 400 times: in 95 of 100 (+- 1.1) none
    of the four is off. Each with an interval of its own would leave less than 90."""
    chance = np.random.default_rng(3)
    draws = drawn(20, 400, 0)
    held = alone = 0
    for _ in range(400):
        values = 0.5 * chance.standard_normal(20) + chance.standard_normal((4, 20))
        held += all(each.low <= 0 <= each.high for each in together(values, draws))
        single = [together(row[None], draws)[0] for row in values]
        alone += all(each.low <= 0 <= each.high for each in single)
    assert 0.915 <= held / 400 <= 0.985
    assert alone / 400 < 0.9


def test_comparisons_without_a_difference_have_no_width() -> None:
    (found,) = together(np.full((1, 5), 0.25), drawn(5, 100, 0))
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


def _random_swept(number: int, chance: np.random.Generator) -> Swept:
    """Cost 0.5 on every prompt, a regret that is luck alone."""
    regrets: FloatArray = chance.normal(0.3, 0.1, 20)
    cost = np.full(20, 0.5)
    return Swept(Setting(8, number / 100), -regrets, cost, regrets, cost, cost)


def test_the_best_of_many_policies_is_not_called_better_for_its_luck() -> None:
    """40 policies as good as the one fixed setting, 100 times. Whichever looks best gains a lot;
    that any wins is a matter of 2.5 of 100 (+- 1.6)."""
    chance = np.random.default_rng(4)
    draws = drawn(20, 400, 0)
    gains, num_winners = [], 0
    for _ in range(100):
        fixed = [_random_swept(50, chance)]
        tried = {("luck", Schedule(), float(k)): _random_swept(k, chance) for k in range(40)}
        (found,) = against(fixed, tried, draws)
        gains.append(max(point.gain.mean for point in found.points))
        num_winners += found.best.wins
    assert np.mean(gains) > 0.03
    assert num_winners <= 9


def test_what_is_better_on_all_prompts_wins_among_many() -> None:
    chance = np.random.default_rng(5)
    fixed = [_random_swept(50, chance)]
    better = replace(fixed[0], regrets=fixed[0].regrets - 0.1 + chance.normal(0, 0.05, 20))
    tried = {("good", Schedule(), 1.0): better} | {
        ("luck", Schedule(), float(k)): _random_swept(k, chance) for k in range(10)
    }
    good, luck = against(fixed, tried, drawn(20, 400, 0))
    assert good.best.wins
    assert not luck.best.wins


def test_a_comparison_needs_other_prompts() -> None:
    with pytest.raises(ValueError, match="3 at least"):
        compare(KEPT[:2], REWARD, [Schedule()])
