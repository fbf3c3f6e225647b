"""Frames, studies and recommendations on synthetic trajectories with known correlations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.frames import Frames, best_of_n, frames_of
from experiments.frontier import (
    BEST_OF_N,
    Comparison,
    Recommendation,
    first_tokens,
    pays_from,
)
from experiments.studies import RATIO, correlation, equal_reward, improvement, second_judge
from experiments.trajectories import Trajectories
from tests.experiments.synthetic import (
    WALK,
    collection,
    expected_kendall,
    expected_pearson,
    from_scores,
    noise,
    trajectories,
)


def framed(prompts: Sequence[Trajectories], alphas: tuple[float, ...] = (0.5,)) -> Frames:
    return frames_of("few", prompts, WALK, alphas)


def recommended(frames: Frames) -> Recommendation:
    return Comparison(frames.runs, frames.full).recommend(frames.default)


@given(st.integers(0, 100), st.integers(1, 7))
def test_best_of_n_is_averaged_over_all_draws(seed: int, n: int) -> None:
    prompt = trajectories(7, stop_share=0.5, seed=seed)
    of_n = best_of_n([prompt], WALK).set_index("n").loc[n]
    draws = list(itertools.combinations(range(7), n))
    finals = prompt.final(WALK)
    assert of_n.reward == pytest.approx(np.mean([finals[list(draw)].max() for draw in draws]))
    assert of_n.worst == pytest.approx(np.mean([finals[list(draw)].min() for draw in draws]))
    assert of_n.tokens == pytest.approx(n * prompt.num_tokens.mean())


def test_no_rejection_is_as_good_as_best_of_n_and_costs_the_same() -> None:
    frames = framed(collection(9, 32, stop_share=0.4), alphas=(0.0,))
    made = recommended(frames)
    assert made.ahead.value == pytest.approx(0)
    assert (made.regret.value, made.regret.low) == (0, 0) and made.regret.high > 0
    table = equal_reward(frames).table
    default = table[table["schedule"] == "geometric:16,2"].iloc[0]
    assert default["as good as Best-of-N with N = (95 %)"].value == pytest.approx(32)
    assert default[RATIO].value == pytest.approx(1)


def test_a_second_judge_is_asked_about_the_chosen_answers() -> None:
    """Guards against another answer, or another reward, than the one that is judged."""
    prompts = collection(9, 32, stop_share=0.4)
    kept = second_judge(framed(prompts, alphas=(0.0,))).table.set_index("judge").loc["likelihood"]
    chosen = [(p.final("likelihood"), int(np.argmax(p.final(WALK)))) for p in prompts]
    gain = np.mean([of[best] - of.mean() for of, best in chosen])
    for column in kept.index[:3]:  # nothing is rejected
        assert kept[column].value == pytest.approx(gain)
    cut = second_judge(framed(prompts)).table.set_index("judge").loc["likelihood"]
    assert cut.iloc[2].value == pytest.approx(gain)
    assert cut.iloc[3].value == pytest.approx(cut.iloc[0].value - cut.iloc[1].value)


def test_equal_reward_is_a_product_of_saving_and_kept_part() -> None:
    """Of answers of 64 tokens each, cuts at 16 and 32 save 64 / (16 + 8 + 8)."""
    table = equal_reward(framed(collection(8, 64))).table
    row = table[
        (table["N"] == 64) & (table["alpha"] == 0.5) & (table["schedule"] == "geometric:16,2")
    ]
    of = row.iloc[0]
    assert of["tokens saved at equal N"] == pytest.approx(2)
    assert of["expected if rejection ignores length"] == pytest.approx(2)
    assert of[RATIO].value == pytest.approx(2 * of["part of N kept"])
    assert of[RATIO].low <= of[RATIO].value <= of[RATIO].high


def test_correlations_are_those_of_random_walks() -> None:
    table = correlation(framed(collection(20, 64))).table.set_index("decision token")
    assert table.index.tolist() == [4, 8, 16, 32]
    for position, row in table.iterrows():
        assert row["Pearson (95 %)"].value == pytest.approx(expected_pearson(position), abs=0.08)
        assert row["Kendall tau (95 %)"].value == pytest.approx(
            expected_kendall(position), abs=0.08
        )
        survival = [row[f"best survives alpha {alpha} (95 %)"].value for alpha in (0.75, 0.5)]
        assert survival == sorted(survival)


def test_the_best_answer_is_lost_where_a_cut_ranks_it_low() -> None:
    """Finals 1, 2, 3, 4; at 16 tokens the last answer is in the lower half, at 32 it leads."""
    scores = np.ones((4, 64)) * np.array([[1.0], [2.0], [3.0], [4.0]])
    scores[3, :31] = 0.0
    table = correlation(framed([from_scores(scores, np.full(4, 64))])).table
    rows = table.set_index("decision token")
    survives = rows["best survives alpha 0.5 (95 %)"]
    assert [survives[at].value for at in (16, 32)] == [0, 1]


def test_improvement_of_the_base_is_100() -> None:
    table = improvement(framed(collection(8, 64))).table
    score = "improvement score (95 %)"
    base = table[(table.method == "Best-of-N") & (table["N"] == 8)].iloc[0]
    assert (base[score].value, base["relative tokens"]) == pytest.approx((100, 1))
    full = table[table.method == "Best-of-N"][score]
    assert [one.value for one in full] == sorted(one.value for one in full)


def test_rejection_that_pays_is_recommended() -> None:
    """Random walks of 64 tokens, from token 16 on: a correlation of a half and more."""
    frames = framed(collection(20, 64, stop_share=0.3))
    made, first = recommended(frames), pays_from(first_tokens(frames).table)
    assert made.ahead.low > 0
    assert made.chosen.startswith("N = 64, alpha 0.")
    assert first is not None and first <= 16


def test_rejection_by_chance_is_not_recommended() -> None:
    """Guards against a default that loses at equal tokens: here, prefixes predict nothing."""
    frames = framed(noise(40))
    made = recommended(frames)
    assert made.ahead.high < 0
    assert made.chosen == BEST_OF_N
    assert pays_from(first_tokens(frames).table) is None


def made_runs(values: dict[str, list[float]]) -> pd.DataFrame:
    """Settings of equal tokens with these values, by prompt."""
    rows = [
        {"n": 2, "alpha": 0.5, "schedule": name, "prompt": prompt, "reward": value}
        for name, of_prompts in values.items()
        for prompt, value in enumerate(of_prompts)
    ]
    return pd.DataFrame(rows).assign(tokens=100.0, regret=0.0)


def test_settings_are_judged_on_the_half_on_which_they_were_not_chosen() -> None:
    """Guards against luck that looks like skill: each of two settings is by 10 better on one half
    and by 10 worse on the other, so what is chosen on a half loses on the other one."""
    full = pd.DataFrame(
        [
            {"prompt": prompt, "n": n, "reward": 0.0, "tokens": 50.0 * n}
            for prompt in range(8)
            for n in (1, 2)
        ]
    )
    values = {"even": [10.0, -10.0] * 4, "odd": [-10.0, 10.0] * 4, "steady": [1.0] * 8}
    comparison = Comparison(made_runs(values), full)
    held_out = comparison.held_out(np.full(8, 100.0))
    assert held_out is not None
    names, judged = held_out
    assert names == ["N = 2, alpha 0.5, even", "N = 2, alpha 0.5, odd"]
    assert judged.reward.tolist() == judged.ahead.tolist() == [-10.0] * 8
    assert judged.index.tolist() == [*range(8)]
    steady = made_runs({"steady": values["steady"]})
    assert comparison.recommend(steady).chosen == "N = 2, alpha 0.5, steady"
    assert comparison.held_out(np.full(8, 99.0)) is None  # no setting is within the budget


def test_cuts_off_the_grid_are_left_out() -> None:
    """Guards against a collection of hours without a report: cuts double from each first one."""
    frames = framed(collection(8, 32, max_tokens=128, positions=(16, 64)))
    assert first_tokens(frames).table["first decision token"].tolist() == [64]
    assert {*frames.runs.schedule} == {"geometric:64,2", "memory:16"}
    with pytest.raises(ValueError, match="no prefix was scored where a schedule would cut"):
        framed(collection(8, 32, positions=(20, 64)))
    with pytest.raises(ValueError, match="few has no prompts"):
        framed([])
