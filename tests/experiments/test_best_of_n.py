"""Best-of-N by N, lengths of answers, and one prompt in a small memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.replay import Replayer
from experiments.studies import anatomy, best_of_n
from experiments.studies.analysis import analyse
from experiments.studies.plans import MEMORY, Plan
from tests.experiments.synthetic import WALK, from_scores, trajectories


@pytest.mark.parametrize("complete", [[True] * 4, [False, True, True, False]])
def test_reward_by_n(complete: list[bool]) -> None:
    """Finals 1, 2, 3, 4: one answer scores 2.5, the best of two 20 / 6, of four 4.

    As in the paper, answers that ended at the limit count like complete ones.
    """
    scores = np.ones((4, 64)) * np.array([[1.0], [2.0], [3.0], [4.0]])
    prompt = from_scores(scores, np.array([64, 32, 32, 64]), finished=np.array(complete))
    result = best_of_n.study([prompt], WALK)
    assert [point.n for point in result.points] == [1, 2, 4]
    assert [point.reward.value for point in result.points] == pytest.approx([2.5, 20 / 6, 4])
    assert [point.gain.value for point in result.points] == pytest.approx([0, 20 / 6 - 2.5, 1.5])
    assert [point.tokens for point in result.points] == [48, 96, 192]
    (table,) = result.tables()
    assert [row[0] for row in table.rows] == [1, 2, 4]


def test_lengths_of_answers() -> None:
    """Of one prompt's four answers three end, the best among them; none of the other's."""
    num_tokens = np.array([10, 20, 64, 6])
    scores = np.ones((4, 64)) * np.array([[3.0], [5.0], [4.0], [1.0]])
    early = from_scores(scores, num_tokens, prompt_id="early")
    late = from_scores(scores, np.full(4, 64), prompt_id="late")
    lengths = best_of_n.lengths([late, early], WALK)
    one = lengths.prompts[1]
    assert (one.ended_share, one.best_tokens, one.best_ended) == (0.75, 20, True)
    assert one.tokens[1] == 15
    assert one.tendency == pytest.approx(np.corrcoef(num_tokens, [3, 5, 4, 1])[0, 1])
    assert (lengths.mean_tokens, lengths.best_tokens.value) == ((64 + 25) / 2, 42)
    (table,) = lengths.tables()
    assert [row[0] for row in table.rows] == ["early", "late"]
    assert [row[-2] for row in table.rows] == ["yes", "no"]


@pytest.mark.parametrize("reward", [WALK, "likelihood"])
def test_memory_is_a_sawtooth_below_its_capacity(reward: str) -> None:
    prompt = trajectories(n=64, stop_share=0.3, seed=7)
    result = anatomy.study(Replayer(prompt, reward), Plan(64, 0.5, MEMORY, 16))
    assert result.slots == prompt.prompt_tokens + 64 * 16
    assert result.full_slots > 2 * result.slots
    assert all(moment.slots <= result.slots for moment in result.moments)
    assert max(moment.slots for moment in result.moments) > 0.8 * result.slots
    assert all(cut.slots <= result.slots for cut in result.rounds)
    assert all(moment.full_slots >= moment.slots for moment in result.moments)
    pairs = list(itertools.pairwise(result.moments))
    assert any(later.slots < earlier.slots for earlier, later in pairs)
    assert all(later.length >= earlier.length for earlier, later in pairs)
    assert all(later.live <= earlier.live for earlier, later in pairs)
    assert all(cut.live_after <= cut.live for cut in result.rounds)
    assert result.rounds[-1].live_after == 0


def test_survivors_rank_above_the_median() -> None:
    *rounds, last = anatomy.study(Replayer(trajectories(), WALK), Plan(64, 0.5, MEMORY, 16)).rounds
    for cut in rounds:
        assert cut.quantiles == tuple(sorted(cut.quantiles))
        assert cut.kept_quantiles[0] >= cut.quantiles[2]
    assert last.kept_quantiles == ()


def test_anatomy_has_memory_for_one_whole_answer() -> None:
    """Guards against a capacity below one answer: 16 x 16 is less than 320."""
    prompts = [trajectories(n=16, max_tokens=320, positions=(16, 32, 320), prompt_id="p0")]
    result = analyse("few", prompts, "likelihood", alphas=(0.5,)).anatomy
    assert result is not None
    assert result.slots == prompts[0].prompt_tokens + 16 * 20
