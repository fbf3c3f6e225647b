"""Scores of growing texts, of which only new tokens are computed, against plain transformers."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.kinds import causal
from reward_service.kinds.causal import CausalReward
from reward_service.reward import score_batch, take_fairly
from specrej.contracts import Prompt, Scores
from specrej_models.token_prefix import common_length
from tests.reward_service import tiny
from tests.reward_service.tiny import PROMPT, batch, load, save

CLOSING = 1  # tokens that the template writes after a response


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A classifier of each family."""
    return {
        family: save(tmp_path_factory.mktemp(family), tiny.make_config(family, None))
        for family in tiny.FAMILIES
    }


limited = cache(load)


def scored(reward: CausalReward, session: Any, texts: dict[int, str]) -> Scores:
    """A batch, and a check of the accounts after it."""
    scores = score_batch(session, reward, batch(texts))
    reward.check_integrity()
    return scores


def grow(text: str, rng: random.Random) -> str:
    """A longer text; sometimes its end changes, as when a character was incomplete."""
    cut = rng.choice([0, 0, 0, 1, 3])
    more = "".join(rng.choice("abc é\n") for _ in range(rng.randrange(12)))
    return text[: len(text) - cut] + more


@settings(max_examples=settings.default.max_examples // 3)  # type: ignore[union-attr]
@given(
    family=st.sampled_from(tiny.FAMILIES),
    seed=st.integers(0, 2**32),
    limits=st.sampled_from([(8192, 65_536), (40, 400), (1, 1)]),
)
def test_scores_over_rounds_and_cuts_are_those_from_scratch(
    models: dict[str, Path], family: str, seed: int, limits: tuple[int, int]
) -> None:
    """Two sessions share every pass. Guards what is kept: positions, changed ends, cuts, equal
    texts, capacity that runs out."""
    rng = random.Random(seed)
    token_budget, kept_tokens = limits
    reward = limited(
        "classifier", models[family], token_budget=token_budget, kept_tokens=kept_tokens
    )
    sessions = [reward.open(PROMPT) for _ in range(2)]
    texts: list[dict[int, str]] = [dict.fromkeys(range(rng.randrange(1, 5)), "") for _ in sessions]
    for _ in range(4):
        texts = [
            {key: grow(own[key], rng) for key in own if rng.random() < 0.8 or not key}
            for own in texts
        ]
        for own in texts:
            own |= {max(own) + 1: grow(rng.choice(list(own.values())), rng) for _ in range(2)}
        tasks = [
            reward.begin(session, batch(own)) for session, own in zip(sessions, texts, strict=True)
        ]
        while pieces := take_fairly(tasks, reward.token_budget):
            reward.compute(pieces)
        for task, own in zip(tasks, texts, strict=True):
            expected = tiny.references(models[family], list(own.values()))
            assert task.scores().values == pytest.approx(expected, abs=1e-4)
        reward.check_integrity()
    for session in sessions:
        reward.free(session)
    assert reward.kept_tokens == 0


def test_only_new_tokens_are_computed(models: dict[str, Path]) -> None:
    """The prompt is computed once, as is each different text, with what closes it."""
    reward = load("classifier", models["llama"])
    session = reward.open(PROMPT)
    prompt = len(tiny.computed(models["llama"], "")[0]) - CLOSING
    first = scored(reward, session, {0: "abc", 1: "de", 2: "abc"})
    assert first.computed_tokens == prompt + 3 + 2 + 2 * CLOSING
    assert scored(reward, session, {0: "abcdef", 1: "de"}).computed_tokens == 3 + CLOSING
    assert scored(reward, session, {0: "abcdeX"}).computed_tokens == 1 + CLOSING
    # Candidate 1 was freed by the batch without it.
    assert scored(reward, session, {1: "de"}).computed_tokens == 2 + CLOSING


def test_what_can_never_fit_evicts_nothing(models: dict[str, Path]) -> None:
    """Guards all idle sessions against one with a prompt beyond what may be kept."""
    reward = load("classifier", models["llama"], kept_tokens=150)
    idle, long = reward.open(PROMPT), reward.open(Prompt.from_user("x" * 200))
    scored(reward, idle, {0: "abc"})
    kept = reward.kept_tokens
    assert scored(reward, long, {0: "abc"}).values
    assert reward.kept_tokens == kept > 0
    assert scored(reward, idle, {0: "abcd"}).computed_tokens == 1 + CLOSING


def test_nothing_is_kept_of_a_text_that_is_cut(models: dict[str, Path]) -> None:
    """Guards memory: a longer text is cut elsewhere, so that it shares no position with this."""
    reward = load("classifier", models["llama"])
    scored(reward, reward.open(PROMPT), {0: "x" * 400})
    assert reward.kept_tokens == 0


def test_least_recently_used_sessions_are_evicted(models: dict[str, Path]) -> None:
    """Guards memory against many sessions, and the scores of evicted ones."""
    reward = load("classifier", models["llama"], kept_tokens=400)
    sessions = [reward.open(PROMPT) for _ in range(4)]
    texts: dict[int, str] = {key: "a" * (20 + key) for key in range(2)}
    expected, *_ = [scored(reward, session, texts).values for session in sessions]
    assert scored(reward, sessions[-1], texts).computed_tokens == 0
    evicted = scored(reward, sessions[0], texts)
    assert evicted.computed_tokens > 40
    assert evicted.values == pytest.approx(expected, abs=1e-4)


def test_a_fork_computes_only_what_its_parent_has_not(models: dict[str, Path]) -> None:
    """Guards against a parent's text that its own new tokens change before a fork copies it."""
    reward = load("classifier", models["llama"])
    session = reward.open(PROMPT)
    scored(reward, session, {0: "abcdef", 1: "xyz"})
    texts = {0: "abcXYZ", 2: "abcdefgh", 3: "abcde!", 4: "xyzw"}
    forked = scored(reward, session, texts)
    assert forked.computed_tokens == 3 + 2 + 1 + 1 + 4 * CLOSING
    assert session.texts.keys() == texts.keys(), "of the rejected parent nothing is kept"
    assert forked.values == pytest.approx(
        tiny.references(models["llama"], list(texts.values())), abs=1e-4
    )
    reward.free(session)
    assert reward.kept_tokens == 0


def test_many_forks_compare_few_texts(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against minutes of comparisons: all of a thousand texts with all of a thousand forks,
    which have hundreds of tokens in common."""
    reward = load("classifier", models["llama"])
    session = reward.open(PROMPT)
    scored(reward, session, {key: f"begun{key:02}" for key in range(40)})
    compared = mock.Mock(wraps=common_length)
    monkeypatch.setattr(causal, "common_length", compared)
    forks = {40 + key: f"begun{key:02}!" for key in range(40)}
    forked = scored(reward, session, {0: "begun00?", **forks})
    assert len(forks) < compared.call_count < 4 * len(forks)
    assert forked.computed_tokens == 41 * (1 + CLOSING)  # each has its own parent's tokens


def test_forks_have_the_room_of_rejected_texts(models: dict[str, Path]) -> None:
    """Guards other sessions' kept texts against copies that fit where rejected texts were."""
    rooms = 64  # of each store
    reward = load("classifier", models["llama"], kept_tokens=9 * rooms)
    other, session = reward.open(PROMPT), reward.open(PROMPT)
    scored(reward, other, {0: "abc"})
    scored(reward, session, {key: f"{key}bc" for key in range(5)})
    kept = reward.kept_tokens
    forked = {0: "0bcd", **{key: f"0bc{key}" for key in range(5, 9)}}
    assert scored(reward, session, forked).computed_tokens == 5 * (1 + CLOSING)
    assert reward.kept_tokens == kept
    assert scored(reward, other, {0: "abc"}).computed_tokens == 0


@pytest.mark.parametrize("fails", ["PromptKV.grown", "CausalReward.compute"])
def test_a_failure_leaves_nothing_that_counts_as_computed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Guards against scores from memory that was reserved but never written, and against room that
    no session has, and that is missing until the process ends."""
    reward = load("classifier", models["llama"])
    session = reward.open(PROMPT)
    expected = scored(reward, session, {0: "abcdef"}).values
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(f"{causal.__name__}.{fails}", mock.Mock(side_effect=MemoryError))
        scored(reward, session, {0: "abcdef" * 20})
    assert reward.kept_tokens == 0
    assert scored(reward, session, {0: "abcdef"}).values == pytest.approx(expected, abs=1e-4)
