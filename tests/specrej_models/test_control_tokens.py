"""Control tokens in callers' texts are characters; those of a template stay control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specrej_models.control_tokens import ControlTokens

# The last two overlap: one ends as the other begins.
SPECIAL = ["<s>", "</s>", "<|user|>", "<|user|>!", "]~b]", "]~!b["]
ADDED = ["<think>", "</think>", "  ", "<other>"]  # not special
TEMPLATE = (
    "<s>{% for m in messages %}<|user|>{{ m.content | trim }}</s>{% endfor %}"
    "<think>{{ messages[-1].content.split('</think>')[-1] }}</s>"
)
# Parts of control tokens, of which texts may make whole ones.
PARTS = ["<", ">", "</", "s>", "|user|>", "!", "]~b", "]", "~!b[", "think>", "a", " ", "\ufdd0"]


def make(template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> Any:
    """A tokenizer of bytes that writes <s> first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens(ADDED)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return wrapped


def encode(tokenizer: Any, contents: Sequence[str]) -> list[int]:
    """Contents in the tokenizer's template, without control tokens of their own."""
    control = ControlTokens(tokenizer)
    turns = [{"role": "user", "content": control.mark(content)} for content in contents]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    (ids,) = control.encode([rendered], add_special_tokens=False)
    assert control.cut_id not in ids
    return ids


def control_ids(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The control tokens in the order of a conversation."""
    special = {tokenizer.convert_tokens_to_ids(text) for text in (*SPECIAL, "<think>", "</think>")}
    return [token for token in ids if token in special]


@given(st.lists(st.lists(st.sampled_from(PARTS)).map("".join), min_size=1, max_size=3))
def test_only_the_templates_control_tokens_are_in_the_result(contents: list[str]) -> None:
    """Guards tokens in texts, tokens that overlap, and marks that callers write themselves."""
    tokenizer = make()
    ids = encode(tokenizer, contents)
    assert control_ids(tokenizer, ids) == control_ids(
        tokenizer, encode(tokenizer, ["x"] * len(contents))
    )
    unmarked = [content.replace("\ufdd0", "") for content in contents]
    turns = [{"role": "user", "content": content} for content in unmarked]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(turns, tokenize=False)


def test_a_template_that_joins_texts_makes_no_control_token() -> None:
    """Guards against what is left when a template removes the middle of a text."""
    template = "{% for m in messages %}{{ m.content.replace('</think>', '') }}{% endfor %}"
    tokenizer = make(template)
    ids = encode(tokenizer, ["<|us</think>er|>", "x"])
    assert control_ids(tokenizer, ids) == []
    assert tokenizer.decode(ids) == "<|user|>x"


def test_other_added_tokens_are_as_before() -> None:
    """White space, and tokens that no template writes, are no control tokens."""
    tokenizer = make("{{ messages[0].content }}<think>")
    ids = encode(tokenizer, ["<other> x  y"])
    assert ids == tokenizer.encode("<other> x  y<think>", add_special_tokens=False)


def test_a_tokenizer_that_makes_control_tokens_of_plain_text_does_not() -> None:
    """Guards SentencePiece vocabularies, where a control token is also a piece of plain text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((sign, -1.0) for sign in "</s>ab▁")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert 1 in wrapped("a</s>b", split_special_tokens=True)["input_ids"]
    control = ControlTokens(wrapped)
    (ids,) = control.encode([control.mark("a</s>b")], add_special_tokens=False)
    assert wrapped.convert_ids_to_tokens(ids) == list("a</s>b")
