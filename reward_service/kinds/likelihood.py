"""The log-likelihood of a response under a local language model: of its tokens, sum or mean.

An unfinished text is left open by default: closing it would score how likely it is to end here.
"""

from __future__ import annotations

from torch import Tensor
from transformers import AutoModelForCausalLM

from reward_service.checkpoint import load_model
from reward_service.conversation import Tokens
from reward_service.kinds.causal import CausalReward
from reward_service.kinds.lm_head import LMHead
from reward_service.specs import LikelihoodSpec, Resources


def load_likelihood(spec: LikelihoodSpec, resources: Resources) -> CausalReward:
    """A likelihood as a reward. Raises ValueError: the directory does not hold such a model."""
    model = load_model(spec, resources, AutoModelForCausalLM)

    def score(outputs: Tensor) -> float:
        logprobs = outputs[:, 0]
        total = float(logprobs.double().sum())
        return total / len(logprobs) if spec.mean else total

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
