"""A prompt and a response as the text that a reward model was trained on, and as its tokens.

By the model's chat template. Uses the tokenizer, no weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reward_service.specs import ClassifierSpec
from specrej.contracts import Candidate, Message, Prompt
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import ChatTemplate, examine
from specrej_models.tools import marked

# Each text is written behind the whole prompt, and a tokenizer keeps several values for each of its
# tokens.
_AT_ONCE = 32

# An example of a response, to find what a template writes before it; in no template.
_ANY_RESPONSE = "Response \ue002"


class Conversation:
    """Writes and tokenizes conversations for one model."""

    def __init__(
        self,
        spec: ClassifierSpec,
        tokenizer: Any,
        max_tokens: int,
        template: ChatTemplate,
        vocabulary: int = sys.maxsize,
    ) -> None:
        """max_tokens: the most that the model takes; template: the tokenizer's; vocabulary: the
        number of tokens that the model has."""
        self.name = spec.name
        self._template = template
        self._by_tokenizer = spec.special_tokens == "both"
        self.tokenizer = tokenizer
        self._control_tokens = ControlTokens(tokenizer, vocabulary)
        self.max_tokens = min(max_tokens, tokenizer.model_max_length)
        self.takes_images = template.takes_images

    def response(self, candidate: Candidate) -> str:
        """A candidate's text; of one that is too long, the end."""
        return candidate.text[-self.max_tokens * MAX_TOKEN_CHARACTERS :]

    def render(self, prompt: Prompt, texts: Sequence[str]) -> list[str]:
        """The conversation with each text as its last turn, for `encode`.

        Raises:
            InvalidRequest: the model's template rejects it.
        """
        mark, turns = self._control_tokens.mark, Prompt(prompt.turns)
        # Control tokens in a prompt are text, unless it allows them.
        messages = (turns if prompt.allow_special_tokens else marked(turns, mark)).messages
        return self._template.write([(*messages, Message("assistant", mark(t))) for t in texts])

    def encode(self, rendered: Sequence[str]) -> list[list[int]]:
        """Token ids, not cut."""
        return self._control_tokens.encode(rendered, add_special_tokens=self._by_tokenizer)

    def split_opening(self, opening: str, token_ids: list[int]) -> tuple[str, list[int], int]:
        """Cut `opening`, whose tokens are `token_ids`, before its last control token, where
        tokenizers start afresh: the text and the tokens before the cut, and how many tokens
        `encode` puts before any text. Empty if there is no such place."""
        at, token = self._control_tokens.last_in(opening)
        if at <= 0 or (self._by_tokenizer and token == self.tokenizer.bos_token):
            return "", [], 0
        (tail,) = self.encode([opening[at:]])
        control_id = self.tokenizer.convert_tokens_to_ids(token)
        added = tail.index(control_id) if control_id in tail else len(tail)
        head = len(token_ids) - len(tail) + added
        return opening[:at], token_ids[:head], added


class Tokens(NamedTuple):
    """A conversation with one response; `is_cut`: it is too long, so that its first tokens are left
    out, and a longer response shares no position with it."""

    token_ids: list[int]
    is_cut: bool


class Turns:
    """One prompt's conversation; responses become its last turn. `images`: what else is read of the
    prompt, all of it however long a response is.

    Raises:
        InvalidRequest: the prompt is too long, or the template rejects it.
    """

    def __init__(
        self,
        conversation: Conversation,
        prompt: Prompt,
        count: Callable[[Sequence[int]], int] = len,
        images: Any = None,
    ) -> None:
        """count: the number of tokens that the model reads for a text's."""
        self._conversation = conversation
        self._prompt = prompt
        self.images = images
        empty, some = conversation.render(prompt, ["", _ANY_RESPONSE])
        if _ANY_RESPONSE not in some:
            raise ValueError(f"reward {conversation.name}: its template leaves the response out")
        opening = some.rpartition(_ANY_RESPONSE)[0]
        self.prompt_ids, empty_ids = conversation.encode([opening, empty])
        length, limit = len(empty_ids), conversation.max_tokens
        if length <= limit:
            length = count(empty_ids)
        if length > limit:
            reason = f"has {length} tokens, reward {conversation.name} takes {limit}"
            raise InvalidRequest([Violation("prompt", reason)])
        self._most = limit - (length - len(empty_ids))
        # A long prompt is tokenized here, and not again for each response.
        split = conversation.split_opening(opening, self.prompt_ids)
        self._head, self._head_ids, self._added = split
        head_ids, (tail,) = self._encode([empty])
        if head_ids + tail != empty_ids:
            self._head, self._head_ids, self._added = "", [], 0

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Each text as a turn, which ends with what the template writes then."""
        tokenized: list[Tokens] = []
        most, kept = self._most, len(self.prompt_ids) if self.images else 0
        for at in range(0, len(texts), _AT_ONCE):
            rendered = self._conversation.render(self._prompt, texts[at : at + _AT_ONCE])
            head_ids, tails = self._encode(rendered)
            conversations = [head_ids + tail for tail in tails]
            tokenized += [
                Tokens(ids[:kept] + ids[max(kept, len(ids) - most + kept) :], len(ids) > most)
                for ids in conversations
            ]
        return tokenized

    def _encode(self, rendered: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """The tokens with which all of these conversations begin, and those after them of each."""
        if not all(text.startswith(self._head) for text in rendered):
            return [], self._conversation.encode(rendered)  # the template changes the prompt
        tails = self._conversation.encode([text[len(self._head) :] for text in rendered])
        return self._head_ids, [tail[self._added :] for tail in tails]


def load_conversation(spec: ClassifierSpec, config: Any) -> Conversation:
    """Raises OSError, ValueError: as `examine`, or the tokenizer has no chat template."""
    examined = examine(spec.directory, owner=f"reward {spec.name}", ends=False)
    tokenizer, template = examined.tokenizer, examined.template
    if not template:
        raise ValueError(f"reward {spec.name}: the tokenizer has no chat template")
    limit = tokenizer.model_max_length
    limit = getattr(config.get_text_config(), "max_position_embeddings", limit)
    return Conversation(spec, tokenizer, limit, template, examined.vocabulary)
