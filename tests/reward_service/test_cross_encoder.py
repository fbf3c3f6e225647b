"""Cross-encoders on tiny random weights, against transformers one pair at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    RobertaConfig,
)

from reward_service.classifier import Transform
from reward_service.cross_encoder import CrossEncoderReward
from reward_service.reward import score
from specrej.contracts import Message, Prompt
from tests.reward_service.tiny import PAD, PROMPT, TEXTS, make_tokenizer, options

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 260,
    "pad_token_id": 0,
    "num_labels": 1,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "deberta": DebertaV2Config(**SIZES, type_vocab_size=0),
    "roberta": RobertaConfig(**SIZES, type_vocab_size=1),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save(directory: Path, config: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(PAD)
    tokenizer.model_max_length = 200
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_scores_are_plain_transformers_scores(tmp_path: Path, family: str) -> None:
    """Guards pairs against being joined as one text, and padding against being seen."""
    save(tmp_path, CONFIGS[family])
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    expected = []
    for text in TEXTS:
        # In lists of one: a pair whose second text is empty would otherwise be a single text.
        encoded = tokenizer(
            [PROMPT.messages[0].content],
            [text],
            truncation=True,
            max_length=200,
            return_token_type_ids=family == "bert",
            return_attention_mask=False,
            return_tensors="pt",
        )
        with torch.inference_mode():
            expected.append(model(**encoded).logits[0, 0].item())
    for token_budget in (1, 400, 100_000):
        reward = CrossEncoderReward(options(tmp_path, token_budget=token_budget))
        assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)
    squashed = CrossEncoderReward(options(tmp_path), transform=Transform("sigmoid"))
    sigmoids = torch.tensor(expected).sigmoid().tolist()
    assert score(squashed, PROMPT, TEXTS).values == pytest.approx(sigmoids, abs=1e-4)
    earlier = Prompt(
        messages=(Message("user", "Hi"), Message("assistant", "Yes?"), *PROMPT.messages)
    )
    assert score(squashed, earlier, TEXTS) == score(squashed, PROMPT, TEXTS)


def test_more_than_one_label_is_refused(tmp_path: Path) -> None:
    save(tmp_path, BertConfig(**(SIZES | {"num_labels": 2})))
    with pytest.raises(ValueError, match="must have one label, has 2"):
        CrossEncoderReward(options(tmp_path))
