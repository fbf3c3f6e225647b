"""Partial against final rewards, and the failures of early rejection."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies import prefixes
from experiments.trajectories import Trajectories
from tests.experiments.synthetic import (
    WALK,
    collection,
    expected_kendall,
    expected_pearson,
    from_scores,
    trajectories,
)


@pytest.mark.parametrize("reward", [WALK, "likelihood"])
def test_correlations_of_random_walks_equal_theory(reward: str) -> None:
    """10 prompts of 400 answers: the standard error of Pearson's r at 0.25 is about 0.015.

    The mean of t of T independent terms correlates with the mean of all by sqrt(t / T), too.
    """
    result = prefixes.correlation(collection(10, 400), reward)
    assert [token.position for token in result.decision_tokens] == [4, 8, 16, 32]
    for token in result.decision_tokens:
        assert token.pearson.value == pytest.approx(expected_pearson(token.position), abs=0.06)
        assert token.live_share == 1
        if reward == WALK:
            assert token.kendall.value == pytest.approx(expected_kendall(token.position), abs=0.05)


@pytest.mark.parametrize("predicts", [True, False])
def test_best_survives_only_if_prefixes_predict_it(predicts: bool) -> None:
    steps = np.arange(16.0)[:, None] * np.ones((1, 64))
    scores = np.cumsum(steps if predicts else -steps, axis=1)
    scores[:, -1] = np.arange(16.0)
    prompt = from_scores(scores, np.full(16, 64))
    assert prefixes.survives(prompt, WALK, 16, 0.5) is predicts


def test_complete_answer_cannot_be_lost() -> None:
    scores = np.zeros((4, 64))
    scores[0, 3:] = 5.0
    assert prefixes.survives(from_scores(scores, np.array([4, 64, 64, 64])), WALK, 8, 0.9)


def test_survival_by_chance_equals_the_kept_share() -> None:
    """With random prefixes, the best of 40 survives with probability 1/4, here on 400 prompts; more
    often where half of them have ended.

    The standard deviation is 0.025: four of them are a false alarm in 10,000.
    """
    random = np.random.default_rng(3)
    for num_ended, expected in ((0, 0.25), (20, 0.625)):
        lengths = np.array([4] * num_ended + [64] * (40 - num_ended))
        prompts = [from_scores(random.standard_normal((40, 64)), lengths) for _ in range(400)]
        survived = [prefixes.survives(prompt, WALK, 8, 0.75) for prompt in prompts]
        token = prefixes.correlation(prompts[:2], WALK).decision_tokens[1]
        assert token.position == 8
        assert token.survival_by_chance(0.75) == pytest.approx(expected)
        assert np.mean(survived) == pytest.approx(expected, abs=0.1)


def test_a_grid_without_a_power_of_two_has_no_early_prefixes() -> None:
    prompts = collection(2, 16, positions=(12, 24, 48, 64))
    assert prefixes.failures(prompts, WALK, np.zeros(2)).early == ()


def test_ended_answers_are_not_correlated() -> None:
    """Guards against complete answers raising correlations: their partial score is the final."""
    prompt = trajectories(n=300, stop_share=0.9, seed=5)
    token = prefixes.correlation([prompt], WALK).decision_tokens[-1]
    assert token.live_share < 0.7
    assert token.pearson.value < 0.95
    assert len(token.partial) == min(250, int((prompt.num_tokens > token.position).sum()))


def misled() -> Trajectories:
    """Eight answers: the last is worst at token 16 and best in the end, the first ends early."""
    scores = np.ones((8, 64)) * np.arange(8.0)[::-1, None]
    scores[7, 17:] = 20.0
    return from_scores(scores, np.array([5, *[64] * 7]), finished=np.ones(8, dtype=np.bool_))


def test_misleading_prefixes_and_early_ends_are_counted() -> None:
    result = prefixes.failures([misled()], WALK, np.array([13.0]))
    rows = [
        (
            point.position,
            point.misled_share.value,
            point.ended_share.value,
            point.best_share.value,
        )
        for point in result.early
    ]
    assert rows == [(4, 1, 0, 0), (8, 1, 1 / 8, 0), (16, 1, 1 / 8, 0), (32, 0, 1 / 8, 0)]
    (example,) = result.examples
    assert (example.candidate, example.position, example.rank_share) == (7, 16, 1)
    assert (example.partial, example.final) == (0, 20)
    assert len(example.excerpt) <= 64
    # A best answer that ended is not misled.
    scores = np.zeros((4, 64))
    scores[2, 2:] = 9.0
    ended = from_scores(scores, np.array([64, 64, 3, 64]))
    result = prefixes.failures([ended], WALK, np.zeros(1))
    assert [point.best_share.value for point in result.early] == [1, 1, 1, 1]
    assert result.examples == ()


def test_examples_are_one_per_prompt_and_losses_are_counted() -> None:
    prompts = collection(20, 32)
    result = prefixes.failures(prompts, WALK, np.array([*[0.0] * 17, 1.0, 2.0, 3.0]))
    assert result.first == 16
    assert result.lost.value == 0.15
    assert (result.lost.low, result.lost.high) == pytest.approx((0.0321, 0.3789), abs=1e-4)
    assert len(result.examples) == 5
    assert len({example.prompt_id for example in result.examples}) == len(result.examples)
