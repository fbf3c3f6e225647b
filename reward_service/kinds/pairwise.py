"""Pairwise rewards: a language model reads two responses and answers which one is better.

A candidate's score is the mean probability with which it is preferred to some others of its batch,
in both orders, since models favour one place. So a score ranks a candidate within its batch only,
and the orchestrator scores answers that have ended again with each later batch. A lone one scores
0.5. The prompt's text before the two responses is computed once.

An unfinished text is compared as it is: both are inside one user turn, which is always closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from reward_service.checkpoint import load_backbone
from reward_service.conversation import in_parts, load_conversation
from reward_service.kinds.causal import CausalScorer, CausalTask, KeptSession, Tokens
from reward_service.kinds.lm_head import LMHead, single_token
from reward_service.reward import distinct
from reward_service.specs import PairwiseSpec, Resources
from specrej.contracts import Candidate, Message, Prompt
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.token_prefix import common_length

# Pairs of texts to compare, by their indices.
_Pairs = Sequence[tuple[int, int]]


class PairwiseReward:
    """Scores by comparisons in pairs. Raises ValueError: the directory holds no such model."""

    description = "How often a model prefers the response to others of its batch."

    def __init__(self, spec: PairwiseSpec, resources: Resources) -> None:
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources)
        self.token_budget = resources.token_budget
        self.spec = spec
        model = load_backbone(spec, resources, with_lm_head=True)
        self.conversation = load_conversation(spec, model.config)
        words = (spec.first, spec.second)
        pair = [single_token(self.conversation.tokenizer, word, "the word") for word in words]
        self.scorer = CausalScorer(model, LMHead(model).preferring(pair), resources.kept_tokens)

    def open(self, prompt: Prompt, *, once: bool = False) -> _PairwiseSession:
        """Raises InvalidRequest: the model cannot take this prompt."""
        return _PairwiseSession(self, prompt)

    def compute(self, pieces: Sequence[Any]) -> None:
        self.scorer.compute(pieces)

    def encode(self, context: str, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Tokens of the request to compare, one list per pair of texts as a template takes them.

        Raises:
            InvalidRequest: the model's template rejects it.
        """
        # Not by str.format: texts may hold braces.
        head, rest = self.spec.template.split("{context}")
        between, rest = rest.split("{a}")
        middle, end = rest.split("{b}")
        head += context + between
        token_ids: list[list[int]] = []
        for part in in_parts(pairs):
            turns = [(Message("user", head + a + middle + b + end),) for a, b in part]
            token_ids += self.conversation.encode(self.conversation.written(turns))
        return token_ids


class _PairwiseSession:
    def __init__(self, reward: PairwiseReward, prompt: Prompt) -> None:
        self._reward = reward
        contents = reward.conversation.contents(prompt)
        self._context = "\n\n".join(message.content for message in contents)
        one, other = reward.encode(self._context, [("a", "a"), ("b", "b")])
        reward.conversation.check_length(one)
        self._kept = KeptSession(one[: common_length(one, other)], keeps_texts=False)

    def begin(self, candidates: Sequence[Candidate]) -> CausalTask:
        """Every pair in both orders; equal texts score alike and are not compared."""
        as_text = self._reward.conversation.as_text
        most = self._reward.conversation.max_tokens * MAX_TOKEN_CHARACTERS
        texts, where = distinct([as_text(candidate.text[-most:]) for candidate in candidates])
        pairs = _pairs(len(texts), self._reward.spec.opponents)
        encoded = self._reward.encode(self._context, [(texts[i], texts[j]) for i, j in pairs])
        limit = self._reward.conversation.max_tokens
        sequences = [
            Tokens(key, ids[-limit:], 0, [min(len(ids), limit) - 1])
            for key, ids in enumerate(encoded)
        ]
        to_scores = partial(_mean_preferences, pairs, where)
        return self._reward.scorer.task(self._kept, sequences, to_scores, compare=True)

    def close(self) -> None:
        self._reward.scorer.close(self._kept)


def _mean_preferences(pairs: _Pairs, where: Sequence[int], outputs: list[Tensor]) -> list[float]:
    shares: list[list[float]] = [[] for _ in range(max(where, default=0) + 1)]
    for (i, j), output in zip(pairs, outputs, strict=True):
        first = float(output[-1, 0])
        shares[i].append(first)
        shares[j].append(1 - first)
    means = [sum(share) / len(share) if share else 0.5 for share in shares]
    return [means[place] for place in where]


def _pairs(num_texts: int, opponents: int) -> _Pairs:
    """Each text with the next ones, the first following the last; each pair in both orders."""
    steps = range(1, min(opponents, num_texts - 1) + 1)
    pairs = {frozenset((i, (i + step) % num_texts)) for i in range(num_texts) for step in steps}
    ordered = sorted(sorted(pair) for pair in pairs)
    return [pair for i, j in ordered for pair in ((i, j), (j, i))]
