"""Rewards on a decoder-only network: which tokens are read, and how outputs there make a score.

Connects a conversation's tokens to a scorer that keeps what it has computed. The kinds of rewards
differ in their head and their `Reading`; each has a file of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from reward_service.conversation import Conversation, Tokenized, Turns, load_conversation
from reward_service.kinds.causal import CausalScorer, CausalTask, Head, KeptSession, Tokens
from reward_service.reward import distinct
from reward_service.specs import CausalSpec, Resources
from specrej.contracts import Candidate, FinishReason, Prompt


class Reading(ABC):
    """Which tokens of a response are read, and the score that follows from them.

    By default the last token, of the text as it is.
    """

    def prepare(self, text: str, closed: bool) -> str:
        """The response in the form in which the model is to see it."""
        return text

    def marks(self, tokens: Tokenized) -> list[int]:
        """Positions to read, ascending, at least one."""
        return [len(tokens.token_ids) - 1]

    @abstractmethod
    def score(self, outputs: Tensor) -> float:
        """From the head's outputs at the marks, [marks, width]."""


class CausalReward:
    """float32 on a CPU, where neither the batch nor earlier batches change a score by more than
    1e-4; the checkpoint's own precision elsewhere.

    A raw text prompt is one user message. A prompt must fit the model's limit, the smaller of the
    tokenizer's and the position embeddings'; if prompt and response together do not, the last
    tokens count, because the responses are what differs.
    """

    def __init__(
        self,
        spec: CausalSpec,
        resources: Resources,
        description: str,
        model: PreTrainedModel,
        head: Head,
        reading: Reading,
        *,
        conversation: Conversation | None = None,
        looks_ahead: bool = False,
        digests: dict[str, str] | None = None,
    ) -> None:
        """Takes over `model`; digests: of files outside the spec's directory."""
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources, **(digests or {}))
        self.description = description
        self.token_budget = resources.token_budget
        self.conversation = conversation or load_conversation(spec, model.config)
        self.scorer = CausalScorer(model, head, resources.kept_tokens, looks_ahead=looks_ahead)
        self.reading = reading
        self.closes_unfinished = spec.unfinished == "closed"

    def open(self, prompt: Prompt, *, once: bool = False) -> CausalRewardSession:
        """A session that keeps what it has computed; with `once`, of the prompt alone.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        return CausalRewardSession(self, self.conversation.turns(prompt), once=once)

    def compute(self, pieces: Sequence[Any]) -> None:
        """One forward pass."""
        self.scorer.compute(pieces)


class CausalRewardSession:
    """One prompt's growing texts: of each, only the new tokens are computed."""

    def __init__(self, reward: CausalReward, turns: Turns, *, once: bool) -> None:
        self._reward = reward
        self._turns = turns
        self._kept = KeptSession(turns.prompt_ids, keeps_texts=not once)

    def begin(self, candidates: Sequence[Candidate]) -> CausalTask:
        """Begin a batch. Frees what is kept of other candidates; equal texts are computed once."""
        reading = self._reward.reading
        closed = [closes(candidate, self._reward.closes_unfinished) for candidate in candidates]
        pairs = zip(candidates, closed, strict=True)
        parts = ((self._turns.last_part(candidate.text), end) for candidate, end in pairs)
        texts = [(reading.prepare(part, end), end) for part, end in parts]
        unique, where = distinct(texts)
        keys: dict[int, int] = {}
        for candidate, place in zip(candidates, where, strict=True):
            keys.setdefault(place, candidate.id)
        tokenized = self._turns.tokenize([text for text, _ in unique], [end for _, end in unique])
        sequences = [
            Tokens(keys[place], tokens.token_ids, tokens.keep, reading.marks(tokens))
            for place, tokens in enumerate(tokenized)
        ]

        def to_scores(outputs: list[Tensor]) -> list[float]:
            scores = [reading.score(output) for output in outputs]
            return [scores[place] for place in where]

        return self._reward.scorer.task(self._kept, sequences, to_scores)

    def close(self) -> None:
        """Free what is kept."""
        self._reward.scorer.close(self._kept)


def closes(candidate: Candidate, unfinished: bool) -> bool:
    """Whether its turn is closed: `unfinished` for a text that did not end by itself."""
    return candidate.finish is FinishReason.STOP or unfinished
