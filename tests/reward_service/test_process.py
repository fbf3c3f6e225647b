"""Process rewards on tiny random weights: token classifiers, two layers, good and bad words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaModel,
)

from reward_service.causal_reward import CausalReward
from reward_service.conversation import Format
from reward_service.process import Steps, load_process
from reward_service.reward import score, score_batch
from specrej.contracts import Candidate, FinishReason
from tests.reward_service.tiny import (
    PROMPT,
    make_config,
    make_tokenizer,
    options,
    rendered,
    save_language_model,
)

STEP = "@"  # a byte of its own
ANSWERS = ["Two plus two.\n\nIs four.", "No.", "", "One.\n\nTwo.\n\nThree.\n\n", "\n\n\n\nA."]
STEPPED = ["Two plus two.@Is four.@", "No.@", "", "One.@Two.@Three.@", "A.@"]
AGGREGATES: tuple[Literal["last", "min", "mean"], ...] = ("last", "min", "mean")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def aggregated(values: list[float], how: str) -> float:
    return {"last": values[-1], "min": min(values), "mean": sum(values) / len(values)}[how]


def step_values(directory: Path, text: str, probabilities: Any) -> list[float]:
    """At every step token of the response, or at the last token where there is none."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(rendered(tokenizer, PROMPT, text), add_special_tokens=False)
    step = tokenizer.encode(STEP, add_special_tokens=False)[0]
    with torch.inference_mode():
        values = probabilities(torch.tensor([ids]))
    places = [i for i, token in enumerate(ids) if token == step] or [len(ids) - 1]
    return [float(values[place]) for place in places]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token classifier of two labels."""
    directory = tmp_path_factory.mktemp("labels")
    torch.manual_seed(0)
    config = make_config("qwen2", None, num_labels=2)
    AutoModelForTokenClassification.from_config(config).save_pretrained(directory)
    make_tokenizer(None).save_pretrained(directory)
    return directory


def by_token_classifier(directory: Path) -> Any:
    model: Any = AutoModelForTokenClassification.from_pretrained(directory).eval()
    return lambda ids: model(input_ids=ids).logits[0].softmax(dim=-1)[:, 1]


@pytest.mark.parametrize("how", AGGREGATES)
def test_steps_are_scored_by_a_token_classifier(
    labels: Path, how: Literal["last", "min", "mean"]
) -> None:
    """Guards the label's index, the places that are read, and what becomes of several."""
    reward = load_process(options(labels), steps=Steps(token=STEP, aggregate=how))
    probabilities = by_token_classifier(labels)
    expected = [aggregated(step_values(labels, text, probabilities), how) for text in STEPPED]
    assert score(reward, PROMPT, ANSWERS).values == pytest.approx(expected, abs=1e-4)


def test_steps_are_scored_by_two_layers(tmp_path: Path) -> None:
    """Guards heads of the Qwen2.5-Math-PRM kind."""
    torch.manual_seed(0)
    LlamaModel(make_config("llama", None)).save_pretrained(tmp_path)
    make_tokenizer(None).save_pretrained(tmp_path)
    weights = {f"model.{k}": v for k, v in load_file(tmp_path / "model.safetensors").items()}
    first, bias = torch.randn(32, 32), torch.randn(32)
    second, other = torch.randn(2, 32), torch.randn(2)
    weights |= {"score.0.weight": first, "score.0.bias": bias}
    weights |= {"score.2.weight": second, "score.2.bias": other}
    model: Any = LlamaModel.from_pretrained(tmp_path).eval()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    reward = load_process(options(tmp_path), steps=Steps(token=STEP))

    def probabilities(ids: torch.Tensor) -> torch.Tensor:
        states = model(input_ids=ids).last_hidden_state[0]
        return (torch.relu(states @ first.T + bias) @ second.T + other).softmax(dim=-1)[:, 1]

    expected = [min(step_values(tmp_path, text, probabilities)) for text in STEPPED]
    assert score(reward, PROMPT, ANSWERS).values == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma"])
def test_steps_are_scored_by_good_and_bad_words(tmp_path: Path, family: str) -> None:
    """Guards the Math-Shepherd kind: question and answer in plain text, + against -."""
    save_language_model(tmp_path, make_config(family, None), make_tokenizer(None))
    steps = Steps(separator="\n\n", token=STEP, good="+", bad="-")
    plain = Format(special_tokens="tokenizer", plain="{prompt} {response}")
    reward = load_process(options(tmp_path, format=plain), steps=steps)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in "+-"]
    step = tokenizer.encode(STEP, add_special_tokens=False)[0]
    expected = []
    for text in STEPPED:
        ids = tokenizer(f"{PROMPT.messages[0].content} {text}", return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            values = model(input_ids=ids).logits[0][:, words].softmax(dim=-1)[:, 0]
        places = (ids[0] == step).nonzero()[:, 0].tolist() or [-1]
        expected.append(min(float(values[place]) for place in places))
    assert score(reward, PROMPT, ANSWERS).values == pytest.approx(expected, abs=1e-4)


def test_an_open_text_is_judged_by_the_steps_that_have_ended(labels: Path) -> None:
    """Guards prefixes: half a step says nothing, unless it is all there is; and costs nothing."""
    reward = load_process(options(labels, unfinished="open"), steps=Steps(token=STEP))
    probabilities = by_token_classifier(labels)
    session = reward.open(PROMPT)
    shown = {
        "Two pl": "Two pl@",
        "Two plus two.\n\nIs": "Two plus two.@",
        "Two plus two.\n\nIs four": "Two plus two.@",
        "Two plus two.\n\nIs four.\n\n": "Two plus two.@Is four.@",
    }
    computed = []
    for text, seen in shown.items():
        found = score_batch(session, reward, [Candidate(0, text, 0, 0.0)])
        expected = min(step_values(labels, seen, probabilities))
        assert found.values == pytest.approx((expected,), abs=1e-4)
        reward.scorer.check_integrity()
        computed.append(found.computed_tokens)
    assert computed[2] == 0
    whole = Candidate(0, "Two plus two.\n\nIs four", 0, 0.0, FinishReason.STOP)
    expected = min(step_values(labels, "Two plus two.@Is four@", probabilities))
    assert score_batch(session, reward, [whole]).values == pytest.approx((expected,), abs=1e-4)


def test_growing_texts_score_as_from_scratch(labels: Path) -> None:
    """Guards the values of steps that are known: of a prefix, in order, not twice."""
    reward = load_process(options(labels), steps=Steps(token=STEP, aggregate="mean"))
    session = reward.open(PROMPT)
    text = ""
    for part in ("On", "e.\n\nTwo", ".\n\nThr", "ee.\n\n", "Four"):
        text += part
        growing = score_batch(session, reward, [Candidate(0, text, 0, 0.0)]).values
        assert growing == pytest.approx(score(reward, PROMPT, [text]).values, abs=1e-4)
        reward.scorer.check_integrity()


def test_the_step_token_is_found_whatever_the_tokenizer_merges(
    labels: Path, tmp_path: Path
) -> None:
    """Guards steps that end where real tokenisers merge: ".@" is one token here, as ".\\n\\n" is
    elsewhere. In whole texts the step token is then not to be found, which is told at load."""
    for path in labels.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[".@"] = vocabulary.pop("Ġ")  # in place of one that is not needed
    tokenizer["model"]["merges"] = [[".", "@"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    reward = load_process(options(tmp_path), steps=Steps(token=STEP))
    turns = reward.conversation.turns(PROMPT)
    text = reward.reading.prepare("One.\n\nTwo.\n\n", True)
    (tokens,) = turns.tokenize([text], [True])
    assert len(reward.reading.marks(tokens)) == 2
    with pytest.raises(ValueError, match="not found in whole texts"):
        load_process(options(tmp_path), steps=Steps(token=STEP, text=STEP))
    whole = load_process(options(labels), steps=Steps(token=STEP, text=STEP))
    spliced = load_process(options(labels), steps=Steps(token=STEP))
    assert score(whole, PROMPT, ANSWERS).values == pytest.approx(
        score(spliced, PROMPT, ANSWERS).values, abs=1e-5
    )


def refused(directory: Path, steps: Steps) -> CausalReward:
    return load_process(options(directory), steps=steps)


def test_what_cannot_be_is_refused(labels: Path, tmp_path: Path) -> None:
    """Guards against steps that are never found, and labels that are not there."""
    with pytest.raises(ValueError, match="the step token '@@' must be one token, is 2"):
        refused(labels, Steps(token="@@"))
    with pytest.raises(ValueError, match="has 2 labels, none is 2"):
        refused(labels, Steps(token=STEP, good_label=2))
    save_language_model(tmp_path, make_config("llama", None), make_tokenizer(None))
    with pytest.raises(ValueError, match=r"lacks the weights score\."):
        refused(tmp_path, Steps(token=STEP))
