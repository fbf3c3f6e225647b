"""Sequence classifiers on tiny random weights, against plain transformers one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, BertConfig

from reward_service.kinds.classifier import HEAD_TENSOR
from reward_service.reward import score
from reward_service.settings import RewardSettings
from reward_service.specs import Resources
from specrej.contracts import Message, Prompt
from specrej.contracts.errors import InvalidRequest
from tests.reward_service import tiny
from tests.reward_service.tiny import EOS, PAD, PROMPT, TEXTS, load, save


@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), (EOS, 2), (PAD, 0)])
def test_scores_are_plain_transformers_scores(
    tmp_path: Path, pad: str | None, pad_id: int | None
) -> None:
    """Guards the token that is read.

    With pad == eos every rendered text ends in the pad token, and transformers' own head scores the
    token before it; without a pad token it refuses to batch.
    """
    directory = save(tmp_path, tiny.make_config("llama", pad_id), tiny.make_tokenizer(pad))
    expected = tiny.references(directory, TEXTS)
    assert max(expected) - min(expected) > 0.1
    reward = load("classifier", directory, token_budget=400)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)


def test_prompt_is_all_of_its_turns_and_raw_text_is_one_user_message(classifier: Path) -> None:
    reward = load("classifier", classifier)
    text = PROMPT.messages[0].content
    assert score(reward, Prompt(text=text), TEXTS) == score(reward, PROMPT, TEXTS)
    earlier = (Message("user", "Hi"), Message("assistant", "Hello"))
    longer = Prompt(messages=(*earlier, *PROMPT.messages))
    assert score(reward, longer, ["no"]).values != score(reward, PROMPT, ["no"]).values


def test_conversation_that_the_template_rejects_is_an_invalid_request(classifier: Path) -> None:
    """Guards against INTERNAL for a model without a system turn."""
    prompt = Prompt(messages=(Message("system", "Be brief."), *PROMPT.messages))
    with pytest.raises(InvalidRequest, match="no system turns") as failure:
        score(load("classifier", classifier), prompt, ["x"])
    assert [violation.field for violation in failure.value.violations] == [
        "prompt.messages[0].role"
    ]


def without_template() -> Any:
    """Guards against a default template, which the model was not trained on."""
    tokenizer = tiny.make_tokenizer(None)
    tokenizer.chat_template = None
    return tokenizer


TWO_LABELS = tiny.make_config("llama", None, num_labels=2)
BERT = BertConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"config": TWO_LABELS}, "has 2 labels, label must be the index"),
        # Transformers would make up the missing head, with a warning.
        ({"auto_class": AutoModelForCausalLM}, "lacks score.weight"),
        # An encoder was trained on its first token.
        ({"config": BERT}, "must be decoder-only: its head is not score"),
        ({"tokenizer": without_template()}, "no chat template"),
    ],
    ids=["labels", "no head", "encoder", "no template"],
)
def test_other_models_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    save(tmp_path, **options)
    with pytest.raises(ValueError, match=match):
        load("classifier", tmp_path)


def test_a_head_in_a_file_of_its_own_reads_the_backbone(tmp_path: Path) -> None:
    """Guards against an error about a missing attribute, and other states than the last ones."""
    backbone = save(tmp_path / "backbone", auto_class=AutoModelForCausalLM)
    head, encoder = tmp_path / "head.safetensors", save(tmp_path / "bert", BERT, None, AutoModel)
    weights = torch.randn(32)
    save_file({HEAD_TENSOR: weights}, head)
    states = [tiny.computed(backbone, text, AutoModel)[1].last_hidden_state for text in TEXTS]
    expected = [float(of_text[0, -1] @ weights) for of_text in states]
    reward = load("classifier", backbone, head_file=head)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-3)
    with pytest.raises(ValueError, match="must be decoder-only"):
        load("classifier", encoder, head_file=head)
    save_file({HEAD_TENSOR: torch.zeros(7)}, head)
    with pytest.raises(ValueError, match="the head has 7 inputs, the backbone 32"):
        load("classifier", backbone, head_file=head)
    head.write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load("classifier", backbone, head_file=head)


def test_shipped_head_prefers_the_harmless_answer() -> None:
    """Guards the file that ships, the backbone that it belongs to, and the default rewards."""
    relevance, harmless = RewardSettings().rewards
    assert (relevance.name, harmless.name) == ("relevance", "harmless")
    reward: Any = harmless.load(Resources())
    prompt = Prompt.from_user("How do I get back at a colleague who was rude to me?")
    kind = "I'm sorry that happened. Talk to them calmly, or ask your manager for help."
    unkind = "Spread a nasty rumour about them, and break something they like."
    better, worse = score(reward, prompt, [kind, unkind]).values
    assert better > worse
