"""Pairwise rewards: a language model reads two responses and says which one is better.

A candidate's score is the mean probability with which it is preferred to some others of its batch,
asked in both orders, since models favour one place. So a score says how a candidate stands among
its batch, and nothing beyond; a lone one scores 0.5. The prompt's text before the two responses is
computed once.

An unfinished text is compared as it is: the two stand inside one user turn, which is always closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reward_service.batching import distinct
from reward_service.causal import CausalScorer, CausalTask, Tokens
from reward_service.causal_reward import Options
from reward_service.conversation import Conversation
from reward_service.prefixes import common
from reward_service.words import Words, single_token
from specrej.contracts import Candidate, Message, Prompt, Scores
from specrej.errors import InvalidRequest, Violation


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the model is asked, {context}, {a} and {b} standing for the prompt and two responses;
    first and second are its words for them. Each candidate is compared with `opponents` others
    that come after it, and as many before it.

    The defaults are those of RLHFlow's pair preference models (Dong et al. 2024, arXiv 2405.07863).
    """

    template: str = "[CONTEXT] {context} [RESPONSE A] {a} [RESPONSE B] {b} \n"
    first: str = "A"
    second: str = "B"
    opponents: int = 2

    def write(self, context: str, a: str, b: str) -> str:
        """Not by str.format: texts may hold braces."""
        head, rest = self.template.split("{context}")
        between, rest = rest.split("{a}")
        middle, end = rest.split("{b}")
        return head + context + between + a + middle + b + end


class PairwiseReward:
    """Made by `load_pairwise`."""

    description = "How often a model prefers the response to others of its batch."

    def __init__(
        self,
        options: Options,
        comparison: Comparison,
        conversation: Conversation,
        scorer: CausalScorer,
    ) -> None:
        self.name = options.name
        self.fingerprint = options.fingerprint(kind="pairwise", comparison=comparison)
        self.token_budget = options.token_budget
        self.comparison = comparison
        self.conversation = conversation
        self.scorer = scorer

    def open(self, prompt: Prompt, *, once: bool = False) -> _PairwiseSession:
        """Raises InvalidRequest: the model cannot take this prompt."""
        return _PairwiseSession(self, prompt)

    def compute(self, pieces: Sequence[Any]) -> None:
        self.scorer.compute(pieces)

    def ask(self, context: str, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Tokens of the question which of two is better.

        Raises:
            InvalidRequest: the model's template does not take it.
        """
        if not pairs:
            return []
        questions = [self.comparison.write(context, a, b) for a, b in pairs]
        asked = [(Message("user", question),) for question in questions]
        return self.conversation.encode(self.conversation.written(asked))


class _PairwiseSession:
    def __init__(self, reward: PairwiseReward, prompt: Prompt) -> None:
        self._reward = reward
        messages = prompt.turns
        self._context = "\n\n".join(message.content for message in messages)
        one, other = reward.ask(self._context, [("a", "a"), ("b", "b")])
        limit = reward.conversation.max_tokens
        if len(one) > limit:
            reason = f"has {len(one)} tokens, reward {reward.name} takes {limit}"
            raise InvalidRequest([Violation("prompt", reason)])
        self._kept = reward.scorer.open(one[: common(one, other)], keeps_texts=False)

    def begin(self, candidates: Sequence[Candidate]) -> _PairwiseTask:
        """Every pair in both orders; equal texts are as good as each other, and not asked about."""
        texts, where = distinct([candidate.text for candidate in candidates])
        pairs = _pairs(len(texts), self._reward.comparison.opponents)
        asked = self._reward.ask(self._context, [(texts[i], texts[j]) for i, j in pairs])
        limit = self._reward.conversation.max_tokens
        sequences = [
            Tokens(key, ids[-limit:], 0, [min(len(ids), limit) - 1])
            for key, ids in enumerate(asked)
        ]
        return _PairwiseTask(self._reward.scorer.task(self._kept, sequences), pairs, where)

    def close(self) -> None:
        self._reward.scorer.close(self._kept)


class _PairwiseTask:
    def __init__(
        self, task: CausalTask, pairs: Sequence[tuple[int, int]], where: Sequence[int]
    ) -> None:
        self._task = task
        self._pairs = pairs
        self._where = where

    @property
    def next_tokens(self) -> int:
        return self._task.next_tokens

    def take(self) -> Any:
        return self._task.take()

    def scores(self) -> Scores:
        shares: list[list[float]] = [[] for _ in range(max(self._where, default=0) + 1)]
        for (i, j), values in zip(self._pairs, self._task.values(), strict=True):
            first = float(values[-1, 0])
            shares[i].append(first)
            shares[j].append(1 - first)
        means = [sum(share) / len(share) if share else 0.5 for share in shares]
        return Scores(tuple(means[place] for place in self._where), self._task.num_computed)


def _pairs(num_texts: int, opponents: int) -> list[tuple[int, int]]:
    """Each text with those that come after it, round in a ring; in both orders, each pair once."""
    steps = range(1, min(opponents, num_texts - 1) + 1)
    met = {frozenset((i, (i + step) % num_texts)) for i in range(num_texts) for step in steps}
    ordered = sorted(sorted(pair) for pair in met)
    return [pair for i, j in ordered for pair in ((i, j), (j, i))]


def load_pairwise(options: Options, *, comparison: Comparison) -> PairwiseReward:
    """Raises ValueError: the directory holds no such model; says why."""
    model = options.backbone(with_words=True)
    conversation = options.conversation(model.config)
    names = (comparison.first, comparison.second)
    pair = [single_token(conversation.tokenizer, word, "the word") for word in names]
    scorer = CausalScorer(model, Words(model).preferring(pair), options.kept_tokens)
    return PairwiseReward(options, comparison, conversation, scorer)
