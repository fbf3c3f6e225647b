"""Prompts to token ids and token ids to text: the only file that knows the tokenizer.

Candidates are decoded whole, never delta by delta, so that no character is torn at a border.
Calls take milliseconds: never on an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specrej.contracts import Prompt
from specrej.errors import InvalidRequest, Violation

# What a tokenizer decodes the first bytes of a torn character to.
_TORN = "\ufffd"


class Text:
    """A model's tokenizer and chat template; `end_ids` are tokens that are no text."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids

    @classmethod
    def load(cls, directory: Path, end_ids: frozenset[int]) -> Text:
        return cls(AutoTokenizer.from_pretrained(directory, local_files_only=True), end_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids: raw text as it is, messages through the chat template up to the answer.

        Raises:
            InvalidRequest: messages for a model without a chat template.
        """
        if prompt.text:
            return list(self._tokenizer(prompt.text)["input_ids"])
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                [Violation("prompt.messages", "the model has no chat template: use prompt.text")]
            )
        turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
        rendered = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        # The template has written the special tokens already.
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones and a torn last character left out."""
        if token_ids and token_ids[-1] in self._end_ids:
            token_ids = token_ids[:-1]
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.rstrip(_TORN)

    def answer(self, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> str:
        """Text up to the first stop text that token number `min_tokens` or a later one ends."""
        text = self.decode(token_ids)
        if not stop:
            return text
        ends = _found(text, self.decode(token_ids[: max(0, min_tokens - 1)]), stop)
        return text[: min(ends)] if ends else text

    def stops(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """A check whether a candidate's newest token has completed one of the stop texts.

        Only the tail is decoded: every token but those of a torn character holds a byte or more.
        """
        if not stop:
            return None
        tail = max(len(text.encode()) for text in stop) + 4

        def has_stopped(token_ids: Sequence[int]) -> bool:
            newest = token_ids[-tail:]
            return bool(_found(self.decode(newest), self.decode(newest[:-1]), stop))

        return has_stopped


def _found(text: str, before: str, stop: Sequence[str]) -> list[int]:
    """Where stop texts begin that end behind `before`, which `text` begins with."""
    starts = (text.find(ending, max(0, len(before) - len(ending) + 1)) for ending in stop)
    return [at for at in starts if at >= 0]
