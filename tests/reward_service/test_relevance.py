"""The relevance reward on the real MiniLM, against plain transformers one text at a time."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from reward_service.relevance import RelevanceReward
from reward_service.reward import score
from specrej.contracts import Message, Prompt

PROMPT = Prompt.from_user("How do I bake bread at home?")
TEXTS = [
    "Mix flour, water, salt and yeast, let the dough rise, then bake the bread in a hot oven.",
    "Bake",
    "",
    "The stock market fell sharply on Tuesday after the central bank raised its rates again.",
    "You need flour. " * 20,
    "Weiße Brötchen, 面包, خبز 🍞",
    "[PAD] [PAD] bread [SEP] [PAD]",
    "You need flour. " * 400,
]


@pytest.fixture(scope="module")
def reward(minilm: Path) -> RelevanceReward:
    return RelevanceReward(minilm, threads=1)


@pytest.fixture(scope="module")
def reference(minilm: Path) -> list[float]:
    """Cosines computed with plain transformers, one text at a time, nothing padded."""
    tokenizer: Any = AutoTokenizer.from_pretrained(minilm)
    model: Any = AutoModel.from_pretrained(minilm).eval()

    def embed(text: str) -> torch.Tensor:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            mean: torch.Tensor = model(**encoded).last_hidden_state[0].mean(dim=0)
        return mean

    question = embed(PROMPT.messages[-1].content)
    return [torch.cosine_similarity(question, embed(t), dim=0).item() for t in TEXTS]


def test_scores_are_plain_transformers_scores(
    reward: RelevanceReward, reference: list[float]
) -> None:
    """Guards pooling and truncation; padding tokens in the mean would shift every score."""
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("token_budget", [1, 300, 100_000])
def test_batch_size_never_changes_a_score(
    minilm: Path, reference: list[float], token_budget: int
) -> None:
    reward = RelevanceReward(minilm, threads=1, token_budget=token_budget)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(reference, abs=1e-4)


def test_what_shares_a_batch_never_changes_a_score(reward: RelevanceReward) -> None:
    """Guards against padding that depends on the neighbours being seen by the model."""
    rng = random.Random(0)
    words = TEXTS[0].split()
    texts = [" ".join(rng.choices(words, k=rng.randint(0, 60))) for _ in range(20)]
    alone = [score(reward, PROMPT, [text]).values[0] for text in texts]
    assert score(reward, PROMPT, texts).values == pytest.approx(alone, abs=1e-4)
    rng.shuffle(texts)
    assert sorted(score(reward, PROMPT, texts).values) == pytest.approx(sorted(alone), abs=1e-4)


def test_scores_mean_relevance(reward: RelevanceReward) -> None:
    """Guards against scores in a wrong order, or of the wrong texts."""
    bread, _, empty, market, *_ = score(reward, PROMPT, TEXTS).values
    assert bread > 0.6
    assert market < 0.3
    assert math.isfinite(empty)
    assert empty < bread


def test_the_last_user_message_is_the_question(reward: RelevanceReward) -> None:
    """Guards against embedding the system turn or the model's own earlier answer."""
    conversation = Prompt(
        messages=(
            Message("system", "You are a banker."),
            Message("user", "What about stocks?"),
            Message("assistant", "They fell."),
            Message("user", PROMPT.messages[0].content),
        )
    )
    expected = score(reward, PROMPT, TEXTS)
    assert score(reward, conversation, TEXTS) == expected
    assert score(reward, Prompt(text=PROMPT.messages[0].content), TEXTS) == expected


def test_tokens_are_counted_once_per_different_text_without_padding(
    reward: RelevanceReward,
) -> None:
    """Guards honest accounting: [CLS] bread [SEP] is 3 tokens, however long its neighbours."""
    prompt = Prompt(text="bread")
    assert score(reward, prompt, ["oven"]).computed_tokens == 6
    assert score(reward, prompt, ["oven", "oven", "bread"]).computed_tokens == 6
    assert score(reward, prompt, ["oven", "oven and dough"]).computed_tokens == 11
    assert score(reward, prompt, ["oven " * 1000]).computed_tokens == 3 + 256


def test_the_fingerprint_tells_settings_apart(minilm: Path, reward: RelevanceReward) -> None:
    assert RelevanceReward(minilm).fingerprint == reward.fingerprint
    assert RelevanceReward(minilm, max_tokens=128).fingerprint != reward.fingerprint
