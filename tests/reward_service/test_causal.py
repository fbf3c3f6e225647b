"""Scores of growing texts, only their new tokens computed, against plain transformers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_service.classifier import ClassifierReward
from specrej.contracts import Candidate
from tests.reward_service.test_classifier import (
    CONFIGS,
    PROMPT,
    make_config,
    make_tokenizer,
    references,
    save,
)

CLOSING = 1  # tokens that the template writes after a response
MOST_PROMPT_TOKENS = 60


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of each family."""
    return {
        family: save(
            tmp_path_factory.mktemp(family), make_config(family, None), make_tokenizer(None)
        )
        for family in CONFIGS
    }


@cache
def loaded(directory: Path, token_budget: int, kept_tokens: int) -> ClassifierReward:
    return ClassifierReward(
        directory, name="bt", token_budget=token_budget, kept_tokens=kept_tokens
    )


def candidates(texts: dict[int, str]) -> list[Candidate]:
    return [Candidate(key, text, 0, 0.0) for key, text in texts.items()]


def grow(text: str, rng: random.Random) -> str:
    """A longer text; now and then its end is told anew, as where a letter was half there."""
    cut = rng.choice([0, 0, 0, 1, 3])
    more = "".join(rng.choice("abc é\n") for _ in range(rng.randrange(12)))
    return text[: len(text) - cut] + more


@pytest.mark.parametrize("family", sorted(CONFIGS))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), limits=st.sampled_from([(8192, 65_536), (40, 400), (1, 0)]))
def test_scores_over_rounds_and_cuts_are_those_from_scratch(
    models: dict[str, Path], family: str, seed: int, limits: tuple[int, int]
) -> None:
    """Guards what is kept: positions, tails told anew, cuts, equal texts, room that runs out."""
    rng = random.Random(seed)
    reward, kept_tokens = loaded(models[family], *limits), limits[1]
    session = reward.open(PROMPT)
    texts = dict.fromkeys(range(rng.randrange(1, 6)), "")
    for _ in range(4):
        survivors = [key for key in texts if rng.random() < 0.8 or not key]
        texts = {key: grow(texts[key], rng) for key in survivors}
        scores = session.score(candidates(texts)).values
        expected = references(models[family], list(texts.values()))
        assert scores == pytest.approx(expected, abs=1e-4)
        assert reward.scorer.num_kept_tokens <= max(kept_tokens, MOST_PROMPT_TOKENS)
    session.close()
    assert reward.scorer.num_kept_tokens == 0


def test_only_new_tokens_are_computed(models: dict[str, Path]) -> None:
    """Guards the point of it all: the prompt once, each text once, the closing every time."""
    reward = ClassifierReward(models["llama"], name="bt")
    session = reward.open(PROMPT)
    prompt = len(reward.encode([reward.render(PROMPT, [""])[0]])[0]) - CLOSING
    first = session.score(candidates({0: "abc", 1: "de"}))
    assert first.computed_tokens == prompt + 3 + 2 + 2 * CLOSING
    second = session.score(candidates({0: "abcdef", 1: "de"}))
    assert second.computed_tokens == 3 + 2 * CLOSING
    retold = session.score(candidates({0: "abcdeX"}))
    assert retold.computed_tokens == 1 + CLOSING
    back = session.score(candidates({1: "de"}))  # it was forgotten when a batch came without it
    assert back.computed_tokens == 2 + CLOSING


def test_sessions_used_longest_ago_are_forgotten_first(models: dict[str, Path]) -> None:
    """Guards memory against sessions without number, and their scores against being forgotten."""
    reward = ClassifierReward(models["llama"], name="bt", kept_tokens=400)
    sessions = [reward.open(PROMPT) for _ in range(4)]
    texts = {key: "a" * (20 + key) for key in range(2)}
    scores = [session.score(candidates(texts)).values for session in sessions]
    assert len({tuple(round(value, 4) for value in values) for values in scores}) == 1
    assert 0 < reward.scorer.num_kept_tokens <= 400
    again = sessions[-1].score(candidates(texts))
    assert again.computed_tokens == 2 * CLOSING
    anew = sessions[0].score(candidates(texts))
    assert anew.computed_tokens > 40
    assert anew.values == pytest.approx(scores[0], abs=1e-4)


def test_a_failed_pass_leaves_nothing_that_counts_as_computed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against scores from memory that was reserved but never written."""
    reward = ClassifierReward(models["llama"], name="bt")
    session = reward.open(PROMPT)
    expected = session.score(candidates({0: "abcdef"})).values
    with monkeypatch.context() as patched:
        patched.setattr(reward.scorer, "_states", _fails)
        with pytest.raises(MemoryError):
            session.score(candidates({0: "abcdefghi"}))
    assert reward.scorer.num_kept_tokens == 0
    assert session.score(candidates({0: "abcdef"})).values == pytest.approx(expected, abs=1e-4)


def _fails(*_: Any) -> Any:
    raise MemoryError
