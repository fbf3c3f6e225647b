"""The log-likelihood of a response under a local language model, or the reward implied by DPO.

    score = beta * (log p(response | prompt) - log q(response | prompt))

summed or averaged over the response's tokens; q is the reference model, if there is one. With it,
this is the implicit reward of direct preference optimisation (Rafailov et al. 2023, arXiv
2305.18290, equation 5, without the term that is the same for all responses to a prompt).

An unfinished text is left open by default: closing it would score how likely it is to end here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from reward_service.checkpoint import load_model
from reward_service.conversation import Tokens
from reward_service.kinds.causal import CausalReward
from reward_service.kinds.lm_head import LMHead
from reward_service.reward import Reward, Task
from reward_service.specs import LikelihoodSpec, Resources
from specrej.contracts import Candidate, Prompt, Scores


def load_likelihood(spec: LikelihoodSpec, resources: Resources) -> Reward:
    """A likelihood as a reward. Raises ValueError: a directory does not hold such a model."""
    own = _load_one(spec, resources)
    if spec.reference is None:
        return own
    reference = spec.model_copy(update={"directory": spec.reference})
    return _Contrast(own, _load_one(reference, resources))


def _load_one(spec: LikelihoodSpec, resources: Resources) -> CausalReward:
    model = load_model(spec, resources, AutoModelForCausalLM)

    def score(outputs: Tensor) -> float:
        logprobs = outputs[:, 0]
        total = float(logprobs.double().sum())
        return spec.beta * (total / len(logprobs) if spec.mean else total)

    return CausalReward(
        spec,
        resources,
        "A language model's log-likelihood of the response as the assistant's turn.",
        model,
        LMHead(model).logprobs,
        score,
        marks=_before_the_response,
        looks_ahead=True,
    )


def _before_the_response(tokens: Tokens) -> list[int]:
    """Every position that is followed by a token of the response. For an empty open response, the
    last position is read, and the score is the log-probability of token 0."""
    last = len(tokens.token_ids) - 1
    if tokens.start > last:
        return [last]
    return list(range(max(0, tokens.start - 1), max(1, last)))


class _Contrast(Reward):
    """The difference of two rewards; their passes are computed side by side.

    A session is one of each; pieces carry the index of their reward.
    """

    description = "How much likelier a response is under a language model than under its reference."

    def __init__(self, own: CausalReward, reference: CausalReward) -> None:
        self.name = own.name
        self.fingerprint = f"{own.fingerprint}-{reference.fingerprint}"
        self.probe = own.probe
        self.token_budget = own.token_budget
        self.rewards = (own, reference)

    def open(self, prompt: Prompt, *, once: bool = False) -> list[Any]:
        return [reward.open(prompt, once=once) for reward in self.rewards]

    def begin(self, session: list[Any], candidates: Sequence[Candidate]) -> Task:
        pairs = zip(self.rewards, session, strict=True)
        tasks = [reward.begin(of_one, candidates) for reward, of_one in pairs]

        def pieces() -> Iterator[tuple[int, Any]]:
            for index, task in enumerate(tasks):
                while num_tokens := task.next_tokens:
                    yield num_tokens, (index, task.take())

        def finish(num_tokens: int) -> Scores:
            own, reference = (task.scores().values for task in tasks)
            pairs = zip(own, reference, strict=True)
            return Scores(tuple(value - subtracted for value, subtracted in pairs), num_tokens)

        return Task(pieces(), finish)

    def compute(self, pieces: Sequence[tuple[int, Any]]) -> None:
        """One forward pass of each model that has pieces here."""
        for index, reward in enumerate(self.rewards):
            if own := [piece for which, piece in pieces if which == index]:
                reward.compute(own)

    def free(self, session: list[Any]) -> None:
        for reward, of_one in zip(self.rewards, session, strict=True):
            reward.free(of_one)
