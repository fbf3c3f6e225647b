"""Likelihood rewards on tiny random language models, against transformers' own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward_service.likelihood import Likelihood, load_likelihood
from reward_service.reward import score, score_batch
from specrej.contracts import Candidate
from tests.reward_service.tiny import (
    CONFIGS,
    EOS,
    PROMPT,
    make_config,
    make_tokenizer,
    options,
    rendered,
    save_language_model,
)

TEXTS = ["Mix flour and water.", "no", "Mix flour and yeast, then wait.", "né 面包 🍞"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    return save_language_model(directory, make_config("llama", None), make_tokenizer(None))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    return save_language_model(directory, make_config("llama", None), make_tokenizer(None), 7)


def logprobs(directory: Path, text: str, *, closed: bool = True) -> torch.Tensor:
    """Of the response's tokens, the closing one included if it is there."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    language_model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    whole = rendered(tokenizer, PROMPT, text)
    whole = whole if closed else whole.removesuffix(EOS)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    before = len(
        tokenizer.encode(whole[: whole.index("<assistant>") + 11], add_special_tokens=False)
    )
    with torch.inference_mode():
        logits = language_model(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    chosen: torch.Tensor = logits[range(before - 1, len(ids) - 1), ids[before:]]
    return chosen


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("closed", [True, False])
def test_scores_are_mean_and_sum_of_the_tokens(tmp_path: Path, family: str, closed: bool) -> None:
    """Guards the shift by one, and the prompt's tokens against being counted."""
    save_language_model(tmp_path, make_config(family, None), make_tokenizer(None))
    opts = options(tmp_path, unfinished="closed" if closed else "open")
    batch = [Candidate(i, text, 0, 0.0) for i, text in enumerate(TEXTS)]
    expected = [logprobs(tmp_path, text, closed=closed) for text in TEXTS]
    mean = load_likelihood(opts, likelihood=Likelihood())
    found = score_batch(mean.open(PROMPT), mean, batch).values
    assert found == pytest.approx([float(each.mean()) for each in expected], abs=1e-4)
    total = load_likelihood(opts, likelihood=Likelihood(beta=0.5, mean=False))
    found = score_batch(total.open(PROMPT), total, batch).values
    assert found == pytest.approx([0.5 * float(each.sum()) for each in expected], abs=1e-3)


def test_against_a_reference_it_is_the_implicit_reward_of_dpo(model: Path, reference: Path) -> None:
    """Guards the sign, and a reference that is the model itself."""
    likelihood = Likelihood(beta=0.1, mean=False)
    reward = load_likelihood(options(model), likelihood=likelihood, reference=reference)
    expected = [
        0.1 * float(logprobs(model, text).sum() - logprobs(reference, text).sum()) for text in TEXTS
    ]
    found = score(reward, PROMPT, TEXTS)
    assert found.values == pytest.approx(expected, abs=1e-3)
    own = score(load_likelihood(options(model), likelihood=likelihood), PROMPT, TEXTS)
    assert found.computed_tokens == 2 * own.computed_tokens
    assert reward.fingerprint != load_likelihood(options(model), likelihood=likelihood).fingerprint


def test_growing_texts_score_as_from_scratch(model: Path, reference: Path) -> None:
    """Guards what is kept of both models, and tokens whose successor was not known before."""
    reward = load_likelihood(
        options(model, unfinished="open"), likelihood=Likelihood(), reference=reference
    )
    session = reward.open(PROMPT)
    texts = {0: "", 1: "a"}
    for part in ("Mix", " flour é", "\n", ""):
        texts = {key: text + part for key, text in texts.items()}
        batch = [Candidate(key, text, 0, 0.0) for key, text in texts.items()]
        fresh = reward.open(PROMPT)
        expected = score_batch(fresh, reward, batch).values
        fresh.close()
        assert score_batch(session, reward, batch).values == pytest.approx(expected, abs=1e-4)
