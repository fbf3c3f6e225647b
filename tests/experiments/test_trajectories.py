"""Trajectories in memory and on disk, and resuming after an interrupted write."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from experiments.trajectories import PrefixScores, Store, Trajectories, load
from specrej.contracts import Message, Prompt
from tests.experiments.synthetic import WALK, trajectories

POSITIONS = np.array([2, 4, 5])
NUM_TOKENS = np.array([5, 1, 4, 2])


def made(prompt_id: str = "a", *, odd: float = 0.0) -> Trajectories:
    """Four answers of 5, 1, 4 and 2 tokens; `odd` adds digits that float32 cannot represent."""
    random = np.random.default_rng(3)
    is_there = np.arange(5) < NUM_TOKENS[:, None]
    drawn = random.random((4, 5)).astype(np.float32).astype(np.float64)
    partial = np.where(NUM_TOKENS[:, None] >= POSITIONS, random.random((4, 3)), np.nan)
    return Trajectories(
        prompt_id=prompt_id,
        prompt=Prompt(messages=(Message("system", "Be brief."), Message("user", "Why?"))),
        prompt_tokens=7,
        max_tokens=5,
        seed=11,
        positions=POSITIONS,
        num_tokens=NUM_TOKENS,
        finished=np.array([False, True, True, True]),
        logprobs=np.where(is_there, odd - drawn, np.nan),
        rewards={"r": PrefixScores(partial, random.random(4))},
        texts=["one\u2028line", "", "naïve 🙂\n", "\x0b"],
    )


def assert_equal(actual: Trajectories, expected: Trajectories) -> None:
    """Exact equality; NaN equals NaN."""
    np.testing.assert_equal(asdict(actual), asdict(expected))


@pytest.mark.parametrize("odd", [0.0, 1e-12])
def test_stored_trajectories_are_read_back_exactly(tmp_path: Path, odd: float) -> None:
    """Also values that float32 cannot hold, and texts with every kind of line end."""
    store = Store(tmp_path / "new")
    assert store.head() is None
    assert not [*store]
    store.begin({"settings": {"n": 4}})
    store.add(made("a", odd=odd))
    store.add(made("b"))
    first, second = load(tmp_path / "new")
    assert_equal(first, made("a", odd=odd))
    assert_equal(second, made("b"))
    assert store.head() == {"settings": {"n": 4}}
    with pytest.raises(ValueError, match="has no reward other, but r, likelihood"):
        load(tmp_path / "new", "other")


def test_interrupted_write_loses_only_its_own_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a file that is read before it is complete."""
    store = Store(tmp_path)
    store.begin({"settings": {}})
    store.add(made("a"))

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", interrupted)
        store.add(made("b"))
    assert [prompt.prompt_id for prompt in store] == ["a"]
    store.add(made("b"))
    assert_equal(load(tmp_path)[1], made("b"))
    with pytest.raises(ValueError, match="holds no trajectories yet"):
        load(tmp_path / "nothing")


def test_position_off_the_grid_is_refused_with_its_neighbours() -> None:
    prompt = made()
    np.testing.assert_array_equal(prompt.partial("r", 4), prompt.rewards["r"].partial[:, 1])
    for position, near in ((3, "2 and 4"), (1, "2"), (6, "5")):
        with pytest.raises(ValueError, match=f"at token {position}: .* are {near}$"):
            prompt.partial("r", position)
    with pytest.raises(KeyError):
        prompt.final("unknown")


def test_shortened_has_the_prefixes_of_long_answers() -> None:
    prompt = trajectories(n=64, stop_share=0.5, seed=2)
    short = prompt.shortened(32)
    assert short.num_tokens.tolist() == np.minimum(prompt.num_tokens, 32).tolist()
    assert short.finished.tolist() == (prompt.finished & (prompt.num_tokens <= 32)).tolist()
    assert short.positions.tolist() == [4, 8, 12, 16, 24, 32]
    is_long = prompt.num_tokens > 32
    expected = np.where(is_long, prompt.partial(WALK, 32), prompt.final(WALK))
    np.testing.assert_array_equal(short.final(WALK), expected)
    assert_equal(prompt.shortened(64), prompt)
    with pytest.raises(ValueError, match="64 tokens only"):
        prompt.shortened(128)
    with pytest.raises(ValueError, match="no prefix was scored at token 31"):
        prompt.shortened(31)
