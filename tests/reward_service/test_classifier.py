"""Bradley-Terry classifiers on tiny random weights, against plain transformers one at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from reward_service.classifier import ClassifierReward
from specrej.contracts import Message, Prompt
from specrej.errors import InvalidRequest

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "gemma": GemmaConfig,
}
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
)
PROMPT = Prompt.from_user("How do I bake bread?")
TEXTS = [
    "Mix flour and water.",
    "",
    "no",
    "Mix flour and yeast, then wait.",
    "x" * 150,
    "né 面包 🍞",
]
CONTEXT = 256


def make_tokenizer(pad: str | None) -> Any:
    """Bytes as tokens; like Llama's, it puts BOS before whatever it encodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=pad
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_config(family: str, pad_id: int | None, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        # Wide enough that scores of different texts differ by much more than the tolerance.
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": pad_id,
        "num_labels": 1,
    }
    if family == "gemma":
        options["head_dim"] = 8
    return CONFIGS[family](**(options | changes))


def save(directory: Path, config: Any, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def references(directory: Path, texts: list[str]) -> list[float]:
    """Logits by transformers' own classifier, one text at a time, nothing padded."""
    tokenizer, model = _plain(directory)
    logits = []
    for text in texts:
        turns = [*PROMPT.messages, Message("assistant", text)]
        conversation = [{"role": turn.role, "content": turn.content} for turn in turns]
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
        ids = tokenizer.encode(rendered, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            logits.append(model(input_ids=ids).logits[0, 0].item())
    return logits


@cache
def _plain(directory: Path) -> tuple[Any, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    model.config.pad_token_id = None  # the head then takes the last token there is
    return tokenizer, model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    return save(directory, make_config("llama", None), make_tokenizer(None))


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), (EOS, 2), (PAD, 0)])
def test_scores_are_plain_transformers_scores_whatever_the_batch(
    tmp_path: Path, family: str, pad: str | None, pad_id: int | None
) -> None:
    """Guards pooling at the true last token.

    With pad == eos every rendered text ends in the pad token, and transformers' own batched head
    scores the token before it; without a pad token it refuses to batch.
    """
    directory = save(tmp_path, make_config(family, pad_id), make_tokenizer(pad))
    expected = references(directory, TEXTS)
    assert max(expected) - min(expected) > 0.1
    for token_budget in (1, 400, 100_000):
        reward = ClassifierReward(directory, name="bt", token_budget=token_budget)
        assert reward.score(PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)


def test_what_shares_a_batch_never_changes_a_score(llama: Path) -> None:
    reward = ClassifierReward(llama, name="bt")
    texts = ["a" * length for length in range(0, 60, 3)]
    alone = [reward.score(PROMPT, [text]).values[0] for text in texts]
    assert reward.score(PROMPT, texts).values == pytest.approx(alone, abs=1e-4)
    backwards = reward.score(PROMPT, texts[::-1]).values
    assert backwards[::-1] == pytest.approx(alone, abs=1e-4)


def test_tokens_are_the_templates_with_one_bos_and_no_padding(llama: Path) -> None:
    """Guards against a second BOS, and against counting padding or equal texts twice."""
    reward = ClassifierReward(llama, name="bt")
    prompt = Prompt(text="hi")
    rendered = 1 + len("<user>hi") + 1 + len("<assistant>") + 1
    assert reward.score(prompt, [""]).computed_tokens == rendered
    # The prompt is computed once, and so is what comes twice.
    assert reward.score(prompt, ["abc", "", "abc"]).computed_tokens == rendered + 3 + 1


def test_raw_text_is_one_user_message(llama: Path) -> None:
    reward = ClassifierReward(llama, name="bt")
    text = PROMPT.messages[0].content
    assert reward.score(Prompt(text=text), TEXTS) == reward.score(PROMPT, TEXTS)


def test_earlier_turns_count(llama: Path) -> None:
    """Guards against a prompt cut down to its last message."""
    reward = ClassifierReward(llama, name="bt")
    earlier = (Message("user", "Hi"), Message("assistant", "Hello"))
    longer = Prompt(messages=(*earlier, *PROMPT.messages))
    assert reward.score(longer, ["no"]).values != reward.score(PROMPT, ["no"]).values


def test_where_prompt_and_response_are_too_long_the_last_tokens_count(llama: Path) -> None:
    """Guards against positions past the model's last, and against cutting what differs."""
    reward = ClassifierReward(llama, name="bt")
    assert reward.max_tokens == CONTEXT
    scores = reward.score(PROMPT, ["a" * 1000, "a" * 1000 + "b"])
    assert scores.computed_tokens == 2 * CONTEXT
    assert scores.values[0] != scores.values[1]


def test_a_prompt_over_the_models_limit_is_refused(llama: Path) -> None:
    """Guards against scores of responses to a prompt that the model never saw."""
    reward = ClassifierReward(llama, name="bt")
    with pytest.raises(InvalidRequest) as failure:
        reward.score(Prompt.from_user("a" * 1000), ["x"])
    assert [violation.field for violation in failure.value.violations] == ["prompt"]


def test_a_conversation_the_template_refuses_is_the_callers_mistake(llama: Path) -> None:
    """Guards against INTERNAL where a model knows no system turn."""
    reward = ClassifierReward(llama, name="bt")
    prompt = Prompt(messages=(Message("system", "Be brief."), *PROMPT.messages))
    with pytest.raises(InvalidRequest, match="no system turns") as failure:
        reward.score(prompt, ["x"])
    assert [violation.field for violation in failure.value.violations] == ["prompt.messages"]


def test_more_than_one_label_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_config("llama", None, num_labels=2), make_tokenizer(None))
    with pytest.raises(ValueError, match="must have one label, has 2"):
        ClassifierReward(tmp_path, name="bt")


def test_a_language_model_without_a_reward_head_is_refused(tmp_path: Path) -> None:
    """Guards against random scores: transformers makes up a missing head and only warns."""
    LlamaForCausalLM(make_config("llama", None)).save_pretrained(tmp_path)
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a trained classifier, lacks score\.weight"):
        ClassifierReward(tmp_path, name="bt")


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    """Guards against a template of our own making, which the model was not trained on."""
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = None
    save(tmp_path, make_config("llama", None), tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        ClassifierReward(tmp_path, name="bt")


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """Guards against the last token's score from a model that was trained on the first's."""
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    save(tmp_path, config, make_tokenizer(PAD))
    with pytest.raises(ValueError, match="must be decoder-only"):
        ClassifierReward(tmp_path, name="bt")
