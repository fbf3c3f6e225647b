"""Sequence classifiers on tiny random weights, against plain transformers one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaForCausalLM,
)

from reward_service.classifier import Transform, load_classifier
from reward_service.conversation import Format
from reward_service.reward import score
from specrej.contracts import Message, Prompt
from specrej.errors import InvalidRequest
from tests.reward_service.tiny import (
    BOS,
    CONFIGS,
    CONTEXT,
    EOS,
    PAD,
    PROMPT,
    TEXTS,
    make_config,
    make_tokenizer,
    options,
    references,
    rendered,
    save,
)


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
        reward = load_classifier(options(directory, token_budget=token_budget))
        assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)


def test_what_shares_a_batch_never_changes_a_score(llama: Path) -> None:
    reward = load_classifier(options(llama))
    texts = ["a" * length for length in range(0, 60, 3)]
    alone = [score(reward, PROMPT, [text]).values[0] for text in texts]
    assert score(reward, PROMPT, texts).values == pytest.approx(alone, abs=1e-4)
    backwards = score(reward, PROMPT, texts[::-1]).values
    assert backwards[::-1] == pytest.approx(alone, abs=1e-4)


def test_tokens_are_the_templates_with_one_bos_and_no_padding(llama: Path) -> None:
    """Guards against a second BOS, and against counting padding or equal texts twice."""
    reward = load_classifier(options(llama))
    prompt = Prompt(text="hi")
    rendered = 1 + len("<user>hi") + 1 + len("<assistant>") + 1
    assert score(reward, prompt, [""]).computed_tokens == rendered
    # The prompt is computed once, and so is what comes twice.
    assert score(reward, prompt, ["abc", "", "abc"]).computed_tokens == rendered + 3 + 1


def test_raw_text_is_one_user_message(llama: Path) -> None:
    reward = load_classifier(options(llama))
    text = PROMPT.messages[0].content
    assert score(reward, Prompt(text=text), TEXTS) == score(reward, PROMPT, TEXTS)


def test_earlier_turns_count(llama: Path) -> None:
    """Guards against a prompt cut down to its last message."""
    reward = load_classifier(options(llama))
    earlier = (Message("user", "Hi"), Message("assistant", "Hello"))
    longer = Prompt(messages=(*earlier, *PROMPT.messages))
    assert score(reward, longer, ["no"]).values != score(reward, PROMPT, ["no"]).values


def test_where_prompt_and_response_are_too_long_the_last_tokens_count(llama: Path) -> None:
    """Guards against positions past the model's last, and against cutting what differs."""
    reward = load_classifier(options(llama))
    assert reward.conversation.max_tokens == CONTEXT
    scores = score(reward, PROMPT, ["a" * 1000, "a" * 1000 + "b"])
    assert scores.computed_tokens == 2 * CONTEXT
    assert scores.values[0] != scores.values[1]


def test_a_prompt_over_the_models_limit_is_refused(llama: Path) -> None:
    """Guards against scores of responses to a prompt that the model never saw."""
    reward = load_classifier(options(llama))
    with pytest.raises(InvalidRequest) as failure:
        score(reward, Prompt.from_user("a" * 1000), ["x"])
    assert [violation.field for violation in failure.value.violations] == ["prompt"]


def test_a_conversation_the_template_refuses_is_the_callers_mistake(llama: Path) -> None:
    """Guards against INTERNAL where a model knows no system turn."""
    reward = load_classifier(options(llama))
    prompt = Prompt(messages=(Message("system", "Be brief."), *PROMPT.messages))
    with pytest.raises(InvalidRequest, match="no system turns") as failure:
        score(reward, prompt, ["x"])
    assert [violation.field for violation in failure.value.violations] == ["prompt.messages"]


def test_more_than_one_label_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_config("llama", None, num_labels=2), make_tokenizer(None))
    with pytest.raises(ValueError, match="has 2 labels, label_weights has 1"):
        load_classifier(options(tmp_path))


def test_a_language_model_without_a_reward_head_is_refused(tmp_path: Path) -> None:
    """Guards against random scores: transformers makes up a missing head and only warns."""
    LlamaForCausalLM(make_config("llama", None)).save_pretrained(tmp_path)
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a trained .* lacks score\.weight"):
        load_classifier(options(tmp_path))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    """Guards against a template of our own making, which the model was not trained on."""
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = None
    save(tmp_path, make_config("llama", None), tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        load_classifier(options(tmp_path))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """Guards against the last token's score from a model that was trained on the first's."""
    config = BertConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    save(tmp_path, config, make_tokenizer(PAD))
    with pytest.raises(ValueError, match=r"not a trained .* lacks score\.weight"):
        load_classifier(options(tmp_path))


@pytest.mark.parametrize(
    "transform",
    [Transform("sigmoid"), Transform("sigmoid", 4.0, -2.0), Transform(scale=0.5, offset=3)],
)
def test_a_declared_transform_is_what_is_done_to_the_logit(
    llama: Path, transform: Transform
) -> None:
    """Guards regression heads, whose cards say what their logits mean."""
    logits = torch.tensor(references(llama, TEXTS))
    function = torch.sigmoid if transform.kind == "sigmoid" else torch.clone
    expected = (transform.scale * function(logits) + transform.offset).tolist()
    reward = load_classifier(options(llama), transform=transform)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)
    assert reward.fingerprint != load_classifier(options(llama)).fingerprint


def test_a_sigmoid_of_any_logit_is_a_number() -> None:
    assert Transform("sigmoid")(1e30) == 1
    assert Transform("sigmoid")(-1e30) == 0


def test_several_labels_are_summed_as_declared(tmp_path: Path) -> None:
    """Guards multi-attribute regression models (HelpSteer's): one number out of several."""
    save(tmp_path, make_config("llama", None, num_labels=3), make_tokenizer(None))
    weights = (0.5, -1.0, 2.0)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    model.config.pad_token_id = None
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(rendered(tokenizer, PROMPT, text), add_special_tokens=False)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        expected.append(float(logits @ torch.tensor(weights)))
    reward = load_classifier(options(tmp_path), label_weights=weights)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)


def by_the_card(directory: Path, strip: Any) -> list[float]:
    """As the cards of Skywork-Reward, FsfairX and RM-Mistral score: the template's BOS is taken
    away, and the tokeniser writes one of its own."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    model.config.pad_token_id = None
    scores = []
    for text in TEXTS:
        ids = tokenizer(strip(rendered(tokenizer, PROMPT, text)), return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            scores.append(model(input_ids=ids).logits[0, 0].item())
    return scores


@pytest.mark.parametrize(
    "strip",
    [lambda text: text.removeprefix(BOS), lambda text: text.replace(BOS, "")],
    ids=["Skywork-Reward", "FsfairX, RM-Mistral"],
)
@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])
def test_special_tokens_by_the_tokenizer_are_the_cards(
    tmp_path: Path, family: str, writes_bos: bool, strip: Any
) -> None:
    """Guards against two BOS tokens, and none: both shift every score, and nothing else tells."""
    tokenizer = make_tokenizer(None)
    if not writes_bos:
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    save(tmp_path, make_config(family, None), tokenizer)
    reward = load_classifier(options(tmp_path, format=Format(special_tokens="tokenizer")))
    expected = by_the_card(tmp_path, strip)
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)
    by_template = load_classifier(options(tmp_path))
    same = by_template.conversation.encode([BOS + "a"]) == reward.conversation.encode([BOS + "a"])
    assert same
    if not writes_bos:
        assert score(by_template, PROMPT, TEXTS).values != pytest.approx(expected, abs=1e-3)


def test_a_plain_format_takes_the_templates_place(llama: Path, tmp_path: Path) -> None:
    """Guards models without a chat template, and braces in what users write."""
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = None
    save(tmp_path, make_config("llama", None), tokenizer)
    plain = Format(plain="Q: {prompt} A: {response}.")
    reward = load_classifier(options(tmp_path, format=plain))
    assert reward.conversation.render(Prompt(text="{response}?"), ["{prompt}!"]) == [
        "Q: {response}? A: {prompt}!."
    ]
    same = load_classifier(options(llama, format=plain))
    assert score(reward, PROMPT, TEXTS) == score(same, PROMPT, TEXTS)


def test_an_adapters_weights_are_added(llama: Path, tmp_path: Path) -> None:
    """Guards against an adapter that is loaded and left out, or scaled wrongly."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base: Any = AutoModelForSequenceClassification.from_pretrained(llama)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base.model, config).save_pretrained(str(tmp_path))
    reward = load_classifier(options(llama), adapter=tmp_path)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(llama).eval()
    adapted = PeftModel.from_pretrained(plain.model, str(tmp_path)).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(llama)
    weight = load_file(llama / "model.safetensors")["score.weight"]
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(rendered(tokenizer, PROMPT, text), add_special_tokens=False)
        with torch.inference_mode():
            states = adapted(input_ids=torch.tensor([ids])).last_hidden_state
        expected.append(float(states[0, -1] @ weight[0]))
    assert score(reward, PROMPT, TEXTS).values == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(references(llama, TEXTS), abs=1e-2)
    wrong: Any = AutoModelForSequenceClassification.from_pretrained(llama)
    get_peft_model(wrong, config).save_pretrained(str(tmp_path / "wrong"))
    with pytest.raises(ValueError, match="another kind of model"):
        load_classifier(options(llama), adapter=tmp_path / "wrong")
    with pytest.raises(ValueError, match="holds no adapter"):
        load_classifier(options(llama), adapter=llama)
