"""Likelihoods by tiny random language models, against transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, ElectraConfig, ModernBertDecoderConfig

from reward_service.reward import score_batch
from tests.reward_service import tiny
from tests.reward_service.tiny import PROMPT, batch, load

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
    total = load("likelihood", tmp_path, unfinished=unfinished, mean=False)
    scores = score_batch(total.open(PROMPT), total, candidates)
    assert scores.values == pytest.approx([float(e.sum()) for e in expected], abs=1e-3)


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
