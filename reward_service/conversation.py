"""A prompt and a response as the text that a reward model was trained on, and as its tokens.

By the model's chat template, or by a plain format. Uses the tokenizer, no weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_service.specs import CausalSpec
from specrej.contracts import NO_PROBE, Candidate, FinishReason, Message, ModelProbe, Prompt
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.control_tokens import ControlTokens
from specrej_models.probe import ChatTemplate, examine
from specrej_models.token_prefix import common_length
from specrej_models.tools import JSON_CALLS, as_text, marked

# A placeholder in a response for the token `Conversation.splice`. Its characters are of Unicode's
# private area: templates do not change them, and they are removed from prompts and responses.
SPLICE = "\ue000\ue001\ue000"

# A placeholder for a spliced token, distinct from equal tokens of the text.
_SPLICED = -1

# Each text is written behind the whole prompt, and a tokenizer keeps several values for each of its
# tokens.
_AT_ONCE = 32

# An example of a response, to find what a template writes after it; in no template.
_ANY_RESPONSE = "Response \ue002"


def without_splices(text: str) -> str:
    """The text without any character of `SPLICE`: removing whole ones could form a new one."""
    return text.translate(dict.fromkeys(map(ord, SPLICE)))


class Conversation:
    """Writes and tokenizes conversations for one model."""

    def __init__(
        self,
        spec: CausalSpec,
        tokenizer: Any,
        max_tokens: int,
        template: ChatTemplate | None = None,
        probe: ModelProbe = NO_PROBE,
    ) -> None:
        """max_tokens: the most that the model takes; template: the tokenizer's, unless there is a
        plain format.

        Raises:
            ValueError: there is neither a chat template nor a plain format.
        """
        self.name = spec.name
        self._plain = spec.format
        self._closes_unfinished = spec.unfinished == "closed"
        if not self._plain and not template:
            raise ValueError(f"reward {self.name}: the tokenizer has no chat template")
        self.probe = probe
        self._template = template
        default = "tokenizer" if self._plain else "template"
        special_tokens = spec.special_tokens or default
        self._by_tokenizer = special_tokens != "template"
        self._removes_bos = special_tokens == "tokenizer"
        self.tokenizer = tokenizer
        self._control_tokens = ControlTokens(tokenizer, probe.vocabulary or sys.maxsize)
        self.max_tokens = min(max_tokens, tokenizer.model_max_length)
        self.splice: int | None = None  # the token that is put between the parts around SPLICE

    def turn(self, candidate: Candidate) -> tuple[str, bool]:
        """A candidate's text, and whether its turn is closed: it ended by itself, or by option."""
        closed = candidate.finish is FinishReason.STOP or self._closes_unfinished
        # Of one that is too long, the first tokens are left out: they need not be computed.
        return candidate.text[-self.max_tokens * MAX_TOKEN_CHARACTERS :], closed

    def render(self, prompt: Prompt, texts: Sequence[str]) -> list[str]:
        """The conversation with each text as its last turn, for `encode`.

        Raises:
            InvalidRequest: the model's template rejects it.
        """
        messages = self._contents(prompt)
        texts = [self._control_tokens.mark(text) for text in texts]
        if not self._plain:
            assert self._template
            return self._template.write([(*messages, Message("assistant", t)) for t in texts])
        before, after = self._plain.split("{response}")
        before = before.replace("{prompt}", "\n\n".join(message.content for message in messages))
        return [before + text + after for text in texts]

    def _contents(self, prompt: Prompt) -> list[Message]:
        """A prompt's turns, in which control tokens are text unless it allows them."""
        turns = Prompt(prompt.turns)
        marks = () if prompt.allow_special_tokens else (self._control_tokens.mark,)
        for mark in (without_splices, *marks):
            turns = marked(turns, mark)
        return as_text(turns.messages, JSON_CALLS) if self._plain else [*turns.messages]

    def encode(self, rendered: Sequence[str]) -> list[list[int]]:
        """Token ids, not cut."""
        if self._removes_bos and (bos := self.tokenizer.bos_token):
            rendered = [text.removeprefix(bos) for text in rendered]
        if self.splice is not None:
            return [self._spliced(text.split(SPLICE)) for text in rendered]
        return self._control_tokens.encode(rendered, add_special_tokens=self._by_tokenizer)

    def _spliced(self, parts: list[str]) -> list[int]:
        """The parts' tokens, with `_SPLICED` between them."""
        encode = self._control_tokens.encode
        (token_ids,) = encode(parts[:1], add_special_tokens=self._by_tokenizer)
        for part in encode(parts[1:], add_special_tokens=False):
            token_ids += [_SPLICED, *part]
        return token_ids

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


@dataclass(slots=True)
class Tokens:
    """A conversation with one response.

    A longer response begins with the same `keep` tokens, except perhaps for the last few of them.
    Of a conversation that is too long, the first tokens are left out. `spliced`: the places of
    the token `Conversation.splice`. `marks`: where a head is read, in ascending order; the reward
    sets them.
    """

    token_ids: list[int]
    keep: int = 0
    spliced: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)


class Turns:
    """One prompt's conversation; responses become its last turn, closed or left open.

    Raises:
        InvalidRequest: the prompt is too long, or the template rejects it.
    """

    def __init__(self, conversation: Conversation, prompt: Prompt) -> None:
        self._conversation = conversation
        self._prompt = prompt
        empty, some = conversation.render(prompt, ["", _ANY_RESPONSE])
        if _ANY_RESPONSE not in some:
            raise ValueError(f"reward {conversation.name}: its template leaves the response out")
        opening, self._closing = some.rsplit(_ANY_RESPONSE, 1)
        self.prompt_ids, empty_ids = conversation.encode([opening, empty])
        length, limit = len(empty_ids), conversation.max_tokens
        if length > limit:
            reason = f"has {length} tokens, reward {conversation.name} takes {limit}"
            raise InvalidRequest([Violation("prompt", reason)])
        # A long prompt is tokenized here, and not again for each response.
        split = conversation.split_opening(opening, self.prompt_ids)
        self._head, self._head_ids, self._added = split
        head_ids, (tail,) = self._encode([empty])
        if head_ids + tail != empty_ids:
            self._head, self._head_ids, self._added = "", [], 0

    def tokenize(self, texts: Sequence[tuple[str, bool]]) -> list[Tokens]:
        """Each text as a turn; a closed one (True) ends with what the template writes then."""
        tokenized: list[Tokens] = []
        for at in range(0, len(texts), _AT_ONCE):
            part = texts[at : at + _AT_ONCE]
            rendered = self._conversation.render(self._prompt, [text for text, _ in part])
            open_turns = [text.removesuffix(self._closing) for text in rendered]
            head_ids, tails = self._encode([*rendered, *open_turns])
            pairs = zip(tails[: len(part)], tails[len(part) :], strict=True)
            for (whole, open_turn), (_, is_closed) in zip(pairs, part, strict=True):
                tokenized.append(self._tokenized(head_ids, whole, open_turn, is_closed))
        return tokenized

    def _encode(self, rendered: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """The tokens with which all of these conversations begin, and those after them of each."""
        if not all(text.startswith(self._head) for text in rendered):
            return [], self._conversation.encode(rendered)  # the template changes the prompt
        tails = self._conversation.encode([text[len(self._head) :] for text in rendered])
        return self._head_ids, [tail[self._added :] for tail in tails]

    def _tokenized(
        self, head_ids: list[int], whole: list[int], open_turn: list[int], closed: bool
    ) -> Tokens:
        """`head_ids`, then `whole` if closed, else `open_turn`."""
        tail = whole if closed else open_turn
        token_ids = head_ids + tail
        cut = max(0, len(token_ids) - self._conversation.max_tokens)
        # Without its first tokens, all positions shift: a longer text shares none of them.
        keep = 0 if cut else len(head_ids) + common_length(whole, open_turn)
        token_ids, splice = token_ids[cut:], self._conversation.splice
        spliced: list[int] = []
        if splice is not None:
            spliced = [place for place, token in enumerate(token_ids) if token == _SPLICED]
            for place in spliced:
                token_ids[place] = splice
        return Tokens(token_ids, keep, spliced)


def load_conversation(spec: CausalSpec, config: Any) -> Conversation:
    """Raises OSError, ValueError: as `examine`."""
    examined = examine(
        spec.directory, owner=f"reward {spec.name}", ends=False, uses_template=not spec.format
    )
    tokenizer = examined.tokenizer
    limit = tokenizer.model_max_length
    limit = getattr(config.get_text_config(), "max_position_embeddings", limit)
    return Conversation(spec, tokenizer, limit, examined.template, examined.probe)


def single_token(tokenizer: Any, token: int | str, what: str) -> int:
    """The id of the one token that a text is, or the id itself.

    Raises:
        ValueError: it is several tokens, or none.
    """
    if isinstance(token, int):
        if token >= len(tokenizer):
            raise ValueError(f"{what} {token} is not a token: there are {len(tokenizer)}")
        return token
    token_ids: list[int] = tokenizer.encode(token, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ValueError(f"{what} {token!r} must be one token, is {len(token_ids)}")
    return token_ids[0]
