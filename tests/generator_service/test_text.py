"""Prompts to ids and back, and stop texts, on the embedded model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from generator_service.engine.text import Text, TokenDecoder
from generator_service.stock.api import part_of, with_hidden
from specrej.contracts import FinishReason, Message, Prompt, Sampling
from specrej.contracts.errors import InvalidRequest
from specrej_models.probe import ChatTemplate, examine
from tests.reward_service.tiny import make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")
END = 2  # <|im_end|>
EACH = "{% for m in messages %}"
REFUSES_SYSTEM = EACH + "{% if m.role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
REFUSES_SYSTEM += "{{ m.content }}{% endfor %}"
SKIPS_SYSTEM = EACH + "{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORY)


@cache
def cached_text() -> Text:
    return Text.of(examine(DIRECTORY))


@pytest.fixture
def text() -> Text:
    return cached_text()


ANY_TEXT = st.characters(exclude_categories=["Cs"])  # hypothesis computes codecs for seconds


@given(st.text(ANY_TEXT, max_size=40), st.integers(1, 20))
@example(" ", 200)
def test_no_prompt_has_more_bytes_than_its_tokens_can_stand_for(part: str, times: int) -> None:
    """Guards prompts that fit against a refusal by their bytes."""
    prompt = part * times
    assume(prompt)
    ids = cached_text().encode(Prompt(text=prompt))
    assert len(prompt.encode()) <= len(ids) * cached_text().longest_token()


def test_tokenizers_that_drop_bytes_have_no_longest_token() -> None:
    for changed, longest in (("Lowercase", 0), ("NFC", 3 * len("longest"))):
        backend = Tokenizer(BPE({sign: i for i, sign in enumerate([*"longest", "longest"])}, []))
        backend.decoder = decoders.ByteLevel()
        backend.normalizer = getattr(normalizers, changed)()
        text = Text(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
        assert text.longest_token() == longest


def whole_tokens(text: str) -> list[int]:
    """As the tokenizer cuts it."""
    return list(tokenizer()(text)["input_ids"])


def torn_tokens(text: str) -> list[int]:
    """One token per byte where there is one: as no tokenizer cuts it, but a model may."""
    vocabulary = tokenizer().get_vocab()
    ids: list[int] = []
    for character in text:
        pieces = "".join(tokenizer().tokenize(character))  # one sign of the vocabulary per byte
        ids += (
            [vocabulary[sign] for sign in pieces]
            if all(sign in vocabulary for sign in pieces)
            else whole_tokens(character)
        )
    assert tokenizer().decode(ids) == text
    return ids


def test_messages_go_through_the_chat_template_once(text: Text) -> None:
    """Guards against doubled special tokens, and against those that a caller writes."""
    ids = text.encode(Prompt(messages=(Message("system", "Be brief."), Message("user", "Hi!"))))
    written = Prompt(messages=(Message("system", "<|im_end|>"), Message("user", "<|im_start|>")))
    special = tokenizer().added_tokens_decoder
    assert [i for i in text.encode(written) if i in special] == [i for i in ids if i in special]
    rendered = tokenizer().decode(ids)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    assert rendered == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize("beginning", ["Sure: ", "<|im_end|>", ""])
def test_an_answer_is_continued_where_its_beginning_ends(text: Text, beginning: str) -> None:
    """Guards against a new turn after the beginning, and one that ends by a control token."""
    asked = (Message("user", "Hi!"),)
    begun = Prompt((*asked, Message("assistant", beginning)), continue_final=True)
    rendered = tokenizer().decode(text.encode(Prompt(asked))) + beginning
    assert tokenizer().decode(text.encode(begun)).rstrip() == rendered.rstrip()
    special = tokenizer().added_tokens_decoder
    count = [sum(i in special for i in text.encode(p)) for p in (begun, Prompt(asked))]
    assert count[0] == count[1]


# Two noncharacters are marks, which are removed from callers' texts.
UNMARKED = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1"))


@given(st.lists(UNMARKED, min_size=1, max_size=3))
def test_other_messages_have_the_tokens_of_the_tokenizer(contents: list[str]) -> None:
    """Guards merges at the borders between the template and the messages."""
    turns = [{"role": "user", "content": content} for content in contents]
    rendered = tokenizer().apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    messages = tuple(Message("user", content) for content in contents)
    ids = cached_text().encode(Prompt(messages=messages))
    assert ids == tokenizer()(rendered, add_special_tokens=False)["input_ids"]


def test_control_tokens_in_raw_text_are_text_unless_allowed(text: Text) -> None:
    raw = "<|im_start|>user\nHi<|im_end|>"
    as_text = text.encode(Prompt(text=raw))
    assert tokenizer().decode(as_text) == raw
    assert as_text == tokenizer()(raw, split_special_tokens=True)["input_ids"]
    assert text.encode(Prompt(text=raw, allow_special_tokens=True)) == whole_tokens(raw)
    assert whole_tokens(raw)[0] == 1


def decoded(text: Text, token_ids: Sequence[int]) -> str:
    """Of all tokens at once."""
    return TokenDecoder(text)(token_ids)


def completed_by(text: Text, token_ids: Sequence[int], stop: Sequence[str]) -> list[int]:
    """Numbers of the tokens, from 1, that complete a stop text.

    Before each token the candidate is forked, and its parent goes on with another token.
    """
    stop_texts = text.stop_texts(stop)
    assert stop_texts
    completes, numbers = stop_texts(), []
    for number, token_id in enumerate(token_ids, 1):
        parent, completes = completes, completes.copy()
        parent(token_ids[0])
        if completes(token_id):
            numbers.append(number)
    return numbers


def completed_of_whole(text: Text, token_ids: Sequence[int], stop: Sequence[str]) -> list[int]:
    """As `completed_by`, from the text of all tokens up to each one."""
    texts = [decoded(text, token_ids[:end]) for end in range(len(token_ids) + 1)]
    return [
        number
        for number in range(1, len(texts))
        for before, now in [(texts[number - 1], texts[number])]
        if any(ending in now[max(0, len(before) - len(ending) + 1) :] for ending in stop)
    ]


@cache
def byte_fallback_text() -> Text:
    """A tokenizer in SentencePiece's style, of letters and bytes; it strips a first space."""
    pieces = ["<unk>", "▁", *"abé", "▁a", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = BPE(
        {piece: i for i, piece in enumerate(pieces)},
        [("▁", "a"), ("a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    plain = Tokenizer(bpe)
    plain.pre_tokenizer = Metaspace(prepend_scheme="first")
    plain.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Text(PreTrainedTokenizerFast(tokenizer_object=plain), frozenset())


@given(st.text("ab é…家🙂", max_size=20))
def test_an_answer_keeps_its_first_space(answer: str) -> None:
    """Guards against "Paris is" + "the capital" without a space between."""
    text = byte_fallback_text()
    prompt = text.encode(Prompt(text="ab"))
    new = text.encode(Prompt(text=f"ab{answer}"))[len(prompt) :]
    assume([*prompt, *new] == text.encode(Prompt(text=f"ab{answer}")))
    assert decoded(text, new) == answer
    assert b"".join(map(text.token, new)).decode() == answer


# Bytes, as characters and as parts of characters, special tokens, and any others.
TOKENS = st.lists(
    st.sampled_from([*torn_tokens("a \n…家🙂"), 0, END, 17]) | st.integers(0, 49_151), max_size=60
)
SOME_STOPS = st.lists(st.text("ab \n…家🙂é", min_size=1, max_size=4), min_size=1, max_size=4)


@given(TOKENS, st.text("ab é…家🙂", max_size=60), SOME_STOPS)
def test_stop_texts_of_new_tokens_are_those_of_whole_texts(
    torn: list[int], answer: str, stop: list[str]
) -> None:
    """Also of forks, which copy the state of their parents. With byte fallback it guards spaces at
    the beginning of a decoded part, and runs of several characters' bytes."""
    text = byte_fallback_text()
    answer_ids = text.encode(Prompt(text=f"x{answer}"))
    for of_model, ids in ((cached_text(), torn), (text, answer_ids)):
        assert completed_by(of_model, ids, stop) == completed_of_whole(of_model, ids, stop)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1\ufffd")))
@example("naïve 東京 👩\u200d👧!\n\n c\x00")
@example("ab é…家🙂\n")
def test_any_first_tokens_are_the_whole_characters_of_their_bytes(answer: str) -> None:
    """Guards against replacement marks for characters of which some tokens are missing, signs of
    the vocabulary, such as \u0120 for a space, and characters that an incomplete one hides."""
    for text, before in ((cached_text(), "x"), (byte_fallback_text(), "a")):
        ids = text.encode(Prompt(text=before + answer))
        assume(decoded(text, ids).lstrip() == before + answer)  # not all bytes have a token
        for size in range(1, len(ids) + 1):
            whole = b"".join(map(text.token, ids[:size])).decode(errors="ignore")
            assert decoded(text, ids[:size]) == whole


TAILS = [[], [128], [128, 128]]
SCRIPTS = "ab é…家東京مرحباشكرا👩\u200d👧🏽🙂n\u0303e\u0301\ufffd\n"


@given(TOKENS, st.text(SCRIPTS, max_size=30), st.lists(st.integers(1, 9), max_size=60))
@example([171, 102], "\ufffd\ufffd", [1])
def test_texts_of_parts_are_those_of_whole_decoding(
    any_tokens: list[int], answer: str, sizes: list[int]
) -> None:
    """Guards against characters cut at the border of two parts, texts that take back what was
    sent, and the loss of a replacement mark that the model has written."""
    bytewise = byte_fallback_text()
    spelled = bytewise, bytewise.encode(Prompt(text=f"a{answer}"))
    for text, ids in ((cached_text(), any_tokens), (cached_text(), torn_tokens(answer)), spelled):
        growing, sent, start = text.answers(Sampling())(), "", 0
        for size in [*sizes, len(ids)]:
            part, start = ids[start : start + size], start + size
            now = growing.copy().grown(part, None)
            assert now == growing.grown(part, None) and now.startswith(sent)
            sent = now
        assert sent == decoded(text, ids)
        if text is bytewise:
            assert sent == f" a{answer}" or "<unk>" in sent
        elif (whole := tokenizer().decode(ids, skip_special_tokens=True)) != sent:
            # Only bytes that others can make a character are held back.
            written = b"".join(text.token(i) for i in ids if i not in text.hidden_ids)
            tails = [bytes([first, *rest]) for first in (128, 144, 160) for rest in TAILS]
            completed = {(written + tail).decode(errors="replace") for tail in tails}
            assert whole == sent + "\ufffd"
            assert any(len(text) == len(whole) and text[-1] != "\ufffd" for text in completed)


def test_a_stop_text_before_min_tokens_neither_ends_nor_cuts(text: Text) -> None:
    """Guards against an answer cut at a stop text that was not allowed to end it."""
    token_ids = whole_tokens("one. two. three. four.")
    assert text.stop_texts([]) is None
    completed = completed_by(text, token_ids, ["."])
    assert len(completed) == 4

    def answer(stop: list[str], num_tokens: int) -> tuple[str, str]:
        growing = text.answers(Sampling(stop=tuple(stop), stop_token_ids=(17,)))()
        growing.grown(token_ids[:2], None)
        return growing.grown(token_ids[2:num_tokens], FinishReason.STOP), growing.stop_text

    assert answer(["."], completed[1]) == ("one. two", ".")
    assert answer(["."], completed[2]) == ("one. two. three", ".")
    assert answer(["!"], completed[3]) == ("one. two. three. four.", "")
    (number,) = completed_by(text, token_ids, ["hree. f", "two. three. f"])
    assert answer(["hree. f", "two. three. f"], number) == ("one. ", "two. three. f")
    whole = text.answers(Sampling())()
    assert whole.grown([*token_ids, END], FinishReason.STOP) == "one. two. three. four."


@pytest.mark.parametrize(
    ("template", "system", "reason"),
    [
        (None, "", r"prompt\.messages: .*has no chat template"),
        (REFUSES_SYSTEM, "Be brief.", r"prompt\.messages\[0\]\.role: .*refuses them: No system"),
        (SKIPS_SYSTEM, "Be brief.", r"prompt\.messages\[0\]\.role: .*leaves out a system turn"),
        (
            "{{ messages[0].content + 1 if 'Hi' in messages[0].content else messages[0].content }}",
            "",
            r"prompt\.messages: .*refuses them: TypeError: can only concatenate",
        ),
    ],
)
def test_a_conversation_that_no_template_takes(
    template: str | None, system: str, reason: str
) -> None:
    """Guards against INTERNAL for a caller's mistake, as a system turn for Gemma 2, and against
    turns that are dropped."""
    other = copy(tokenizer())
    other.chat_template = template
    written = ChatTemplate(other, len(other)) if template else None
    turns = [Message("system", system)] if system else []
    with pytest.raises(InvalidRequest, match=reason):
        Text(other, frozenset({END}), written).encode(Prompt((*turns, Message("user", "Hi"))))


def test_tokens_that_a_stream_hides_are_found_by_their_character() -> None:
    """llama.cpp sends an emoji with the last of its tokens. Guards against candidates that go on
    without the others."""
    text, emoji = Text(make_tokenizer(None), frozenset()), "\N{GRINNING FACE}"
    entries = [(written, text.encode(Prompt(text=written))) for written in ("a", emoji, "b")]
    content = [
        {"id": ids[-1], "bytes": [*written.encode()], "logprob": -1.0} for written, ids in entries
    ]
    message = with_hidden({"choices": [{"logprobs": {"content": content}}]}, text.ending_with)
    part = part_of(message, 0, 0, has_ids=True)
    assert part.token_ids == text.encode(Prompt(text=f"a{emoji}b"))[1:]
    assert len(part.logprobs) == 6
    other = entries[0][1][0]
    assert text.ending_with(other, emoji.encode()) == [other]  # of another tokenizer
