"""Sweeps and recommendations: what is chosen, and how honestly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.commands import best_for_their_cost, settings_for
from experiments.recommend import NothingFits, Target, drawn, estimate, recommend
from experiments.replay import Setting, replay
from experiments.replay_speed import made_up
from experiments.sweep import Scale, Swept, default_settings, name_of, read, sweep, write
from experiments.trajectories import FloatArray
from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Algorithm, FinishReason, Schedule

REWARD = "made-up"
KEPT = [made_up(64, 64, seed) for seed in range(4)]


def swept(number: int, regrets: list[float], tokens: list[float]) -> Swept:
    columns: list[FloatArray] = [np.array(values) for values in (regrets, tokens)]
    setting = Setting(64, number / 100, reward=REWARD)
    return Swept(setting, -columns[0], columns[1], columns[0], columns[1] / 100, columns[0] * 0)


CHEAP = swept(1, [0.5, 0.4, 0.6], [10, 12, 11])
MIDDLE = swept(2, [0.1, 0.2, 0.0], [30, 31, 32])
DEAR = swept(3, [0.0, 0.0, 0.0], [90, 95, 91])
POOR = swept(4, [0.3, 0.3, 0.3], [60, 60, 60])  # MIDDLE beats it in both
ALL = (POOR, DEAR, CHEAP, MIDDLE)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(regret=0.5), CHEAP),
        (Target(regret=0.2), MIDDLE),
        (Target(regret=0.05), DEAR),
        (Target(tokens=20), CHEAP),
        (Target(tokens=60), MIDDLE),
        (Target(tokens=1000), DEAR),
    ],
)
def test_the_best_that_meets_the_target_is_chosen(target: Target, expected: Swept) -> None:
    found = recommend(ALL, target, resamples=50)
    assert found.chosen is expected
    assert found.regret.mean == pytest.approx(expected.regrets.mean())
    assert found.regret.low <= found.regret.mean <= found.regret.high
    assert found.tokens.low <= found.tokens.mean <= found.tokens.high
    assert found.chosen not in found.runners_up


def test_what_cannot_be_met_says_how_near_it_comes() -> None:
    with pytest.raises(NothingFits, match="at most -1: the least is 0"):
        recommend(ALL, Target(regret=-1))
    with pytest.raises(NothingFits, match="at most 3 tokens: the least is 11"):
        recommend(ALL, Target(tokens=3))
    with pytest.raises(NothingFits, match=r"a cost of at most 0\.01: the least is 0\.11"):
        recommend(ALL, Target(cost=0.01))
    for both in ({}, {"regret": 1.0, "tokens": 1.0}, {"tokens": 1.0, "cost": 1.0}):
        with pytest.raises(ValueError, match="either"):
            Target(**both)


def test_a_budget_in_parts_is_kept_as_the_cost_is_told() -> None:
    """Guards against 5 % of all tokens told as a cost of more: prompts differ in length."""
    short_and_long = np.array([100.0, 1000.0])
    cheap, dear = (
        replace(each, costs=each.tokens / short_and_long)
        for each in (swept(1, [0.5, 0.5], [8, 20]), swept(2, [0.1, 0.1], [10, 40]))
    )
    assert (cheap.costs.mean(), dear.costs.mean()) == pytest.approx((0.05, 0.07))
    assert dear.tokens.sum() / short_and_long.sum() < 0.05
    found = recommend([cheap, dear], Target(cost=0.05), resamples=50)
    assert found.chosen is cheap
    assert found.cost.mean == pytest.approx(0.05)
    # Where the long prompt alone is drawn, `dear` fits; it is the short one that is left out.
    assert (found.held_out_tokens, found.held_out_cost) == pytest.approx((10, 0.1))


def test_luck_among_many_settings_is_found_out() -> None:
    """200 settings of pure noise: the best looks far better than it is, held-out prompts tell."""
    chance = np.random.default_rng(1)
    noise = [
        swept(number, chance.normal(0.5, 0.3, 12).tolist(), [50.0] * 12) for number in range(200)
    ]
    found = recommend(noise, Target(tokens=60), resamples=200)
    assert found.regret.mean < 0.35
    assert found.held_out_regret > found.regret.mean + 0.05
    assert found.same_choice < 0.9


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20), st.integers(0, 5))
def test_an_interval_holds_its_mean_and_stays_within_the_values(
    values: list[float], seed: int
) -> None:
    found = estimate(np.array(values), drawn(len(values), 400, seed))
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9 or np.ptp(values) > 0


def test_best_of_n_with_everybody_has_no_regret_and_costs_all() -> None:
    (found,) = sweep(KEPT, [Setting(64, reward=REWARD, algorithm=Algorithm.BEST_OF_N)])
    np.testing.assert_allclose(found.regrets, 0, atol=1e-12)
    np.testing.assert_allclose(found.costs, 1)
    assert found.name == "Best-of-64"


def test_a_sweep_is_a_replay_per_setting_and_prompt() -> None:
    asked = [Setting(n, 0.5, Schedule(first=8), REWARD) for n in (16, 64)]
    for setting, found in zip(asked, sweep(KEPT, asked), strict=True):
        for column, kept in enumerate(KEPT):
            done = replay(kept, setting)
            assert found.scores[column] == done.score
            assert found.tokens[column] == done.generated_tokens
            assert found.complete[column] == (done.finish is FinishReason.STOP)
            scale = Scale.of(kept, kept.scores(REWARD).final)
            assert (found.regrets[column], found.costs[column]) == scale.measure(done)
    with pytest.raises(ValueError, match="one reward"):
        sweep(KEPT, [*asked, Setting(8)])


def test_a_candidate_on_average_has_a_regret_of_one() -> None:
    """Complete or stopped: in rewards, the limit ends an answer as an end token does."""
    for kept in KEPT:
        final = kept.scores(REWARD).final
        scale = Scale.of(kept, final)
        assert (scale.best - final.mean()) / scale.gain == pytest.approx(1)


def test_a_written_sweep_is_read_again(tmp_path: Path) -> None:
    asked = (
        Setting(16, 0.3, Schedule("tokens", tokens=(8, 16)), REWARD),
        Setting(16, 0.3, Schedule("memory", first=8), REWARD, slots=600, snap=True),
    )
    found = sweep(KEPT, asked)
    write(found, tmp_path / "deep" / "sweep.jsonl")
    again = read(tmp_path / "deep" / "sweep.jsonl")
    assert [each.setting for each in again] == list(asked)
    for mine, its in zip(again, found, strict=True):
        np.testing.assert_array_equal(mine.regrets, its.regrets)
        np.testing.assert_array_equal(mine.tokens, its.tokens)
    rows = (tmp_path / "deep" / "sweep.csv").read_text().splitlines()
    assert rows[1].startswith('"N=16, alpha 0.3, tokens:8,16",16,0.3,')
    (tmp_path / "other").write_text('{"x": 1}\n')
    with pytest.raises(ValueError, match="is not a sweep"):
        read(tmp_path / "other")


def test_the_default_settings_are_hundreds_and_all_can_be_replayed() -> None:
    found = settings_for(KEPT, REWARD)
    assert len(found) > 100
    assert {each.schedule.kind for each in found} == {"memory", "tokens", "geometric"}
    assert len({name_of(each) for each in found}) == len(found)
    sweep(KEPT[:1], found)
    longer = default_settings(512, 1024, 100, LIKELIHOOD)
    assert len(longer) >= 500


def test_settings_that_cut_off_the_grid_are_left_out() -> None:
    coarse = [replace(kept, positions=kept.positions.copy()) for kept in KEPT]
    for kept in coarse:
        kept.positions[list(kept.positions).index(32)] = 33
    for setting in settings_for(coarse, REWARD):
        assert 32 not in setting.schedule.tokens
        if setting.schedule.kind == "geometric":
            assert setting.schedule == Schedule(first=16, factor=4.0)
    assert settings_for(coarse, LIKELIHOOD) != ()


def test_only_settings_that_nobody_beats_are_shown() -> None:
    assert best_for_their_cost(ALL) == [CHEAP, MIDDLE, DEAR]
