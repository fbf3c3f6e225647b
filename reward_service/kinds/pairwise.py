"""Pairwise rewards: a language model reads two responses and answers which one is better.

A candidate's score is the mean probability with which it is preferred to some others of its batch,
in both orders, since models favour one place. So a score ranks a candidate within its batch only,
and the orchestrator scores answers that have ended again with each later batch. A lone one scores
0.5. The prompt's text before the two responses is computed once.

An unfinished text is compared as it is: both are inside one user turn, which is always closed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import AutoModelForCausalLM

from reward_service.checkpoint import load_model
from reward_service.conversation import Tokens, in_parts, load_conversation, single_token
from reward_service.kinds.causal import CausalReward, KeptSession
from reward_service.kinds.lm_head import LMHead
from reward_service.reward import Task, distinct, mean_preferences, pairs_of, text_of
from reward_service.specs import PairwiseSpec, Resources
from specrej.contracts import Candidate, Message, Prompt
from specrej_models.token_prefix import common_length


class PairwiseReward(CausalReward):
    """Scores by comparisons in pairs.

    Raises:
        ValueError: the directory does not hold such a model.
    """

    def __init__(self, spec: PairwiseSpec, resources: Resources) -> None:
        self._spec = spec
        model = load_model(spec, resources, AutoModelForCausalLM)
        conversation = load_conversation(spec, model.config)
        words = (spec.first, spec.second)
        pair = [single_token(conversation.tokenizer, word, "the word") for word in words]
        super().__init__(
            spec,
            resources,
            "How often a model prefers the response to others of its batch.",
            model,
            LMHead(model).preferring(pair),
            lambda outputs: float(outputs[-1, 0]),
            conversation=conversation,
        )

    def open(self, prompt: Prompt, *, once: bool = False) -> KeptSession:
        """Keeps the tokens before the first response, which are computed once.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        contents = self.conversation.contents(prompt)
        context = "\n\n".join(map(text_of, contents))
        one, other = self._encode(context, [("a", "a"), ("b", "b")])
        self.conversation.check_length(one)
        return KeptSession(context, one[: common_length(one, other)], keeps_texts=False)

    def begin(self, session: KeptSession, candidates: Sequence[Candidate]) -> Task:
        """Every pair in both orders; equal texts score alike and are not compared."""
        limit = self.conversation.max_tokens
        ends = [self.conversation.last_part(candidate.text) for candidate in candidates]
        texts, where = distinct([self.conversation.as_text(end) for end in ends])
        pairs = pairs_of(len(texts), self._spec.opponents)
        encoded = self._encode(session.context, [(texts[i], texts[j]) for i, j in pairs])
        sequences = {key: Tokens(token_ids[-limit:]) for key, token_ids in enumerate(encoded)}

        def to_scores(preferences: list[float]) -> list[float]:
            means = mean_preferences(len(texts), pairs, preferences)
            return [means[place] for place in where]

        return self._task(session, sequences, to_scores, compare=True)

    def _encode(self, context: str, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Tokens of the request to compare, one list per pair of texts as a template takes them.

        Raises:
            InvalidRequest: the model's template rejects it.
        """
        # Not by str.format: texts may hold braces.
        head, between, middle, end = re.split(r"\{(?:context|a|b)\}", self._spec.template)
        head += context + between
        token_ids: list[list[int]] = []
        for part in in_parts(pairs):
            turns = [(Message("user", head + a + middle + b + end),) for a, b in part]
            token_ids += self.conversation.encode(self.conversation.written(turns))
        return token_ids
