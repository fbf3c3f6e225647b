"""Likelihoods and comparisons by tiny random language models, against transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, ElectraConfig, ModernBertDecoderConfig

from reward_service.reward import score, score_batch
from tests.reward_service import tiny
from tests.reward_service.tiny import PROMPT, batch, load

COMPARED = ["Mix {a} flour.", "", "no", "Wait {b}.", "Bake."]
TEXTS = ["Mix flour and water.", "no", "Mix flour and yeast, then wait.", "né 面包 🍞"]


def logprobs(directory: Path, text: str, *, closed: bool = True) -> torch.Tensor:
    """Of the response's tokens, and of the closing one if the turn is closed."""
    before = len(tiny.computed(directory, "", AutoModelForCausalLM, closed=False)[0])
    ids, output = tiny.computed(directory, text, AutoModelForCausalLM, closed=closed)
    logits = output.logits[0].log_softmax(dim=-1)
    chosen: torch.Tensor = logits[range(before - 1, len(ids) - 1), ids[before:]]
    return chosen


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("closed", [True, False])
def test_scores_are_mean_and_sum_of_the_tokens(tmp_path: Path, family: str, closed: bool) -> None:
    """Guards the shift by one, and the prompt's tokens against being counted."""
    tiny.save_language_model(tmp_path, tiny.make_config(family, None), None)
    unfinished = "closed" if closed else "open"
    expected = [logprobs(tmp_path, text, closed=closed) for text in TEXTS]
    mean = load("likelihood", tmp_path, unfinished=unfinished)
    candidates = batch(dict(enumerate(TEXTS)))
    scores = score_batch(mean.open(PROMPT), mean, candidates)
    assert scores.values == pytest.approx([float(e.mean()) for e in expected], abs=1e-4)
    total = load("likelihood", tmp_path, unfinished=unfinished, beta=0.5, mean=False)
    scores = score_batch(total.open(PROMPT), total, candidates)
    assert scores.values == pytest.approx([0.5 * float(e.sum()) for e in expected], abs=1e-3)


@pytest.mark.parametrize("config", [ModernBertDecoderConfig, BertConfig, ElectraConfig])
def test_layers_before_the_output_embeddings_are_refused(tmp_path: Path, config: Any) -> None:
    """Guards against probabilities of another model: those without these layers."""
    sizes = {
        name: tiny.SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")
    }
    shape = {"num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 256}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    made = config(**sizes, **shape, **special, sep_token_id=2, is_decoder=True)
    tiny.save_language_model(tmp_path, made, None)
    with pytest.raises(ValueError, match=r"before their logits|not a|supported"):
        load("likelihood", tmp_path)


def test_difference_from_a_reference_is_the_implicit_reward_of_dpo(tmp_path: Path) -> None:
    """Guards the sign, and a reference that is the model itself."""
    model = tiny.save_language_model(tmp_path / "model")
    reference = tiny.save_language_model(tmp_path / "reference", seed=7)
    reward = load("likelihood", model, reference=reference, beta=0.1, mean=False)
    expected = [
        0.1 * float(logprobs(model, text).sum() - logprobs(reference, text).sum()) for text in TEXTS
    ]
    scores = score(reward, PROMPT, TEXTS)
    assert scores.values == pytest.approx(expected, abs=1e-3)
    own = load("likelihood", model, beta=0.1, mean=False)
    assert scores.computed_tokens == 2 * score(own, PROMPT, TEXTS).computed_tokens
    assert reward.fingerprint != own.fingerprint


def preferred(directory: Path, a: str, b: str) -> float:
    """The probability of the answer A, by transformers."""
    tokenizer, model = tiny.plain(directory, AutoModelForCausalLM)
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
    texts = COMPARED[:num_texts]
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
