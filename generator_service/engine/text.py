"""Prompts to token ids and token ids to text: the only file that uses the tokenizer.

No character is cut at a token's border: `Text` decodes candidates whole, which takes milliseconds,
too long for an event loop; `StopTexts` decodes the newest tokens again with each new one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from generator_service.engine.commands import CompletesStop
from generator_service.engine.grammar import Grammars, TokenizerSpec
from specrej.contracts import Message, Prompt
from specrej.contracts.errors import InvalidRequest, Violation
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import ChatTemplate, Examined

# A tokenizer decodes an incomplete character to this.
_INCOMPLETE = "\ufffd"
# How byte-level vocabularies write bytes, and others spaces and bytes.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
_SPACE = "\u2581"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# `StopTexts` keeps its newest tokens and decodes them with each new one. When it has _FEW_TOKENS,
# it drops those whose text is complete. When it has _MOST_TOKENS, their text counts as complete: no
# character takes so many.
_FEW_TOKENS, _MOST_TOKENS = 6, 24


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
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._added_ids = frozenset(token_id for token_id, _ in added)
        # The steps from tokens to text, as JSON.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._decoder = decoder.__getstate__().decode() if decoder else ""
        # SentencePiece's decoders drop the first space of a text. So a space is put before the
        # answer, to be dropped instead of the answer's own.
        space: Any = tokenizer.convert_tokens_to_ids(_SPACE) if _SPACE in self._decoder else None
        is_dropped = space is not None and self._decoded([space, space]) == " "
        self._before: list[int] = [space] if is_dropped else []

    @classmethod
    def of(cls, examined: Examined) -> Text:
        """The text of a model that was examined."""
        vocabulary = examined.probe.vocabulary
        return cls(examined.tokenizer, examined.end_ids, examined.template, vocabulary)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids: of raw text, or of messages in the chat template up to the answer.

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
            return ids
        if not self._template:
            raise InvalidRequest(
                [Violation("prompt.messages", "the model has no chat template: use prompt.text")]
            )
        turns = [Message(turn.role, as_text(turn.content)) for turn in prompt.messages]
        (rendered,) = self._template.write([turns], answers=True)
        # The template has written the special tokens already.
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (ids,) = self._control_tokens.encode([text], add_special_tokens=add_special_tokens)
        return ids

    def sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word as text, at the beginning of a text and after a space; as in vLLM."""
        bare = [self._control_tokens.mark(word.lstrip()) for word in words]
        spelled = [prefix + word for word in bare for prefix in ("", " ")]
        ids = self._control_tokens.encode(spelled, add_special_tokens=False) if words else []
        return tuple(dict.fromkeys(tuple(word) for word in ids if word))

    def token(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character. A control token is its
        name; an id without a token is empty."""
        piece: str = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self._added_ids:
            return piece.encode()
        if "ByteLevel" in self._decoder:
            return bytes(_BYTES[character] for character in piece)
        if "ByteFallback" in self._decoder and _BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:-1])
        if _SPACE in self._decoder:
            return piece.replace(_SPACE, " ").encode()
        return self._decoded([token_id], skip_special_tokens=False).encode()

    def grammars(self, vocabulary: int) -> Grammars:
        """A compiler of structured outputs, for a model of so many logits. Takes a second."""
        return Grammars(TokenizerSpec.of(self._tokenizer, vocabulary), self._end_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special ones and without an incomplete last character."""
        return self.decode_partly(token_ids).rstrip(_INCOMPLETE)

    def decode_partly(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special ones; an incomplete last character is U+FFFD."""
        if token_ids and token_ids[-1] in self._end_ids:
            token_ids = token_ids[:-1]
        torn = self._num_torn(token_ids) if "ByteFallback" in self._decoder else 0
        text = self._decoded([*self._before, *token_ids[: len(token_ids) - torn]])
        return text + _INCOMPLETE if torn else text

    def _num_torn(self, token_ids: Sequence[int]) -> int:
        """How many of the last tokens are bytes of an incomplete character.

        The decoder decodes a run of byte tokens as a whole: an incomplete one would garble all.
        """
        for count, token_id in enumerate(reversed(token_ids[-3:]), 1):
            match = _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "")
            byte = int(match[0][3:-1], 16) if match else 0
            if byte >= 0xC0:  # the first one
                return count if count < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
            if byte < 0x80:
                return 0
        return 0

    def _decoded(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def answer(self, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> str:
        """Text up to the first stop text completed by token number `min_tokens` or a later one."""
        text = self.decode(token_ids)
        if not stop:
            return text
        ends = _starts(text, len(self.decode(token_ids[: max(0, min_tokens - 1)])), stop)
        return text[: min(ends)] if ends else text

    def stop_texts(self, stop: Sequence[str]) -> Callable[[], CompletesStop] | None:
        """A factory of one candidate's `StopTexts`; None without stop texts."""
        return (lambda: StopTexts(self, stop)) if stop else None


class StopTexts:
    """The stop texts of one candidate: its tokens go in once, one at a time.

    A token costs the decoding of a few tokens and the comparison of its own characters, however
    long the stop texts and the candidate are.
    """

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self._text = text
        self._stop = stop
        self._overlap = max(map(len, stop)) - 1
        self._tokens: list[int] = []  # the newest; the first begins with a character
        self._border = 0  # so many of them had a complete text of their own
        self._num_seen = 0  # characters of their text
        self._seen = ""  # the end of the text so far, of `_overlap` characters

    def copy(self) -> StopTexts:
        """As `CompletesStop.copy`."""
        other = copy(self)
        other._tokens = list(self._tokens)
        return other

    def __call__(self, token_id: int) -> bool:
        """As `CompletesStop.__call__`."""
        if token_id in self._text.special_ids:
            return False
        self._tokens.append(token_id)
        text = self._text.decode_partly(self._tokens)
        complete = text.rstrip(_INCOMPLETE)
        new, self._num_seen = complete[self._num_seen :], max(self._num_seen, len(complete))
        if len(complete) == len(text) or len(self._tokens) >= _MOST_TOKENS:
            self._drop_complete()
        if not new:
            return False
        seen = len(self._seen)
        text = self._seen + new
        self._seen = text[max(0, len(text) - self._overlap) :]
        return bool(_starts(text, seen, self._stop))

    def _drop_complete(self) -> None:
        """Drop tokens before the last border, at times: it costs a decoding."""
        if len(self._tokens) >= _FEW_TOKENS:
            del self._tokens[: self._border]
            self._num_seen = len(self._text.decode(self._tokens))
        self._border = len(self._tokens)


def _starts(text: str, seen: int, stop: Sequence[str]) -> list[int]:
    """Where in `text` the stop texts begin that end after its first `seen` characters."""
    starts = (text.find(ending, max(0, seen - len(ending) + 1)) for ending in stop)
    return [at for at in starts if at >= 0]
