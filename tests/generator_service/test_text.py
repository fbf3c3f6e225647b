"""Prompts to ids and back on the embedded model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from generator_service.text import Text
from specrej.contracts import Message, Prompt
from specrej.errors import InvalidRequest

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.load(DIRECTORY, frozenset({END}))


def ids_of(text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(DIRECTORY)(text)["input_ids"])


def test_messages_go_through_the_chat_template_once(text: Text) -> None:
    """Doubled special tokens are the most common template bug."""
    prompt = Prompt(messages=(Message("system", "Be brief."), Message("user", "Hi!")))
    rendered = AutoTokenizer.from_pretrained(DIRECTORY).decode(text.encode(prompt))
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    assert rendered == expected + "<|im_start|>assistant\n"


def test_raw_text_is_taken_as_it_is(text: Text) -> None:
    assert text.encode(Prompt(text="Once upon")) == ids_of("Once upon")


def test_messages_need_a_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequest, match=r"prompt\.messages"):
        Text(tokenizer, frozenset()).encode(Prompt.from_user("Hi"))


@pytest.mark.parametrize(
    "whole", ["naïve café", "東京 👩‍👩‍👧‍👦!", "a  b\n\n c", "null\x00byte", "עברית"]
)
def test_every_prefix_decodes_to_a_prefix(text: Text, whole: str) -> None:
    """A torn character must not reach a reward model or a client as a replacement mark."""
    token_ids = ids_of(whole)
    for end in range(len(token_ids) + 1):
        assert whole.startswith(text.decode(token_ids[:end]))
    assert text.decode(token_ids) == whole


def test_the_end_token_is_no_text(text: Text) -> None:
    assert text.decode([*ids_of("done"), END]) == "done"


@pytest.mark.parametrize("stop", ["\n\n", "END", "stop here now", "é!", "x"])
def test_a_stop_text_is_found_with_the_token_that_completes_it(text: Text, stop: str) -> None:
    """Stop texts lie across token borders; found late, the answer would run on unseen."""
    token_ids = ids_of(f"some words before {stop} and some after")
    has_stopped = text.stops([stop])
    assert has_stopped
    first = next(end for end in range(len(token_ids) + 1) if has_stopped(token_ids[:end]))
    assert stop in text.decode(token_ids[:first])
    assert stop not in text.decode(token_ids[: first - 1])
    assert text.answer(token_ids[:first], ["never", stop]) == "some words before "


def test_no_stop_texts_no_check(text: Text) -> None:
    assert text.stops([]) is None


def test_a_stop_text_before_min_tokens_neither_ends_nor_cuts(text: Text) -> None:
    """Guards against an answer cut at a stop text that was not allowed to end it."""
    token_ids = ids_of("one. two. three. four.")
    checks = text.stops(["."])
    assert checks
    completed = [number for number in range(1, len(token_ids) + 1) if checks(token_ids[:number])]
    assert len(completed) == 4
    assert text.answer(token_ids, ["."]) == "one"
    assert text.answer(token_ids, ["."], min_tokens=completed[0]) == "one"
    assert text.answer(token_ids, ["."], min_tokens=completed[0] + 1) == "one. two"
    assert text.answer(token_ids, ["."], min_tokens=completed[2]) == "one. two. three"
    assert text.answer(token_ids, ["!"], min_tokens=3) == "one. two. three. four."
