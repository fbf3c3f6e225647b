"""A reward on a decoder-only network: where its texts are read, and what the numbers there mean.

Ties a conversation's tokens to a scorer that keeps what it has read. The kinds of rewards differ in
their `Reading` alone, and live in a file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reward_service.batching import distinct, take_fairly
from reward_service.causal import CausalScorer, CausalTask, Tokens
from reward_service.checkpoint import load_backbone
from reward_service.conversation import Conversation, Format, Tokenized, Turns, load_tokenizer
from specrej import fingerprint
from specrej.contracts import Candidate, FinishReason, Prompt, Scores

# How the assistant's turn of an unfinished text is scored: as if it ended here, or left open.
Unfinished = Literal["closed", "open"]


@dataclass(frozen=True, slots=True)
class Options:
    """What rewards on local models have in common.

    directory: the model; device: "cpu", "cuda" or "cuda:N"; threads: CPU threads of torch, 0 leaves
    them alone; token_budget: most tokens per forward pass; kept_tokens: most tokens whose keys and
    values all sessions keep.
    """

    name: str
    directory: Path
    device: str = "cpu"
    threads: int = 0
    token_budget: int = 2048
    kept_tokens: int = 65_536
    trust_remote_code: bool = False
    unfinished: Unfinished = "closed"
    format: Format = field(default_factory=Format)

    def fingerprint(self, **settings: object) -> str:
        """Of the weights and whatever else changes a score."""
        plain = {
            "dtype": str(torch.float32 if self.device == "cpu" else "auto"),
            "unfinished": self.unfinished,
            "special_tokens": self.format.special_tokens,
            "plain": self.format.plain,
            "trust_remote_code": str(self.trust_remote_code),
        }
        told = {name: repr(value) for name, value in settings.items()}
        return fingerprint.of_directory(self.directory, plain | told)

    def conversation(self, config: Any) -> Conversation:
        """Of the model that has this configuration."""
        tokenizer = load_tokenizer(self.directory, trust_remote_code=self.trust_remote_code)
        limit = getattr(
            config.get_text_config(), "max_position_embeddings", tokenizer.model_max_length
        )
        return Conversation(self.name, tokenizer, limit, self.format)

    def backbone(self, *, with_words: bool = False) -> PreTrainedModel:
        """The decoder, or `with_words` the language model, on the device.

        Raises:
            ValueError: the directory lacks some of its weights.
        """
        self.set_threads()
        return load_backbone(
            self.directory,
            self.device,
            with_words=with_words,
            trust_remote_code=self.trust_remote_code,
        )

    def set_threads(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)


class Reading(Protocol):
    """Where a text is read, and what comes of it."""

    def prepare(self, text: str, closed: bool) -> str:
        """The response as the model is to see it."""

    def marks(self, tokens: Tokenized) -> list[int]:
        """Positions to read, ascending, at least one."""

    def score(self, values: Tensor) -> float:
        """From what was read at the marks, [marks, width]."""


class CausalReward:
    """float32 on a CPU, where batch size and what was scored before change no score by more than
    1e-4; the checkpoint's own precision elsewhere.

    A raw text prompt is one user message. A prompt must fit the model's limit, the smaller of the
    tokenizer's and the position embeddings'; where prompt and response together do not, the last
    tokens count, because the responses are what differs.
    """

    def __init__(
        self,
        options: Options,
        fingerprint: str,
        description: str,
        conversation: Conversation,
        scorer: CausalScorer,
        reading: Reading,
    ) -> None:
        self.name = options.name
        self.fingerprint = fingerprint
        self.description = description
        self.token_budget = options.token_budget
        self.conversation = conversation
        self.scorer = scorer
        self.reading = reading
        self.closes_unfinished = options.unfinished == "closed"

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
    """One prompt's growing texts: of each, only the tokens that are new are computed."""

    def __init__(self, reward: CausalReward, turns: Turns, *, once: bool) -> None:
        self._reward = reward
        self._turns = turns
        self.kept = reward.scorer.open(turns.prompt_ids, keeps_texts=not once)

    def begin(self, candidates: Sequence[Candidate]) -> CausalRewardTask:
        """Candidates missing from the batch are forgotten; equal texts are computed once."""
        closed = [self._is_closed(candidate) for candidate in candidates]
        texts = [
            self._reward.reading.prepare(candidate.text, is_closed)
            for candidate, is_closed in zip(candidates, closed, strict=True)
        ]
        unique, where = distinct(list(zip(texts, closed, strict=True)))
        keys: dict[int, int] = {}
        for candidate, place in zip(candidates, where, strict=True):
            keys.setdefault(place, candidate.id)
        tokenized = self._turns.tokenize([text for text, _ in unique], [end for _, end in unique])
        sequences = [self._tokens(keys[i], each) for i, each in enumerate(tokenized)]
        task = self._reward.scorer.task(self.kept, sequences)
        return CausalRewardTask(task, self._reward.reading, where)

    def close(self) -> None:
        """Free what is kept."""
        self._reward.scorer.close(self.kept)

    def _is_closed(self, candidate: Candidate) -> bool:
        # What was cut off at its last token did not end its turn.
        return candidate.finish is FinishReason.STOP or self._reward.closes_unfinished

    def _tokens(self, key: int, tokenized: Tokenized) -> Tokens:
        marks = self._reward.reading.marks(tokenized)
        return Tokens(key, tokenized.token_ids, tokenized.keep, marks)


class CausalRewardTask:
    """A batch on its way."""

    def __init__(self, task: CausalTask, reading: Reading, where: Sequence[int]) -> None:
        """`where`: the place of each candidate's text among those computed."""
        self._task = task
        self._reading = reading
        self._where = where

    @property
    def next_tokens(self) -> int:
        return self._task.next_tokens

    def take(self) -> Any:
        return self._task.take()

    def values(self) -> list[Tensor]:
        """What was read of each candidate, [marks, width]."""
        values = self._task.values()
        return [values[place] for place in self._where]

    def scores(self) -> Scores:
        values = [self._reading.score(values) for values in self._task.values()]
        return Scores(tuple(values[place] for place in self._where), self._task.num_computed)


class LastToken:
    """A reading at the last token alone."""

    def prepare(self, text: str, closed: bool) -> str:
        return text

    def marks(self, tokens: Tokenized) -> list[int]:
        return [len(tokens.token_ids) - 1]


def batch_values(
    session: CausalRewardSession, reward: CausalReward, candidates: Sequence[Candidate]
) -> list[Tensor]:
    """What is read of each candidate, [marks, width]; for who wants more than scores."""
    task = session.begin(candidates)
    while pieces := take_fairly([task], reward.token_budget):
        reward.compute(pieces)
    return task.values()
