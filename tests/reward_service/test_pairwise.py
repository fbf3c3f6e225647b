"""Pairwise rewards on a tiny random language model, against every comparison done by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from reward_service.reward import score
from tests.reward_service.tiny import PROMPT, load, plain

TEXTS = ["Mix {a} flour.", "", "no", "Wait {b}.", "Bake."]


def preferred(directory: Path, a: str, b: str) -> float:
    """The probability of the answer A, by transformers."""
    tokenizer, model = plain(directory, AutoModelForCausalLM)
    text = f"[CONTEXT] {PROMPT.messages[0].content} [RESPONSE A] {a} [RESPONSE B] {b} \n"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in "AB"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1, words]
    return float(logits.softmax(dim=0)[0])


@pytest.mark.parametrize(("num_texts", "opponents"), [(5, 1), (5, 2), (5, 9), (2, 2), (3, 1)])
def test_scores_are_mean_preferences_in_both_orders(
    language_model: Path, num_texts: int, opponents: int
) -> None:
    """Guards against one place's favour, a pair counted twice, and braces in responses."""
    texts = TEXTS[:num_texts]
    steps = range(1, min(opponents, num_texts - 1) + 1)
    pairs = {frozenset((i, (i + step) % num_texts)) for i in range(num_texts) for step in steps}
    expected = []
    for i in range(num_texts):
        others = sorted(next(iter(pair - {i})) for pair in pairs if i in pair)
        shares = [preferred(language_model, texts[i], texts[j]) for j in others]
        shares += [1 - preferred(language_model, texts[j], texts[i]) for j in others]
        expected.append(sum(shares) / len(shares))
    scores = score(load("pairwise", language_model, opponents=opponents), PROMPT, texts)
    assert scores.values == pytest.approx(expected, abs=1e-4)


def test_equal_texts_score_alike_and_a_lone_one_half(language_model: Path) -> None:
    reward = load("pairwise", language_model)
    assert score(reward, PROMPT, ["a"]).values == (0.5,)
    assert score(reward, PROMPT, ["a", "a"]).values == (0.5, 0.5)
    first, second, third = score(reward, PROMPT, ["a", "b", "a"]).values
    assert first == third != second


def test_prompt_is_computed_once(language_model: Path) -> None:
    """Guards the cost: the text before the responses is the same in every comparison."""
    reward = load("pairwise", language_model, opponents=1)
    context = f"[CONTEXT] {PROMPT.messages[0].content} [RESPONSE A] "
    shared = 1 + len(f"<user>{context}")  # with BOS
    two = score(reward, PROMPT, ["a", "b"]).computed_tokens
    assert two == shared + 2 * (len("a [RESPONSE B] b \n") + 1)
    reward.check_integrity()


def test_words_of_several_tokens_are_refused(language_model: Path) -> None:
    with pytest.raises(ValueError, match="the word 'AB' must be one token, is 2"):
        load("pairwise", language_model, first="AB")
