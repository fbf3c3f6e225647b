"""Prompt and response as the text that a reward model was trained on, and as its tokens.

The model's own chat template, or a plain format where it has none. Knows the tokeniser, no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer

from reward_service.prefixes import common
from specrej.contracts import Message, Prompt
from specrej.errors import InvalidRequest, Violation

# Who writes special tokens such as BOS: the template, or the tokeniser (then the template's own BOS
# at the beginning is taken away, so that there is one). Model cards do either.
SpecialTokens = Literal["template", "tokenizer"]

# Stands in a text where `Conversation.spliced_token` goes between the tokens of its parts. Private
# letters of Unicode, so that no template changes them; a user's own are taken away.
SPLICE = "\ue000\ue001\ue000"

# Stands for a response where only what is around it is looked for.
_ANY_RESPONSE = "Response"


@dataclass(frozen=True, slots=True)
class Format:
    """How a conversation is written, where a model's card says more than its template.

    `plain` such as "{prompt} {response}" takes the template's place; {prompt} is the contents of
    all turns, a blank line between two.
    """

    special_tokens: SpecialTokens = "template"
    plain: str = ""


class Conversation:
    """Writes and tokenises conversations for one model."""

    def __init__(self, name: str, tokenizer: Any, max_tokens: int, format_: Format) -> None:
        """`max_tokens`: the most that the model takes.

        Raises:
            ValueError: there is neither a chat template nor a plain format.
        """
        if not format_.plain and not tokenizer.chat_template:
            raise ValueError(f"reward {name}: the tokenizer has no chat template")
        self.name = name
        self.tokenizer = tokenizer
        self.max_tokens = min(max_tokens, tokenizer.model_max_length)
        self.spliced_token: int | None = None
        self._format = format_

    def turns(self, prompt: Prompt) -> Turns:
        """A prompt, to which responses can be added.

        Raises:
            InvalidRequest: it is too long, or the template does not take it.
        """
        return Turns(self, prompt)

    def render(self, prompt: Prompt, texts: Sequence[str]) -> list[str]:
        """The conversation with each text as its last turn.

        Raises:
            InvalidRequest: the model's template does not take it.
        """
        messages = prompt.turns
        if plain := self._format.plain:
            asked = "\n\n".join(message.content for message in messages)
            before, after = plain.split("{response}")
            return [before.replace("{prompt}", asked) + text + after for text in texts]
        return self.written([(*messages, Message("assistant", text)) for text in texts])

    def written(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """By the model's chat template.

        Raises:
            InvalidRequest: it does not take one of them.
        """
        turns = [
            [{"role": each.role, "content": each.content} for each in c] for c in conversations
        ]
        try:
            written: list[str] = self.tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateError as error:
            # Templates refuse what the model was not trained on, such as a system turn.
            reason = f"reward {self.name} does not take this conversation: {str(error)[:200]}"
            raise InvalidRequest([Violation("prompt.messages", reason)]) from error
        return written

    def encode(self, rendered: Sequence[str]) -> list[list[int]]:
        """Token ids, not cut."""
        by_tokenizer = self._format.special_tokens == "tokenizer"
        if by_tokenizer and (bos := self.tokenizer.bos_token):
            rendered = [text.removeprefix(bos) for text in rendered]
        if self.spliced_token is None:
            return self._encode(rendered, special_tokens=by_tokenizer)
        return [self._spliced(text.split(SPLICE), by_tokenizer) for text in rendered]

    def _spliced(self, parts: list[str], by_tokenizer: bool) -> list[int]:
        """The parts' tokens with the spliced one between them."""
        assert self.spliced_token is not None
        (token_ids,) = self._encode(parts[:1], special_tokens=by_tokenizer)
        for part in self._encode(parts[1:], special_tokens=False):
            token_ids += [self.spliced_token, *part]
        return token_ids

    def _encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=special_tokens, padding=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A conversation with one response.

    `keep` of its tokens stay what they are when the response grows, but for the last few perhaps;
    the response begins at `start`. Where it is too long, its first tokens are left out.
    """

    token_ids: list[int]
    keep: int
    start: int


class Turns:
    """One prompt's conversation; responses become its last turn, closed or left open."""

    def __init__(self, conversation: Conversation, prompt: Prompt) -> None:
        self._conversation = conversation
        self._prompt = prompt
        empty, some = conversation.render(prompt, ["", _ANY_RESPONSE])
        if _ANY_RESPONSE not in some:
            raise ValueError(f"reward {conversation.name}: its template hides the response")
        opening, self._closing = some.rsplit(_ANY_RESPONSE, 1)
        self.prompt_ids, empty_ids = conversation.encode([opening, empty])
        if len(empty_ids) > conversation.max_tokens:
            limit = conversation.max_tokens
            reason = f"has {len(empty_ids)} tokens, reward {conversation.name} takes {limit}"
            raise InvalidRequest([Violation("prompt", reason)])

    def tokenize(self, texts: Sequence[str], closed: Sequence[bool]) -> list[Tokenized]:
        """Each text as a turn; a closed one ends with what the template writes after a turn."""
        rendered = self._conversation.render(self._prompt, texts)
        begun = [text.removesuffix(self._closing) for text in rendered]
        ids = self._conversation.encode([*rendered, *begun])
        pairs = zip(ids[: len(texts)], ids[len(texts) :], closed, strict=True)
        return [self._tokenized(*each) for each in pairs]

    def _tokenized(self, whole: list[int], begun: list[int], closed: bool) -> Tokenized:
        token_ids = whole if closed else begun
        start = common(token_ids, self.prompt_ids)
        cut = max(0, len(token_ids) - self._conversation.max_tokens)
        # Positions shift when the first tokens go: nothing computed for the next text holds.
        keep = 0 if cut else common(whole, begun)
        return Tokenized(token_ids[cut:], keep, max(0, start - cut))


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokeniser of a local model."""
    return AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=trust_remote_code
    )
