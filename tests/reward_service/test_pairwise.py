"""Pairwise rewards on a tiny random language model, against every comparison done by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward_service.pairwise import Comparison, PairwiseReward, load_pairwise
from reward_service.reward import score
from specrej.contracts import Prompt
from specrej.errors import InvalidRequest
from tests.reward_service.tiny import (
    PROMPT,
    make_config,
    make_tokenizer,
    options,
    save_language_model,
)

TEXTS = ["Mix {a} flour.", "", "no", "Wait {b}.", "Bake."]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pairwise")
    return save_language_model(directory, make_config("llama", None), make_tokenizer(None))


def preferred(directory: Path, a: str, b: str) -> float:
    """The probability that the model says A, by transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    asked = f"[CONTEXT] {PROMPT.messages[0].content} [RESPONSE A] {a} [RESPONSE B] {b} \n"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=False)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in "AB"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1, words]
    return float(logits.softmax(dim=0)[0])


def reward_of(directory: Path, opponents: int = 2) -> PairwiseReward:
    return load_pairwise(options(directory), comparison=Comparison(opponents=opponents))


@pytest.mark.parametrize(("num_texts", "opponents"), [(5, 1), (5, 2), (5, 9), (2, 2), (3, 1)])
def test_scores_are_mean_preferences_in_both_orders(
    directory: Path, num_texts: int, opponents: int
) -> None:
    """Guards against one place's favour, a pair counted twice, and braces in responses."""
    texts = TEXTS[:num_texts]
    steps = range(1, min(opponents, num_texts - 1) + 1)
    met = {frozenset((i, (i + step) % num_texts)) for i in range(num_texts) for step in steps}
    expected = []
    for i in range(num_texts):
        others = sorted(next(iter(pair - {i})) for pair in met if i in pair)
        shares = [preferred(directory, texts[i], texts[j]) for j in others]
        shares += [1 - preferred(directory, texts[j], texts[i]) for j in others]
        expected.append(sum(shares) / len(shares))
    found = score(reward_of(directory, opponents), PROMPT, texts)
    assert found.values == pytest.approx(expected, abs=1e-4)


def test_equal_texts_score_alike_and_a_lone_one_half(directory: Path) -> None:
    reward = reward_of(directory)
    assert score(reward, PROMPT, ["a"]).values == (0.5,)
    assert score(reward, PROMPT, ["a", "a"]).values == (0.5, 0.5)
    first, second, third = score(reward, PROMPT, ["a", "b", "a"]).values
    assert first == third != second


def test_the_prompt_is_computed_once(directory: Path) -> None:
    """Guards the cost: what stands before the responses is the same in every comparison."""
    reward = reward_of(directory, opponents=1)
    session = reward.open(PROMPT)
    kept = len(session._kept.prompt_ids)
    assert kept > len(PROMPT.messages[0].content)
    two = score(reward, PROMPT, ["a", "b"]).computed_tokens
    assert two == kept + 2 * (len("a [RESPONSE B] b \n") + 1)
    reward.scorer.check_integrity()


def test_a_prompt_over_the_models_limit_is_refused(directory: Path) -> None:
    with pytest.raises(InvalidRequest) as failure:
        reward_of(directory).open(Prompt.from_user("a" * 1000))
    assert [violation.field for violation in failure.value.violations] == ["prompt"]


def test_words_of_several_tokens_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="the word 'AB' must be one token, is 2"):
        load_pairwise(options(directory), comparison=Comparison(first="AB"))


def test_a_template_that_refuses_is_the_prompts_fault(directory: Path) -> None:
    """Guards against jinja's own error, which would be a bug's status."""
    reward = reward_of(directory)
    reward.conversation.tokenizer.chat_template = "{{ raise_exception('only in French') }}"
    with pytest.raises(InvalidRequest, match="only in French"):
        reward.open(PROMPT)
