"""Partial against final rewards, against what theory says of random walks."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies import correlation
from tests.experiments.synthetic import (
    WALK,
    collection,
    expected_kendall,
    expected_pearson,
    made_of,
    trajectories,
)


def test_correlations_are_those_of_theory() -> None:
    """10 prompts of 400: the standard error of Pearson's r at 0.25 is about 0.015."""
    found = correlation.study(collection(10, 400), WALK)
    assert [each.position for each in found.decision_tokens] == [4, 8, 16, 32]
    for each in found.decision_tokens:
        assert each.pearson.value == pytest.approx(expected_pearson(each.position), abs=0.06)
        assert each.kendall.value == pytest.approx(expected_kendall(each.position), abs=0.05)
        assert each.live_share == 1


def test_the_likelihood_correlates_as_theory_says() -> None:
    """The mean of t of T independent terms correlates with the mean of all by sqrt(t / T)."""
    found = correlation.study(collection(10, 400), "likelihood")
    for each in found.decision_tokens:
        assert each.pearson.value == pytest.approx(expected_pearson(each.position), abs=0.06)


def test_the_best_survives_where_prefixes_tell_all() -> None:
    """And never where they tell the opposite."""
    steps = np.arange(16.0)[:, None] * np.ones((1, 64))
    true, false = np.cumsum(steps, axis=1), np.cumsum(-steps, axis=1)
    false[:, -1] = np.arange(16.0)
    lengths = np.full(16, 64)
    for scores, survives in ((true, True), (false, False)):
        prompt = made_of(scores, lengths)
        assert correlation.survives(prompt, WALK, 16, 0.5) is survives


def test_chance_survives_by_what_is_kept() -> None:
    """Prefixes that say nothing: the best of 40 stays with probability 1/4, here of 400 prompts.

    Its standard deviation is 0.022, so five of them are a false alarm in a million.
    """
    random = np.random.default_rng(3)
    survived = []
    for _ in range(400):
        scores = random.standard_normal((40, 64))
        survived.append(correlation.survives(made_of(scores, np.full(40, 64)), WALK, 8, 0.75))
    assert np.mean(survived) == pytest.approx(0.25, abs=0.11)


def test_a_whole_answer_cannot_be_lost() -> None:
    scores = np.zeros((4, 64))
    scores[0, 3:] = 5.0
    prompt = made_of(scores, np.array([4, 64, 64, 64]))
    assert correlation.survives(prompt, WALK, 8, 0.9)


def test_those_that_ended_are_not_correlated() -> None:
    """Guards against whole answers that would raise correlations: theirs is 1."""
    prompt = trajectories(n=300, stop_share=0.9, seed=5)
    token = correlation.study([prompt], WALK).decision_tokens[-1]
    assert token.live_share < 0.7
    assert token.pearson.value < 0.95
    assert len(token.partial) == min(250, int((prompt.num_tokens > token.position).sum()))
