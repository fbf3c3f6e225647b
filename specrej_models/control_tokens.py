"""Control tokens that callers write, which a tokenizer has to read as characters.

A chat template writes control tokens such as `<|im_start|>` as text, and a tokenizer finds them in
whatever text it gets. So callers' texts are marked before a template is applied; then the marked
control tokens are cut in two by a token of our own, which is removed from the result.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

# Noncharacters of Unicode, which are never part of a text that is exchanged.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"([{_BEGIN}{_END}])")


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and the added tokens that its chat
    template contains, but for white space, or that the model does not have."""

    def __init__(self, tokenizer: Any, vocabulary: int = sys.maxsize) -> None:
        """Adds a token to the tokenizer, `cut_id`, which is in no result; `vocabulary`: the number
        of tokens that the model has."""
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template)
        texts = [
            token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
            or token_id >= vocabulary
            or (token.content in template and not token.content.isspace())
        ]
        pattern = _pattern_of(text for text in texts if len(text) > 1) or "(?!)"
        self._any = re.compile(pattern)
        self._all = re.compile(f"(?=({pattern}))")  # those that overlap, too
        self._longest = max(map(len, texts), default=0)
        self._prefixes = {text[:at] for text in texts for at in range(1, len(text))}
        self._suffixes = {text[at:] for text in texts for at in range(1, len(text))}
        tokenizer.add_tokens([_BEGIN], special_tokens=True)
        self.cut_id: int = tokenizer.convert_tokens_to_ids(_BEGIN)

    def mark(self, text: str) -> str:
        """A caller's text for a template, with marks where each control token begins and ends, and
        around the text if it could make a control token with what the template writes there."""
        text = _MARKS.sub("", text)
        core = text.strip()  # as many templates do
        spans = [m.span(1) for m in self._all.finditer(text)] if self._any.search(text) else []
        if self._is_partial(core):
            begin = text.index(core)
            spans.append((begin, begin + len(core)))
        marks: dict[int, set[str]] = {}
        for begin, end in spans:
            marks.setdefault(begin, set()).add(_BEGIN)
            marks.setdefault(end, set()).add(_END)
        return _with(text, {at: "".join(kinds) for at, kinds in marks.items()})

    def cut(self, text: str) -> str:
        """A text that contains marked ones, for the tokenizer: the text of `cut_id` is in each
        control token that callers wrote, and nowhere else."""
        parts = _MARKS.split(text)  # with the marks at odd places
        if len(parts) == 1:
            return text
        marks = [*zip(accumulate(map(len, parts[:-1:2])), parts[1::2], strict=True)]
        places, pairs = {at for at, _ in marks}, {*marks}
        text = "".join(parts[::2])
        cuts = set()
        for match in self._all.finditer(text):
            begin, end = match.span(1)
            # A mark inside: the token joins a caller's text with the template's or another one.
            if inside := places.intersection(range(begin + 1, end)):
                cuts.add(min(inside))
            elif {(begin, _BEGIN), (end, _END)} <= pairs:
                cuts.add(begin + 1)
        return _with(text, dict.fromkeys(cuts, _BEGIN))

    def as_text(self, text: str) -> str:
        """A caller's text for the tokenizer, whose result contains `cut_id`."""
        return self.cut(self.mark(text))

    def last_in(self, text: str) -> tuple[int, str]:
        """Where the last control token of a text that contains marked ones begins, and itself; -1
        without one. Tokens that callers wrote do not count."""
        for match in reversed([*self._any.finditer(text)]):
            begin, end = match.span()
            if not (text[begin - 1 : begin] == _BEGIN and text[end : end + 1] == _END):
                return begin, match[0]
        return -1, ""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts that contain marked ones."""
        if not texts:
            return []
        cut = [self.cut(text) for text in texts]
        encoded: list[list[int]] = self._tokenizer(
            cut, add_special_tokens=add_special_tokens, padding=False, verbose=False
        )["input_ids"]
        return [
            [token for token in ids if token != self.cut_id] if _BEGIN in text else ids
            for text, ids in zip(cut, encoded, strict=True)
        ]

    def _is_partial(self, text: str) -> bool:
        """Whether a text begins with the end of a control token, or ends with its beginning."""
        sizes = range(1, self._longest)
        return any(text[:k] in self._suffixes or text[-k:] in self._prefixes for k in sizes)


def _with(text: str, inserts: Mapping[int, str]) -> str:
    """The text with these texts inserted before the characters of these indices."""
    places = [*sorted({0, *inserts}), len(text)]
    return "".join(inserts.get(begin, "") + text[begin:end] for begin, end in pairwise(places))


def _pattern_of(texts: Iterable[str]) -> str:
    """A regular expression of the longest of these texts; empty without any.

    A tree of their characters: vocabularies have thousands of control tokens, which must not be
    compared one by one at each character.
    """
    rests: dict[str, list[str]] = {}
    texts = [*texts]
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text[1:])
    branches = "|".join(re.escape(first) + _pattern_of(rests[first]) for first in sorted(rests))
    if "" in texts:
        return f"(?:{branches})?" if branches else ""
    return f"(?:{branches})" if len(rests) > 1 else branches
