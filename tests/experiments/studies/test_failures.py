"""Where the assumption fails."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies import failures
from experiments.trajectories import Trajectories
from tests.experiments.synthetic import WALK, collection, made_of


def misled() -> Trajectories:
    """Eight answers: the last is worst at token 16 and best in the end, the first ends early."""
    scores = np.ones((8, 64)) * np.arange(8.0)[::-1, None]
    scores[7, 17:] = 20.0
    return made_of(scores, np.array([5, *[64] * 7]), finished=np.ones(8, dtype=np.bool_))


def test_a_misleading_prefix_is_found_and_shown_shortly() -> None:
    result = failures.study([misled()], WALK, np.array([13.0]))
    shares = {position: share.value for position, share in result.misled_share}
    assert shares == {4: 1, 8: 1, 16: 1, 32: 0}
    (example,) = result.examples
    assert (example.candidate, example.position, example.rank_share) == (7, 16, 1)
    assert (example.partial, example.final) == (0, 20)
    assert len(example.excerpt) <= 64


def test_early_ends_are_counted() -> None:
    result = failures.study([misled()], WALK, np.array([13.0]))
    ended = {each.position: each.ended_share.value for each in result.early}
    assert ended == {4: 0, 8: 1 / 8, 16: 1 / 8, 32: 1 / 8}
    assert all(each.best_share == 0 for each in result.early)


def test_the_best_may_be_among_those_that_ended() -> None:
    """It cannot be misjudged any more."""
    scores = np.zeros((4, 64))
    scores[2, 2:] = 9.0
    result = failures.study([made_of(scores, np.array([64, 64, 3, 64]))], WALK, np.zeros(1))
    assert [each.best_share for each in result.early] == [1, 1, 1, 1]
    assert result.examples == ()


def test_similar_scores_are_told_by_their_spread() -> None:
    """A random walk's spread after 16 of 64 steps is half of the final one."""
    prompts = collection(12, 300)
    regrets = np.arange(12.0)
    result = failures.study(prompts, WALK, regrets)
    assert result.first == 16
    spreads = [each.spread for each in result.similar]
    assert np.mean(spreads) == pytest.approx(0.5, abs=0.03)
    finals = [each.scores(WALK).final.std() for each in prompts]
    found = [each.regret for each in result.similar]
    assert found == pytest.approx((regrets / finals).tolist())
    pearson = result.similar_pearson
    assert -1 <= pearson.low <= pearson.value <= pearson.high <= 1
    assert result.num_lost == 11


def test_few_losses_say_nothing_of_spread() -> None:
    """Guards against a correlation of twenty prompts of which two lost anything."""
    result = failures.study(collection(20, 32), WALK, np.array([*[0.0] * 17, 1.0, 2.0, 3.0]))
    assert result.num_lost == 3
    assert np.isnan(result.similar_pearson.value)


def test_no_prompt_is_an_example_twice() -> None:
    result = failures.study(collection(20, 32), WALK, np.zeros(20))
    assert len(result.examples) <= 5
    assert len({each.prompt_id for each in result.examples}) == len(result.examples)
