"""Trajectories on disk and in hand; what is lost when a collection is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.trajectories import (
    FloatArray,
    OffGrid,
    PrefixScores,
    Store,
    Trajectories,
    likelihood,
    load,
)
from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Message, Prompt

POSITIONS = np.array([2, 4, 5])
NUM_TOKENS = np.array([5, 1, 4, 2])


def made(prompt_id: str = "a", *, odd: float = 0.0) -> Trajectories:
    """Four answers of 5, 1, 4 and 2 tokens; `odd` makes values that float32 cannot hold."""
    chance = np.random.default_rng(3)
    is_there = np.arange(5) < NUM_TOKENS[:, None]
    drawn = chance.random((4, 5)).astype(np.float32).astype(np.float64)
    logprobs = np.where(is_there, odd - drawn, np.nan)
    partial = np.where(NUM_TOKENS[:, None] >= POSITIONS, chance.random((4, 3)), np.nan)
    return Trajectories(
        prompt_id=prompt_id,
        prompt=Prompt(messages=(Message("system", "Be brief."), Message("user", "Why?"))),
        prompt_tokens=7,
        max_tokens=5,
        seed=11,
        positions=POSITIONS,
        num_tokens=NUM_TOKENS,
        finished=np.array([False, True, True, True]),
        logprobs=logprobs,
        rewards={
            "r": PrefixScores(partial, chance.random(4)),
            LIKELIHOOD: likelihood(logprobs, NUM_TOKENS, POSITIONS),
        },
        texts=("one\u2028line", "", "naïve 🙂\n", "\x0b"),
    )


def assert_equal(found: Trajectories, expected: Trajectories) -> None:
    names = ("prompt_id", "prompt", "prompt_tokens", "max_tokens", "seed", "texts")
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    for name in ("positions", "num_tokens", "finished", "logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.rewards.keys() == expected.rewards.keys()
    for name, scores in expected.rewards.items():
        np.testing.assert_array_equal(found.rewards[name].partial, scores.partial)
        np.testing.assert_array_equal(found.rewards[name].final, scores.final)


@pytest.mark.parametrize("odd", [0.0, 1e-12])
def test_what_is_read_is_what_was_written(tmp_path: Path, odd: float) -> None:
    """To the last bit, whatever fits float32; texts with every kind of line's end."""
    store = Store(tmp_path / "new")
    assert store.head() is None
    assert store.lines() == []
    store.begin({"settings": {"n": 4}})
    store.add(made("a", odd=odd), {"seconds": 3})
    store.add(made("b"))
    first, second = load(tmp_path / "new")
    assert_equal(first, made("a", odd=odd))
    assert_equal(second, made("b"))
    assert store.head() == {"settings": {"n": 4}}
    assert store.lines()[0]["notes"] == {"seconds": 3}


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1))
def test_a_killed_collection_loses_what_was_being_written_alone(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    """A line torn anywhere is nothing, and does not swallow the one after it."""
    directory = tmp_path_factory.mktemp("torn")
    store = Store(directory)
    store.begin({"settings": {}})
    store.add(made("a"))
    path = directory / "trajectories.jsonl"
    whole = path.read_bytes()
    store.add(made("b"))
    added = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + added[: int(share * (len(added) - 2))])
    assert [each.prompt_id for each in store] == ["a"]
    store.add(made("b"))
    assert [each.prompt_id for each in store] == ["a", "b"]
    assert_equal(load(directory)[1], made("b"))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text(json.dumps({"what": "else"}) + "\n")
    with pytest.raises(ValueError, match="is not a collection"):
        load(tmp_path)
    with pytest.raises(ValueError, match="holds no trajectories yet"):
        load(tmp_path / "nothing")


def _means(logprobs: FloatArray) -> Iterator[list[float]]:
    """By the sums of an engine that adds token after token."""
    for row in logprobs.tolist():
        total, means = 0.0, []
        for count, value in enumerate(row, start=1):
            total += value
            means.append(total / count)
        yield means


def test_the_likelihood_is_the_engines_own_to_the_last_bit() -> None:
    """A sum in another order would differ, and rank otherwise."""
    kept = made()
    for row, means in enumerate(_means(kept.logprobs)):
        length = int(NUM_TOKENS[row])
        assert kept.scores(LIKELIHOOD).final[row] == means[length - 1]
        for position in range(1, 6):
            found = kept.partial_at(LIKELIHOOD, position)[row]
            assert found == means[position - 1] if position <= length else np.isnan(found)
    bare = replace(kept, rewards={})
    assert bare.reward_names == (LIKELIHOOD,)
    np.testing.assert_array_equal(bare.scores(LIKELIHOOD).final, kept.scores(LIKELIHOOD).final)


def test_a_position_off_the_grid_names_its_neighbours() -> None:
    kept = made()
    np.testing.assert_array_equal(kept.partial_at("r", 4), kept.rewards["r"].partial[:, 1])
    for position, near in ((3, "2 and 4"), (1, "2"), (6, "5")):
        with pytest.raises(OffGrid, match=f"at token {position}: .* are {near}$"):
            kept.partial_at("r", position)
    with pytest.raises(KeyError):
        kept.scores("unknown")


def test_taken_candidates_keep_all_that_is_theirs() -> None:
    kept = made()
    taken = kept.take([2, 0, 2])
    assert taken.n == 3
    assert taken.texts == (kept.texts[2], kept.texts[0], kept.texts[2])
    np.testing.assert_array_equal(taken.num_tokens, [4, 5, 4])
    np.testing.assert_array_equal(taken.logprobs[1], kept.logprobs[0])
    np.testing.assert_array_equal(taken.rewards["r"].final, kept.rewards["r"].final[[2, 0, 2]])
    np.testing.assert_array_equal(taken.finished, [True, False, True])
