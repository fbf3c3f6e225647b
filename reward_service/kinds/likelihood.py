"""The log-likelihood of a response under a local language model, or the reward implied by DPO.

    score = beta * (log p(response | prompt) - log q(response | prompt))

summed or averaged over the response's tokens; q is the reference model, if there is one. With it,
this is the implicit reward of direct preference optimisation (Rafailov et al. 2023, arXiv
2305.18290, equation 5, without the term that is the same for all responses to a prompt).

An unfinished text is left open by default: closing it would score how likely it is to end here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reward_service.checkpoint import load_backbone
from reward_service.conversation import Tokenized
from reward_service.kinds.causal import CausalTask
from reward_service.kinds.causal_reward import CausalReward, CausalRewardSession, Reading
from reward_service.kinds.lm_head import LMHead
from reward_service.reward import Reward, finite_sum
from reward_service.specs import LikelihoodSpec, Resources
from specrej.contracts import Candidate, Prompt, Scores


class _Logprobs(Reading):
    """Reads every token that is followed by one of the response's."""

    def __init__(self, spec: LikelihoodSpec) -> None:
        self._spec = spec

    def marks(self, tokens: Tokenized) -> list[int]:
        """The positions before the response's tokens. For an empty open response, the last position
        is read, and the score is the log-probability of token 0."""
        last = len(tokens.token_ids) - 1
        if tokens.start > last:
            return [last]
        return list(range(max(0, tokens.start - 1), max(1, last)))

    def score(self, outputs: Tensor) -> float:
        logprobs = outputs[:, 0]
        total = float(logprobs.double().sum())
        return self._spec.beta * (total / len(logprobs) if self._spec.mean else total)


def load_likelihood(spec: LikelihoodSpec, resources: Resources) -> Reward:
    """A likelihood as a reward. Raises ValueError: a directory holds no such model."""
    own = _load_one(spec, resources)
    if spec.reference is None:
        return own
    return _Contrast(
        own, _load_one(spec.model_copy(update={"directory": spec.reference}), resources)
    )


def _load_one(spec: LikelihoodSpec, resources: Resources) -> CausalReward:
    model = load_backbone(spec, resources, with_lm_head=True)
    description = "A language model's log-likelihood of the response as the assistant's turn."
    head = LMHead(model).logprobs
    return CausalReward(
        spec, resources, description, model, head, _Logprobs(spec), looks_ahead=True
    )


class _Contrast:
    """The difference of two rewards; their passes are computed side by side."""

    description = "How much likelier a response is under a language model than under its reference."

    def __init__(self, own: CausalReward, reference: CausalReward) -> None:
        self.name = own.name
        self.fingerprint = f"{own.fingerprint}-{reference.fingerprint}"
        self.token_budget = own.token_budget
        self.rewards = (own, reference)

    def open(self, prompt: Prompt, *, once: bool = False) -> _ContrastSession:
        return _ContrastSession([reward.open(prompt, once=once) for reward in self.rewards])

    def compute(self, pieces: Sequence[tuple[int, Any]]) -> None:
        """One forward pass of each model that has pieces here."""
        for index, reward in enumerate(self.rewards):
            if own := [piece for which, piece in pieces if which == index]:
                reward.compute(own)


@dataclass(frozen=True, slots=True)
class _ContrastSession:
    sessions: Sequence[CausalRewardSession]

    def begin(self, candidates: Sequence[Candidate]) -> _ContrastTask:
        return _ContrastTask([session.begin(candidates) for session in self.sessions])

    def close(self) -> None:
        for session in self.sessions:
            session.close()


@dataclass(frozen=True, slots=True)
class _ContrastTask:
    """Pieces carry the index of their model."""

    tasks: Sequence[CausalTask]

    @property
    def next_tokens(self) -> int:
        return next((task.next_tokens for task in self.tasks if task.next_tokens), 0)

    def take(self) -> tuple[int, Any]:
        index = next(i for i, task in enumerate(self.tasks) if task.next_tokens)
        return index, self.tasks[index].take()

    def scores(self) -> Scores:
        own, reference = (task.scores() for task in self.tasks)
        pairs = zip(own.values, reference.values, strict=True)
        values = tuple(finite_sum((value, -subtracted)) for value, subtracted in pairs)
        return Scores(values, own.computed_tokens + reference.computed_tokens)
