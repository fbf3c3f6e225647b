"""Prompts to token ids and token ids to text: the only file that uses the tokenizer.

Candidates are decoded whole, never token by token, so that no character is cut at a border. Calls
take milliseconds: too long for an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specrej.contracts import Prompt
from specrej.errors import InvalidRequest, Violation
from specrej.inference.control_tokens import ControlTokens

# A tokenizer decodes an incomplete character to this.
_INCOMPLETE = "\ufffd"


class Text:
    """A model's tokenizer and chat template; a last token of `end_ids` is left out of texts."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._control_tokens = ControlTokens(tokenizer)
        self._end_ids = end_ids

    @classmethod
    def load(cls, directory: Path, end_ids: frozenset[int]) -> Text:
        return cls(AutoTokenizer.from_pretrained(directory, local_files_only=True), end_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids: of raw text, or of messages in the chat template up to the answer.

        Control tokens in either are text, unless the prompt allows them.

        Raises:
            InvalidRequest: messages for a model without a chat template.
        """
        as_text = self._control_tokens.mark
        if prompt.text:
            text = prompt.text if prompt.allow_special_tokens else as_text(prompt.text)
            return self._encode(text, add_special_tokens=True)
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                [Violation("prompt.messages", "the model has no chat template: use prompt.text")]
            )
        turns = [{"role": turn.role, "content": as_text(turn.content)} for turn in prompt.messages]
        rendered = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        # The template has written the special tokens already.
        return self._encode(rendered, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (ids,) = self._control_tokens.encode([text], add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special ones and without an incomplete last character."""
        if token_ids and token_ids[-1] in self._end_ids:
            token_ids = token_ids[:-1]
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text.rstrip(_INCOMPLETE)

    def answer(self, token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> str:
        """Text up to the first stop text completed by token number `min_tokens` or a later one."""
        text = self.decode(token_ids)
        if not stop:
            return text
        ends = _starts(text, self.decode(token_ids[: max(0, min_tokens - 1)]), stop)
        return text[: min(ends)] if ends else text

    def stops(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """A function that returns whether a candidate's newest token completes a stop text.

        It decodes the tail only: each token is a byte or more, but in an incomplete character.
        """
        if not stop:
            return None
        tail = max(len(text.encode()) for text in stop) + 4

        def has_stopped(token_ids: Sequence[int]) -> bool:
            newest = token_ids[-tail:]
            return bool(_starts(self.decode(newest), self.decode(newest[:-1]), stop))

        return has_stopped


def _starts(text: str, before: str, stop: Sequence[str]) -> list[int]:
    """Where in `text` the stop texts begin that end after its beginning `before`."""
    starts = (text.find(ending, max(0, len(before) - len(ending) + 1)) for ending in stop)
    return [at for at in starts if at >= 0]


def eos_ids(generation: Any, config: Any) -> frozenset[int]:
    """End tokens, of the generation config if it names any, else of the model's config."""
    ids = getattr(generation, "eos_token_id", None)
    ids = config.eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
