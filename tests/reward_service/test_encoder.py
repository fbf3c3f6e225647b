"""Relevance on the real MiniLM and tiny cross-encoders, against transformers one text at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    RobertaConfig,
)

from reward_service.kinds.encoder import plan
from reward_service.reward import score
from specrej.contracts import Message, Prompt
from tests.reward_service import tiny
from tests.reward_service.tiny import EOS, PAD, load, make_tokenizer

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
BERT: dict[str, Any] = tiny.SIZES | {"max_position_embeddings": 260, "pad_token_id": 0}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**BERT),
    "deberta": DebertaV2Config(**BERT, type_vocab_size=0),
    "roberta": RobertaConfig(**BERT, type_vocab_size=1),
    # Decoders, whose classifiers look for padding.
    "llama": tiny.make_config("llama", 2),
    "llama without padding": tiny.make_config("llama", None),
}


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
def relevance(minilm: Path) -> Any:
    return load("relevance", minilm, token_budget=300)


def test_relevance_is_plain_transformers_cosine(minilm: Path, relevance: Any) -> None:
    """Guards pooling and truncation; padding tokens in the mean would shift every score. Control
    tokens in texts are characters, as in transformers' plain reading."""
    tokenizer: Any = AutoTokenizer.from_pretrained(minilm)
    model: Any = AutoModel.from_pretrained(minilm).eval()

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


def save_cross_encoder(directory: Path, config: Any) -> Path:
    tokenizer = make_tokenizer(PAD)
    tokenizer.model_max_length = 200
    return tiny.save(directory, config, tokenizer)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_cross_encoder_scores_are_plain_transformers_scores(tmp_path: Path, family: str) -> None:
    """Guards pairs against being joined as one text, padding against being seen, and separators in
    texts. A prompt that alone is longer than a pair is not tokenized whole for each text."""
    save_cross_encoder(tmp_path, CONFIGS[family])
    tokenizer, model = tiny.plain(tmp_path, AutoModelForSequenceClassification)

    def expected(question: str, text: str) -> float:
        # In lists of one: a pair with an empty second text would otherwise be a single text.
        encoded = tokenizer(
            [question],
            [text],
            truncation=True,
            max_length=200,
            split_special_tokens=True,
            return_token_type_ids=family == "bert",
            return_attention_mask=False,
            return_tensors="pt",
        )
        with torch.inference_mode():
            logit: float = model(**encoded).logits[0, 0].item()
        return logit

    reward = load("cross-encoder", tmp_path, token_budget=400)
    texts = [*tiny.TEXTS, f"Hi{EOS}<assistant>Good.{EOS}{PAD}"]
    of_texts = [expected(QUESTION + EOS, text) for text in texts]
    of_batch = score(reward, Prompt.from_user(QUESTION + EOS), texts).values
    assert of_batch == pytest.approx(of_texts, abs=1e-4)
    long = "".join(f"{number} breads, " for number in range(400))
    as_text = reward._control_tokens.as_text = mock.Mock(wraps=reward._control_tokens.as_text)
    of_long = score(reward, Prompt(text=long), tiny.TEXTS[:1]).values
    assert of_long == pytest.approx([expected(long, tiny.TEXTS[0])], abs=1e-4)
    assert max(len(call.args[0]) for call in as_text.call_args_list) < 1000 < len(long)


def test_cross_encoder_with_several_labels_needs_the_one_that_counts(tmp_path: Path) -> None:
    """Guards classifiers whose last label is the good one against scores of their first."""
    save_cross_encoder(tmp_path, BertConfig(**(BERT | {"num_labels": 2})))
    for options in ({}, {"label": 2}):
        with pytest.raises(ValueError, match="has 2 labels, label must be the index of one"):
            load("cross-encoder", tmp_path, **options)
    rewards = [load("cross-encoder", tmp_path, label=label) for label in (0, 1)]
    values = [score(reward, PROMPT, tiny.TEXTS[:1]).values[0] for reward in rewards]
    tokenizer, model = tiny.plain(tmp_path, AutoModelForSequenceClassification)
    encoded = tokenizer(
        [QUESTION], [tiny.TEXTS[0]], return_tensors="pt", return_token_type_ids=True
    )
    with torch.inference_mode():
        logits = model(**encoded).logits[0].tolist()
    assert values == pytest.approx(logits, abs=1e-4)
