"""A smaller limit is exactly a shorter run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.replay import Replayer, Setting
from experiments.studies.shortened import shortened
from experiments.trajectories import OffGrid
from specrej.contracts import Schedule
from tests.experiments.synthetic import WALK, trajectories

EIGHTS = Schedule("geometric", first=8, factor=2.0)


def test_lengths_ends_and_scores() -> None:
    prompt = trajectories(n=64, stop_share=0.5, seed=2)
    short = shortened(prompt, 32)
    assert short.num_tokens.tolist() == np.minimum(prompt.num_tokens, 32).tolist()
    assert short.finished.tolist() == (prompt.finished & (prompt.num_tokens <= 32)).tolist()
    assert short.positions.tolist() == [4, 8, 12, 16, 24, 32]
    long = prompt.num_tokens > 32
    final = short.scores(WALK).final
    assert final[long].tolist() == prompt.partial_at(WALK, 32)[long].tolist()
    assert final[~long].tolist() == prompt.scores(WALK).final[~long].tolist()


def test_the_whole_limit_changes_nothing() -> None:
    prompt = trajectories(n=8, stop_share=0.5)
    same = shortened(prompt, 64)
    for reward in prompt.reward_names:
        assert same.scores(reward).final.tolist() == prompt.scores(reward).final.tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(min_value=0, max_value=1000), st.sampled_from([WALK, "likelihood"]))
def test_rounds_before_the_limit_are_the_same(seed: int, reward: str) -> None:
    """Cuts at 8 and 16 do not know how long answers may become."""
    prompt = trajectories(n=32, stop_share=0.3, seed=seed)
    setting = Setting(32, 0.5, EIGHTS, reward)
    long = Replayer(prompt, reward).run(setting).rounds
    short = Replayer(shortened(prompt, 32), reward).run(setting).rounds
    assert short[:2] == long[:2]


def test_what_cannot_be_known_is_refused() -> None:
    prompt = trajectories(n=4)
    with pytest.raises(ValueError, match="64 tokens only"):
        shortened(prompt, 128)
    with pytest.raises(OffGrid):
        shortened(prompt, 31)
