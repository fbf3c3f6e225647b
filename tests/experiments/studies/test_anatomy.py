"""One prompt in a small memory."""

from __future__ import annotations

import itertools

from experiments.replay import Replayer
from experiments.studies import anatomy
from experiments.studies.analysis import analyse
from experiments.studies.runs import MEMORY, Plan
from tests.experiments.synthetic import WALK, trajectories


def test_memory_is_a_sawtooth_under_its_capacity() -> None:
    prompt = trajectories(n=64, stop_share=0.3, seed=7)
    result = anatomy.study(Replayer(prompt, "likelihood"), Plan(64, 0.5, MEMORY, 16))
    assert result.slots == prompt.prompt_tokens + 64 * 16
    # A candidate's newest token is stored when the next one is drawn: it may be one over, each.
    assert all(each.slots - each.live <= result.slots for each in result.moments)
    assert all(each.full_slots >= each.slots for each in result.moments)
    assert any(later.slots < earlier.slots for earlier, later in itertools.pairwise(result.moments))
    assert max(each.full_slots for each in result.moments) > 2 * result.slots


def test_the_batch_shrinks_and_lengths_never_go_back() -> None:
    prompt = trajectories(n=64, stop_share=0.3, seed=7)
    result = anatomy.study(Replayer(prompt, WALK), Plan(64, 0.5, MEMORY, 16))
    for earlier, later in itertools.pairwise(result.moments):
        assert later.length >= earlier.length
        assert later.live <= earlier.live
    assert [each.live_after <= each.live for each in result.rounds] == [True] * len(result.rounds)
    assert result.rounds[-1].live_after == 0


def test_those_kept_are_above_the_middle() -> None:
    result = anatomy.study(Replayer(trajectories(n=64), WALK), Plan(64, 0.5, MEMORY, 16))
    for each in result.rounds[:-1]:
        assert each.quantiles == tuple(sorted(each.quantiles))
        assert each.kept_quantiles[0] >= each.quantiles[2]
    assert result.rounds[-1].kept_quantiles == ()


def test_memory_is_for_one_answer_at_least() -> None:
    """Guards against a plan whose memory is more than its name says: 16 x 16 is less than 320."""
    prompts = [trajectories(n=16, max_tokens=320, positions=(16, 32, 320), prompt_id="p0")]
    found = analyse("few", prompts, "likelihood", alphas=(0.5,)).anatomy
    assert found is not None
    assert found.slots == prompts[0].prompt_tokens + 16 * 20
