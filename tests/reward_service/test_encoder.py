"""Relevance on the real MiniLM, against transformers one text at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from reward_service.kinds.encoder import plan
from reward_service.reward import score
from specrej.contracts import Message, Prompt
from tests.reward_service.tiny import MINILM, load

QUESTION = "How do I bake bread at home?"
PROMPT = Prompt.from_user(QUESTION)
TEXTS = [
    "Mix flour, water, salt and yeast, let the dough rise, then bake the bread in a hot oven.",
    "Bake",
    "",
    "The stock market fell sharply on Tuesday after the central bank raised its rates again.",
    "You need flour. " * 20,
    "Weiße Brötchen, 面包, خبز 🍞",
    "[PAD] [PAD] bread [SEP] b[MASK]c [CLS][PAD] [UNK] [PAD]",
    "You need flour. " * 120,
    "the [MASK] " * 40 + "Mix flour, water, salt and yeast, then bake the bread.",
]


@given(st.lists(st.integers(1, 600), max_size=80), st.integers(1, 4096))
def test_micro_batches_hold_every_sequence_once_within_budget(
    lengths: list[int], budget: int
) -> None:
    """Guards against lost scores, against out of memory (rows times width count), and against one
    long text that makes all short ones as expensive as itself."""
    batches = plan(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        tokens = [lengths[index] for index in batch]
        padded = len(batch) * max(tokens)
        assert len(batch) == 1 or padded <= budget
        assert 2 * sum(tokens) > padded
    longest = [max(lengths)] * len(lengths) if lengths else []
    rows = max(1, budget // max(longest, default=1))
    assert len(plan(longest, budget)) == -(-len(longest) // rows), "as few as fit"


@pytest.fixture(scope="module")
def relevance() -> Any:
    return load("relevance", MINILM, token_budget=300)


def test_relevance_is_plain_transformers_cosine(relevance: Any) -> None:
    """Guards pooling and truncation; padding tokens in the mean would shift every score. Control
    tokens in texts are characters, as in transformers' plain reading."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MINILM)
    model: Any = AutoModel.from_pretrained(MINILM).eval()

    def embed(text: str) -> torch.Tensor:
        options = {"truncation": True, "max_length": 256, "split_special_tokens": True}
        encoded = tokenizer(text, return_tensors="pt", **options)
        with torch.inference_mode():
            mean: torch.Tensor = model(**encoded).last_hidden_state[0].mean(dim=0)
        return mean

    question = embed(QUESTION)
    expected = [torch.cosine_similarity(question, embed(text), dim=0).item() for text in TEXTS]
    assert expected[0] > 0.6
    assert expected[3] < 0.3  # else equal scores would prove little
    assert score(relevance, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)


def test_last_user_message_is_the_question(relevance: Any) -> None:
    """Guards against embedding the system turn or the model's own earlier answer."""
    turns = [("system", "You are a banker."), ("user", "Stocks?"), ("assistant", "They fell.")]
    messages = tuple(Message(role, content) for role, content in [*turns, ("user", QUESTION)])
    expected = score(relevance, PROMPT, TEXTS[:4])
    assert score(relevance, Prompt(messages=messages), TEXTS[:4]) == expected
    assert score(relevance, Prompt(text=QUESTION), TEXTS[:4]) == expected
