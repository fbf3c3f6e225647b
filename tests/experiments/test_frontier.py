"""Settings against Best-of-N at equal tokens, and recommendations from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.flops import UNKNOWN
from experiments.replay import Replayer
from experiments.studies import frontier, prefixes
from experiments.studies.best_of_n import expected_answer, ranked
from experiments.studies.frontier import Frontier
from experiments.studies.plans import DOUBLING, Plan, measure, measure_all
from experiments.trajectories import Trajectories
from tests.experiments.synthetic import WALK, collection, noise, trajectories


def study(prompts: list[Trajectories], alphas: tuple[float, ...] = (0.3, 0.5, 0.7)) -> Frontier:
    replayers = [Replayer(prompt, WALK) for prompt in prompts]
    measured = measure_all(replayers, alphas=alphas)
    return frontier.study(replayers, measured, prefixes.correlation(prompts, WALK))


@given(st.integers(0, 100), st.booleans(), st.integers(1, 7))
def test_best_of_n_is_averaged_over_all_draws(seed: int, prefer_complete: bool, n: int) -> None:
    """Value, score and completeness of the answer; a fraction is between its neighbours."""
    answers = ranked(
        trajectories(7, stop_share=0.5, seed=seed), WALK, prefer_complete=prefer_complete
    )
    drawn = [answers[min(rows)] for rows in itertools.combinations(range(7), n)]
    assert expected_answer(answers, n) == pytest.approx(np.mean(drawn, axis=0))
    between = (expected_answer(answers, n) + 3 * expected_answer(answers, n + 1)) / 4
    assert expected_answer(answers, n + 0.75) == pytest.approx(between)


def test_no_rejection_is_neither_ahead_nor_behind() -> None:
    prompts = collection(9, 32, stop_share=0.4)
    replayers = [Replayer(prompt, WALK) for prompt in prompts]
    run = measure(replayers, Plan(32, 0.0, DOUBLING), UNKNOWN)
    result = frontier.study(replayers, [run], prefixes.correlation(prompts, WALK))
    for side in result.sides:
        assert side.default.ahead.value == pytest.approx(0)
        assert (side.default.regret.value, side.default.regret.low) == (0, 0)
        assert side.default.regret.high > 0
        assert side.best_of_n[-1].value == pytest.approx(side.default.value)


def test_rejection_that_pays_is_recommended() -> None:
    """Random walks of 64 tokens, from token 16 on: a correlation of a half and more."""
    result = study(collection(20, 64, stop_share=0.3))
    for side, pays_from in zip(result.sides, result.pays_from, strict=True):
        assert side.default.ahead.low > 0
        assert side.recommended.startswith("N = 64, alpha 0.")
        assert pays_from is not None and pays_from <= 16
        assert [choice.budget for choice in side.choices] == [f"Best-of-{n}" for n in (32, 16, 8)]
        assert side.choices[0].ahead.value > 0
        values = [point.value for point in side.undominated]
        assert values == sorted(values)
        assert max(values) == max(point.value for point in side.points)
    complete, alone = (side.default for side in result.sides)
    assert 0 < complete.complete.value <= 1
    assert np.isnan(alone.complete.value)
    assert complete.reward.value <= alone.reward.value


def test_rejection_by_chance_is_not_recommended() -> None:
    """Guards against a default that loses to Best-of-N at equal tokens: prefixes predict nothing.

    Rejected by lot, a quarter of the answers is left for the tokens of a half of them.
    """
    result = study(noise(40))
    assert result.pays_from == (None, None)
    for side in result.sides:
        assert side.default.ahead.high < 0
        assert side.recommended == frontier.BEST_OF_N
        assert all(choice.ahead.value < 0.1 for choice in side.choices)


def test_luck_among_settings_is_not_recommended() -> None:
    """Every alpha of the grid is a setting; those chosen on one half are no better on the other.

    Among 10 collections of random walks the default stays in at least 8.
    """
    alphas = (0.4, 0.45, 0.5, 0.55)
    kept = 0
    for seed in range(10):
        prompts = collection(8, 32, positions=(16, 32, 64), seed=17 * seed)
        side = study(prompts, alphas).sides[1]
        kept += side.recommended in {frontier.BEST_OF_N, "N = 32, alpha 0.5, geometric:16,2"}
    assert kept >= 8


def test_cuts_off_the_grid_are_left_out() -> None:
    """Guards against a collection of hours without a report: cuts double from each first one."""
    result = study(collection(8, 32, max_tokens=128, positions=(16, 64)))
    assert [first.position for first in result.first_tokens] == [64]


def test_default_that_may_lose_is_not_recommended() -> None:
    """Guards against the best setting of all prompts, whose own lead is not above chance.

    Two other settings lead by 1 on the half on which they were not chosen.
    """
    prompts = collection(8, 16)
    answers = [ranked(prompt, WALK, prefer_complete=False) for prompt in prompts]
    full = np.array([expected_answer(of_prompt, 8)[0] for of_prompt in answers])
    leads = {
        0.3: [3.0, 1.0] * 4,
        0.5: [-8.0, 0.0, 19.6, 0.0, 0.0, 11.6, 0.0, 0.0],
        0.7: [1.0, 3.0] * 4,
    }
    replayers, tokens = [Replayer(prompt, WALK) for prompt in prompts], np.full(8, 8 * 64.0)
    measured = [
        replace(measure(replayers, Plan(16, alpha, DOUBLING), UNKNOWN), rewards=full + lead)
        for alpha, lead in leads.items()
    ]
    measured = [replace(run, tokens=tokens) for run in measured]
    result = frontier.study(replayers, measured, prefixes.correlation(prompts, WALK))
    side = result.sides[1]
    assert side.default.value == max(point.value for point in side.points)
    assert side.default.ahead.low < 0
    assert side.recommended == frontier.BEST_OF_N
