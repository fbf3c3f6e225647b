"""Multi-head rewards with a gate, of the ArmoRM kind (Wang et al. 2024, arXiv 2406.12845).

A regression layer computes one reward per objective at the last token; a gating network at the
prompt's last token weighs them:

    score = sum over objectives of softmax(gate(prompt state) / T) * s * (rewards @ M)

with M the matrix that removes verbosity from the rewards, s the gate's scale. Weights are read by
the names in the authors' checkpoint; the code that comes with it is not run.

An unfinished text is closed by default, as these models were trained on whole conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from reward_service.checkpoint import Network, load_head, load_model
from reward_service.conversation import Tokens, Turns, load_conversation
from reward_service.kinds.causal import CausalReward
from reward_service.specs import GatedSpec, Resources
from specrej.contracts import Prompt


def load_gated(spec: GatedSpec, resources: Resources) -> CausalReward:
    """The reward of a gated model. Raises ValueError: the directory does not hold such a model."""
    load = partial(load_head, spec.directory, device=resources.device)
    regression, adjust = Network(load("regression_layer")), load("reward_transform_matrix")[""]
    gate, scale = (
        Network(load("gating.layers")),
        load("gating").get("logit_scale", torch.ones(1))[0],
    )
    heads = ("regression_layer.", "reward_transform_matrix", "gating.")
    model = load_model(spec, resources, heads=heads)
    temperature = getattr(model.config, "gating_temperature", 10.0)

    def head(states: Tensor, _: Tensor) -> Tensor:
        gates = F.softmax(gate(states) / temperature, dim=-1) * scale
        return torch.cat((gates, regression(states) @ adjust), dim=-1)

    conversation = load_conversation(spec, model.config)
    pattern: list[int] = conversation.tokenizer.encode(spec.gate_at, add_special_tokens=False)
    (tokens,) = Turns(conversation, Prompt.from_user("Hello?")).tokenize([("Hello.", True)])
    if _last_place(tokens.token_ids, pattern) < 0:
        raise ValueError(f"{spec.directory}: gate_at {spec.gate_at!r} is not in its conversations")

    def marks(tokens: Tokens) -> list[int]:
        """The gate's token is where the pattern begins the last time, as in the authors' code."""
        place = _last_place(tokens.token_ids, pattern)
        return sorted({max(0, place), len(tokens.token_ids) - 1})

    def score(outputs: Tensor) -> float:
        """From the gate and the rewards at each mark, [marks, 2 * objectives]."""
        gates, rewards = outputs.chunk(2, dim=-1)
        return float((gates[0] * rewards[-1]).sum())

    description = (
        "A gated sum of several objectives' rewards for the response as the assistant's turn."
    )
    return CausalReward(
        spec, resources, description, model, head, score, marks=marks, conversation=conversation
    )


def _last_place(token_ids: Sequence[int], pattern: list[int]) -> int:
    """Where the pattern begins the last time; -1: nowhere."""
    length = len(pattern)
    places = range(len(token_ids) - length, -1, -1)
    return next((i for i in places if list(token_ids[i : i + length]) == pattern), -1)
