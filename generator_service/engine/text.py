"""Prompts to token ids and token ids to text: the only file that uses the tokenizer.

A text is the bytes of its tokens, so each token is read once, however long the text is. No
character is cut at a token's border: its first bytes wait for the others.
"""

from __future__ import annotations

import re
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from generator_service.engine.commands import CompletesStop
from generator_service.engine.grammar import Grammars, TokenizerSpec
from specrej.answer_form import MARKS
from specrej.contracts import PLAIN, AnswerForm, FinishReason, Prompt, Sampling
from specrej.contracts.errors import InvalidRequest, Violation
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import ChatTemplate, Examined
from specrej_models.tools import marked

# How byte-level vocabularies write bytes, and others spaces and bytes.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = "\u2581"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Text:
    """A model's tokenizer and chat template; a last token of `end_ids` is left out of texts."""

    def __init__(
        self,
        tokenizer: Any,
        end_ids: frozenset[int],
        template: ChatTemplate | None = None,
        vocabulary: int = sys.maxsize,
    ) -> None:
        """`vocabulary`: the number of tokens that the model has."""
        self._tokenizer = tokenizer
        self._template = template
        self._vocabulary = vocabulary
        self._control_tokens = ControlTokens(tokenizer, vocabulary)
        self._end_ids = end_ids
        added = tokenizer.added_tokens_decoder.items()
        form = template.answer_form if template else PLAIN
        marks = {*MARKS, form.thinking_begin, form.thinking_end}
        # Tokens that mark parts of answers, by text: they are in texts, special or not.
        self.marks = {t.content: id_ for id_, t in added if t.content in marks and id_ < vocabulary}
        self._special_ids = frozenset(token_id for token_id, token in added if token.special)
        self.hidden_ids = self._special_ids - {*self.marks.values()}
        self._added_ids = frozenset(token_id for token_id, _ in added)
        # The steps from tokens to text, as JSON.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._decoder = decoder.__getstate__().decode() if decoder else ""
        self.token = cache(self._token)

    @classmethod
    def of(cls, examined: Examined) -> Text:
        """The text of a model that was examined."""
        return cls(examined.tokenizer, examined.end_ids, examined.template, examined.vocabulary)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of `read`."""
        return self.read(prompt)[0]

    def read(self, prompt: Prompt) -> tuple[list[int], AnswerForm]:
        """Token ids: of raw text, or of messages in the chat template up to the answer; and how the
        answer marks its parts, which that to raw text does not.

        Control tokens in either are text, unless the prompt allows them.

        Raises:
            InvalidRequest: messages for a model without a chat template, or that it refuses;
                control tokens that the model does not have.
        """
        as_text = self._control_tokens.mark
        if prompt.text:
            text = prompt.text if prompt.allow_special_tokens else as_text(prompt.text)
            ids = self._encode(text, add_special_tokens=True)
            if beyond := [token_id for token_id in ids if token_id >= self._vocabulary]:
                token = self._tokenizer.convert_ids_to_tokens(beyond[0])
                raise InvalidRequest([Violation("prompt.text", f"the model has no token {token}")])
            return ids, PLAIN
        if not self._template:
            raise InvalidRequest(
                [Violation("prompt.messages", "the model has no chat template: use prompt.text")]
            )
        rendered, form = self._template.write_prompt(marked(prompt, as_text))
        # The template has written the special tokens already.
        return self._encode(rendered, add_special_tokens=False), form

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (ids,) = self._control_tokens.encode([text], add_special_tokens=add_special_tokens)
        return ids

    def ending_with(self, token_id: int, written: bytes) -> list[int]:
        """The token ids of a character that a server wrote, of which it told the last one only: as
        the tokenizer has them. Only the last one, if that ends otherwise."""
        if written == self.token(token_id):
            return [token_id]
        ids = self._encode(written.decode("utf-8", "replace"), add_special_tokens=False)
        return ids if ids[-1:] == [token_id] else [token_id]

    def _token(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character. A control token is its
        name; an id without a token is empty."""
        piece: str = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self._special_ids:
            return piece.encode()
        if "ByteLevel" in self._decoder:
            is_text = token_id in self._added_ids or not _BYTES.keys() >= {*piece}
            return piece.encode() if is_text else bytes(_BYTES[sign] for sign in piece)
        if "ByteFallback" in self._decoder and _BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:-1])
        # Not decoded: SentencePiece's decoders drop the first space of a text.
        if _SPACE in self._decoder:
            return piece.replace(_SPACE, " ").encode()
        decoded: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return decoded.encode()

    def longest_token(self) -> int:
        """The most bytes of a prompt that one token stands for; 0: there is no limit, or it is not
        known, as a normalizer may drop bytes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        form = type(getattr(backend, "normalizer", None)).__name__
        added = self._tokenizer.added_tokens_decoder.values()
        if "ByteLevel" not in self._decoder or any(t.lstrip or t.rstrip for t in added):
            return 0
        longest = max(len(self.token(token_id)) for token_id in range(len(self._tokenizer)))
        # A composed character has a third of the bytes of its parts, or more.
        return longest * {"NoneType": 1, "NFC": 3}.get(form, 0)

    def grammars(self, vocabulary: int) -> Grammars:
        """A compiler of structured outputs, for a model of so many logits. Takes a second."""
        spec = TokenizerSpec.of(self._tokenizer, vocabulary, tuple(self.marks.values()))
        return Grammars(spec, self._end_ids)

    @property
    def tool_format(self) -> str:
        """How answers call tools; empty without a chat template."""
        return self._template.tool_format if self._template else ""

    @property
    def repeats_calls(self) -> bool:
        """Whether the chat template has several calls in a turn."""
        return bool(self._template and self._template.repeats_calls)

    def answers(self, sampling: Sampling) -> Callable[[], AnswerText]:
        """A factory of one candidate's `AnswerText`."""
        ends = self._end_ids.union(sampling.stop_token_ids)
        return lambda: AnswerText(TokenDecoder(self), ends, sampling.stop)

    def stop_texts(self, stop: Sequence[str]) -> Callable[[], CompletesStop] | None:
        """A factory of one candidate's `StopTexts`; None without stop texts."""
        return (lambda: StopTexts(TokenDecoder(self), stop)) if stop else None


class TokenDecoder:
    """The text of tokens, part by part: the bytes of an incomplete character wait for the others,
    and bytes that cannot belong to a character are U+FFFD."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text that the next tokens, without special ones, complete."""
        hidden_ids, token = self._text.hidden_ids, self._text.token
        return self._utf8.decode(b"".join(token(i) for i in token_ids if i not in hidden_ids))

    def copy(self) -> TokenDecoder:
        other = TokenDecoder(self._text)
        other._utf8.setstate(self._utf8.getstate())
        return other


class AnswerText:
    """The text of one candidate: its tokens go in once, as many as are new."""

    def __init__(self, decoder: TokenDecoder, ends: frozenset[int], stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._ends = ends
        self._stop = stop
        self._text = self.stop_text = ""

    def copy(self) -> AnswerText:
        other = AnswerText(self._decoder.copy(), self._ends, self._stop)
        other._text = self._text
        return other

    def grown(self, token_ids: Sequence[int], finish: FinishReason | None) -> str:
        self._text += self._decoder(token_ids[:-1])
        seen, last = len(self._text), token_ids[-1:]
        if finish and self._ends.issuperset(last):
            return self._text
        self._text += self._decoder(last)
        # The last token has completed the stop text: an earlier one would have been the last.
        ends = _ends(self._text, seen, self._stop) if finish is FinishReason.STOP else []
        if not ends:
            return self._text
        start, self.stop_text = min(ends)
        return self._text[:start]


class StopTexts:
    """The stop texts of one candidate: its tokens go in once, one at a time.

    A token costs the comparison of its own characters, however long the stop texts and the
    candidate are.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._overlap = max(map(len, stop)) - 1
        self._seen = ""  # the end of the text so far, of `_overlap` characters

    def copy(self) -> StopTexts:
        other = copy(self)
        other._decoder = self._decoder.copy()
        return other

    def __call__(self, token_id: int) -> bool:
        new = self._decoder([token_id])
        if not new:
            return False
        seen = len(self._seen)
        text = self._seen + new
        self._seen = text[max(0, len(text) - self._overlap) :]
        return bool(_ends(text, seen, self._stop))


def _ends(text: str, seen: int, stop: Sequence[str]) -> list[tuple[int, str]]:
    """The stop texts that end after the first `seen` characters of `text`, and where they begin."""
    starts = ((text.find(ending, max(0, seen - len(ending) + 1)), ending) for ending in stop)
    return [(at, ending) for at, ending in starts if at >= 0]
