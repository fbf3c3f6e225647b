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
from transformers import AutoModelForCausalLM

from reward_service.checkpoint import load_model
from reward_service.conversation import Tokens, in_parts, load_conversation
from reward_service.kinds.causal import CausalScorer, KeptSession
from reward_service.kinds.lm_head import LMHead, single_token
from reward_service.reward import Reward, Task, distinct
from reward_service.specs import PairwiseSpec, Resources
from specrej.contracts import Candidate, Message, Prompt
from specrej.contracts.validation import MAX_TOKEN_CHARACTERS
from specrej_models.token_prefix import common_length

# Pairs of texts to compare, by their indices.
_Pairs = Sequence[tuple[int, int]]


class PairwiseReward(Reward):
    """Scores by comparisons in pairs.

    Raises:
        ValueError: the directory does not hold such a model.
    """

    description = "How often a model prefers the response to others of its batch."

    def __init__(self, spec: PairwiseSpec, resources: Resources) -> None:
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources)
        self.token_budget = resources.token_budget
        self._spec = spec
        model = load_model(spec, resources, AutoModelForCausalLM)
        self.conversation = load_conversation(spec, model.config)
        words = (spec.first, spec.second)
        pair = [single_token(self.conversation.tokenizer, word, "the word") for word in words]
        self.scorer = CausalScorer(model, LMHead(model).preferring(pair), resources.kept_tokens)

    def open(self, prompt: Prompt, *, once: bool = False) -> tuple[str, KeptSession]:
        """The prompt's text, and the tokens before the first response, which are computed once.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        contents = self.conversation.contents(prompt)
        context = "\n\n".join(message.content for message in contents)
        one, other = self._encode(context, [("a", "a"), ("b", "b")])
        self.conversation.check_length(one)
        return context, KeptSession(one[: common_length(one, other)], keeps_texts=False)

    def begin(self, session: tuple[str, KeptSession], candidates: Sequence[Candidate]) -> Task:
        """Every pair in both orders; equal texts score alike and are not compared."""
        context, kept = session
        limit = self.conversation.max_tokens
        ends = [candidate.text[-limit * MAX_TOKEN_CHARACTERS :] for candidate in candidates]
        texts, where = distinct([self.conversation.as_text(end) for end in ends])
        pairs = _pairs(len(texts), self._spec.opponents)
        encoded = self._encode(context, [(texts[i], texts[j]) for i, j in pairs])
        sequences = {
            key: Tokens(ids[-limit:], marks=[min(len(ids), limit) - 1])
            for key, ids in enumerate(encoded)
        }
        to_scores = partial(_mean_preferences, pairs, where)
        return self.scorer.task(kept, sequences, to_scores, compare=True)

    def compute(self, pieces: Sequence[Any]) -> None:
        """One forward pass."""
        self.scorer.compute(pieces)

    def free(self, session: tuple[str, KeptSession]) -> None:
        """Free what is kept of the prompt."""
        self.scorer.close(session[1])

    def _encode(self, context: str, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Tokens of the request to compare, one list per pair of texts as a template takes them.

        Raises:
            InvalidRequest: the model's template rejects it.
        """
        # Not by str.format: texts may hold braces.
        head, rest = self._spec.template.split("{context}")
        between, rest = rest.split("{a}")
        middle, end = rest.split("{b}")
        head += context + between
        token_ids: list[list[int]] = []
        for part in in_parts(pairs):
            turns = [(Message("user", head + a + middle + b + end),) for a, b in part]
            token_ids += self.conversation.encode(self.conversation.written(turns))
        return token_ids


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
