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

from reward_service.batching import take_fairly
from reward_service.causal_reward import CausalReward
from reward_service.classifier import load_classifier
from reward_service.reward import score_batch
from specrej.contracts import Candidate, FinishReason, Scores
from tests.reward_service.tiny import (
    CONFIGS,
    EOS,
    PROMPT,
    make_config,
    make_tokenizer,
    options,
    plain,
    references,
    rendered,
    save,
)

CLOSING = 1  # tokens that the template writes after a response


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
def loaded(directory: Path, token_budget: int, kept_tokens: int) -> CausalReward:
    limits = {"token_budget": token_budget, "kept_tokens": kept_tokens}
    return load_classifier(options(directory, **limits))


def candidates(texts: dict[int, str]) -> list[Candidate]:
    return [Candidate(key, text, 0, 0.0) for key, text in texts.items()]


def scored(reward: CausalReward, session: Any, texts: dict[int, str]) -> Scores:
    """A batch; the books must be right after it."""
    scores = score_batch(session, reward, candidates(texts))
    reward.scorer.check_integrity()
    return scores


def grow(text: str, rng: random.Random) -> str:
    """A longer text; now and then its end is told anew, as where a letter was half there."""
    cut = rng.choice([0, 0, 0, 1, 3])
    more = "".join(rng.choice("abc é\n") for _ in range(rng.randrange(12)))
    return text[: len(text) - cut] + more


@pytest.mark.parametrize("family", sorted(CONFIGS))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), limits=st.sampled_from([(8192, 65_536), (40, 400), (1, 1)]))
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
        scores = scored(reward, session, texts).values
        expected = references(models[family], list(texts.values()))
        assert scores == pytest.approx(expected, abs=1e-4)
        assert reward.scorer.ledger.owned <= kept_tokens
    session.close()
    assert reward.scorer.ledger.owned == 0


def test_only_new_tokens_are_computed(models: dict[str, Path]) -> None:
    """Guards the point of it all: the prompt once, each text once, the closing every time."""
    reward = load_classifier(options(models["llama"]))
    session = reward.open(PROMPT)
    prompt = (
        len(reward.conversation.encode([reward.conversation.render(PROMPT, [""])[0]])[0]) - CLOSING
    )
    first = scored(reward, session, {0: "abc", 1: "de"})
    assert first.computed_tokens == prompt + 3 + 2 + 2 * CLOSING
    second = scored(reward, session, {0: "abcdef", 1: "de"})
    assert second.computed_tokens == 3 + 2 * CLOSING
    retold = scored(reward, session, {0: "abcdeX"})
    assert retold.computed_tokens == 1 + CLOSING
    back = scored(reward, session, {1: "de"})  # it was forgotten when a batch came without it
    assert back.computed_tokens == 2 + CLOSING


def test_sessions_used_longest_ago_are_forgotten_first(models: dict[str, Path]) -> None:
    """Guards memory against sessions without number, and their scores against being forgotten."""
    reward = load_classifier(options(models["llama"], kept_tokens=400))
    sessions = [reward.open(PROMPT) for _ in range(4)]
    texts = {key: "a" * (20 + key) for key in range(2)}
    scores = [scored(reward, session, texts).values for session in sessions]
    assert len({tuple(round(value, 4) for value in values) for values in scores}) == 1
    assert 0 < reward.scorer.ledger.owned <= 400
    again = scored(reward, sessions[-1], texts)
    assert again.computed_tokens == 2 * CLOSING
    anew = scored(reward, sessions[0], texts)
    assert anew.computed_tokens > 40
    assert anew.values == pytest.approx(scores[0], abs=1e-4)


def test_a_failed_pass_leaves_nothing_that_counts_as_computed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against scores from memory that was reserved but never written."""
    reward = load_classifier(options(models["llama"]))
    session = reward.open(PROMPT)
    expected = scored(reward, session, {0: "abcdef"}).values
    with monkeypatch.context() as patched:
        patched.setattr(reward.scorer, "compute", _fails)
        with pytest.raises(MemoryError):
            scored(reward, session, {0: "abcdefghi"})
    assert reward.scorer.ledger.owned == 0
    assert scored(reward, session, {0: "abcdef"}).values == pytest.approx(expected, abs=1e-4)


def _fails(*_: Any) -> Any:
    raise MemoryError


def test_sessions_that_share_a_pass_score_as_alone(models: dict[str, Path]) -> None:
    """Guards against a text that attends to another session's, and against evicted prompts."""
    for kept_tokens in (65_536, 150):
        reward = load_classifier(options(models["llama"], kept_tokens=kept_tokens))
        sessions = [reward.open(PROMPT) for _ in range(3)]
        texts: list[dict[int, str]] = [dict.fromkeys(range(4), "") for _ in sessions]
        rng = random.Random(kept_tokens)
        for _ in range(3):
            texts = [{key: grow(text, rng) for key, text in each.items()} for each in texts]
            batches = zip(sessions, texts, strict=True)
            tasks = [session.begin(candidates(each)) for session, each in batches]
            while pieces := take_fairly(tasks, 60):
                reward.compute(pieces)
            for task, each in zip(tasks, texts, strict=True):
                expected = references(models["llama"], list(each.values()))
                assert task.scores().values == pytest.approx(expected, abs=1e-4)
            reward.scorer.check_integrity()


def test_an_open_turn_ends_with_the_text(models: dict[str, Path]) -> None:
    """Guards the setting: what the template writes after a turn is there if it is closed, only."""
    directory = models["llama"]
    reward = load_classifier(options(directory, unfinished="open"))
    tokenizer, model = plain(directory)
    session = reward.open(PROMPT)
    for text in ("", "abc", "abcde", "abcde"):
        whole = rendered(tokenizer, PROMPT, text).removesuffix(EOS)
        ids = tokenizer.encode(whole, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            expected = model(input_ids=ids).logits[0, 0].item()
        found = scored(reward, session, {0: text})
        assert found.values == pytest.approx((expected,), abs=1e-4)
    assert found.computed_tokens == 0  # an open text that has not changed is known
    cut_off = Candidate(0, "abcde", 0, 0.0, FinishReason.LENGTH)
    finished = Candidate(0, "abcde", 0, 0.0, FinishReason.STOP)
    assert score_batch(session, reward, [cut_off]).values == pytest.approx((expected,), abs=1e-4)
    closed = references(directory, ["abcde"])
    assert score_batch(session, reward, [finished]).values == pytest.approx(closed, abs=1e-4)
    assert closed != pytest.approx([expected], abs=1e-3)
