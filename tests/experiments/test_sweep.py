"""Sweeps over settings, and recommendations from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.replay import Replayer, Setting
from experiments.sweep import (
    NothingFits,
    Swept,
    Target,
    default_settings,
    name_of,
    read,
    recommend,
    regret_and_cost,
    settings_for,
    sweep,
    undominated,
    write,
)
from experiments.trajectories import FloatArray
from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import (
    Algorithm,
    FinishReason,
    GeometricSchedule,
    MemorySchedule,
    TokensSchedule,
)
from tests.experiments.synthetic import WALK, collection

PROMPTS = collection(4, 64, positions=(8, 10, 12, 14, 16, 20, 24, 28, 32, 64), stop_share=0.3)


def swept(number: int, regrets: list[float], tokens: list[float]) -> Swept:
    columns: list[FloatArray] = [np.array(values) for values in (regrets, tokens)]
    setting = Setting(64, number / 100, reward=WALK)
    return Swept(setting, -columns[0], columns[1], columns[0], columns[1] / 100, columns[0] * 0)


CHEAP = swept(1, [0.5, 0.4, 0.6, 0.5], [10, 12, 11, 11])
MIDDLE = swept(2, [0.1, 0.2, 0.0, 0.1], [30, 31, 32, 31])
DEAR = swept(3, [0.0, 0.0, 0.0, 0.0], [90, 95, 91, 92])
POOR = swept(4, [0.3, 0.3, 0.3, 0.3], [60, 60, 60, 60])  # MIDDLE is better in both
ALL = (POOR, DEAR, CHEAP, MIDDLE)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(regret=0.2), MIDDLE),
        (Target(regret=0.05), DEAR),
        (Target(tokens=20), CHEAP),
        (Target(tokens=60), MIDDLE),
    ],
)
def test_best_setting_for_the_target_is_recommended(target: Target, expected: Swept) -> None:
    best = recommend(ALL, target)
    assert best.chosen is expected
    assert best.regret.value == pytest.approx(expected.regrets.mean())
    assert best.regret.low <= best.regret.value <= best.regret.high
    assert best.tokens.low <= best.tokens.value <= best.tokens.high
    assert best.chosen not in best.runners_up
    assert undominated(ALL) == [CHEAP, MIDDLE, DEAR]


def test_unreachable_target_is_refused_with_the_nearest_value() -> None:
    with pytest.raises(NothingFits, match="at most -1: the least is 0"):
        recommend(ALL, Target(regret=-1))
    with pytest.raises(NothingFits, match="at most 3 tokens: the least is 11"):
        recommend(ALL, Target(tokens=3))
    with pytest.raises(NothingFits, match=r"a cost of at most 0\.01: the least is 0\.11"):
        recommend(ALL, Target(cost=0.01))
    for both in ({}, {"regret": 1.0, "tokens": 1.0}, {"tokens": 1.0, "cost": 1.0}):
        with pytest.raises(ValueError, match="either"):
            Target(**both)


def test_cost_budget_is_compared_with_the_mean_cost_per_prompt() -> None:
    """Guards against a budget of 5 % of all tokens: prompts differ in length."""
    short_and_long = np.array([100.0, 1000.0])
    cheap, dear = (
        replace(row, costs=row.tokens / short_and_long)
        for row in (swept(1, [0.5, 0.5], [8, 20]), swept(2, [0.1, 0.1], [10, 40]))
    )
    assert (cheap.costs.mean(), dear.costs.mean()) == pytest.approx((0.05, 0.07))
    assert dear.tokens.sum() / short_and_long.sum() < 0.05
    best = recommend([cheap, dear], Target(cost=0.05))
    assert best.chosen is cheap
    assert best.cost.value == pytest.approx(0.05)
    # If only the long prompt is drawn, `dear` fits, and the short prompt is left out.
    assert (best.held_out_tokens, best.held_out_cost) == pytest.approx((10, 0.1))


def test_held_out_regret_reveals_luck_among_many_settings() -> None:
    """200 settings of pure noise: the best looks far better than it is on held-out prompts."""
    random = np.random.default_rng(1)
    noise = [
        swept(number, random.normal(0.5, 0.3, 12).tolist(), [50.0] * 12) for number in range(200)
    ]
    best = recommend(noise, Target(tokens=60))
    assert best.regret.value < 0.35
    assert best.held_out_regret > best.regret.value + 0.05
    assert best.same_choice < 0.9


def test_sweep_equals_a_replay_per_setting_and_prompt() -> None:
    settings = [Setting(n, 0.5, GeometricSchedule(first=8), WALK) for n in (16, 64)]
    for setting, result in zip(settings, sweep(PROMPTS, settings), strict=True):
        for column, prompt in enumerate(PROMPTS):
            replayer = Replayer(prompt, WALK)
            run = replayer.run(setting)
            assert result.scores[column] == run.score
            assert result.tokens[column] == run.generated_tokens
            assert result.complete[column] == (run.finish is FinishReason.STOP)
            final = prompt.final(WALK)
            regret, cost = regret_and_cost(replayer, run)
            assert (result.regrets[column], result.costs[column]) == (regret, cost)
            assert regret == (final.max() - run.highest) / (final.max() - final.mean())
    (best_of_n,) = sweep(PROMPTS, [Setting(64, reward=WALK, algorithm=Algorithm.BEST_OF_N)])
    np.testing.assert_allclose(best_of_n.regrets, 0, atol=1e-12)
    np.testing.assert_allclose(best_of_n.costs, 1)
    assert best_of_n.name == "Best-of-64"
    with pytest.raises(ValueError, match="same reward"):
        sweep(PROMPTS, [*settings, Setting(8)])


def test_written_sweep_is_read_back(tmp_path: Path) -> None:
    settings = (
        Setting(16, 0.3, TokensSchedule((8, 16)), WALK),
        Setting(16, 0.3, GeometricSchedule(first=8), WALK),
        Setting(16, 0.3, MemorySchedule(first=8), WALK, slots=600, snap=True),
    )
    written = sweep(PROMPTS, settings)
    write(written, tmp_path / "deep" / "sweep.jsonl")
    again = read(tmp_path / "deep" / "sweep.jsonl")
    assert [row.setting for row in again] == list(settings)
    for actual, expected in zip(again, written, strict=True):
        np.testing.assert_array_equal(actual.regrets, expected.regrets)
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
    rows = (tmp_path / "deep" / "sweep.csv").read_text().splitlines()
    assert rows[1].startswith('"N=16, alpha 0.3, tokens:8,16",16,0.3,')
    (tmp_path / "other").write_text('{"x": 1}\n')
    with pytest.raises(ValueError, match="is not a sweep"):
        read(tmp_path / "other")


def test_default_settings_can_all_be_replayed() -> None:
    settings = settings_for(PROMPTS, WALK)
    assert len(settings) > 100
    assert {setting.schedule.kind for setting in settings} == {"memory", "tokens", "geometric"}
    assert len({name_of(setting) for setting in settings}) == len(settings)
    sweep(PROMPTS[:1], settings)
    assert len(default_settings(512, 1024, 100, LIKELIHOOD)) >= 500


def test_settings_that_cut_off_the_grid_are_left_out() -> None:
    coarse = [replace(prompt, positions=prompt.positions.copy()) for prompt in PROMPTS]
    for prompt in coarse:
        prompt.positions[list(prompt.positions).index(32)] = 33
    for setting in settings_for(coarse, WALK):
        match setting.schedule:
            case TokensSchedule(tokens):
                assert 32 not in tokens
            case GeometricSchedule():
                assert setting.schedule == GeometricSchedule(first=16, factor=4.0)
    assert settings_for(coarse, LIKELIHOOD) != ()
