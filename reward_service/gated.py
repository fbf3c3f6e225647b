"""Multi-head rewards with a gate, of the ArmoRM kind (Wang et al. 2024, arXiv 2406.12845).

A regression layer gives one reward per objective at the last token; a gating network looks at the
prompt's last token and weighs them:

    score = sum over objectives of softmax(gate(prompt state) / T) * s * (rewards @ M)

with M the matrix that takes verbosity out of the rewards, s the gate's scale. Weights are read by
the names under which the authors publish theirs; their code, which comes along, is not run.

An unfinished text is closed by default, as these models were trained on whole conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reward_service.causal import CausalScorer
from reward_service.causal_reward import CausalReward, Options
from reward_service.checkpoint import load_head
from reward_service.conversation import Conversation, Tokenized
from specrej.contracts import Prompt


class _Gate:
    """[rows, hidden] -> weights of the objectives [rows, objectives]."""

    def __init__(self, weights: dict[str, Tensor], temperature: float) -> None:
        names = takewhile(
            lambda name: f"{name}.weight" in weights, map("layers.{}".format, count())
        )
        self._layers = [(weights[f"{n}.weight"], weights.get(f"{n}.bias")) for n in names]
        self._scale = weights.get("logit_scale", torch.ones(1))[0]
        self._temperature = temperature

    def __call__(self, states: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(self._layers):
            states = F.linear(states if not number else F.relu(states), weight, bias)
        return F.softmax(states / self._temperature, dim=-1) * self._scale


class _Gated:
    """Read at the gate's token and at the last one; each gives [gate, rewards]."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = list(pattern)

    def prepare(self, text: str, closed: bool) -> str:
        return text

    def marks(self, tokens: Tokenized) -> list[int]:
        """The gate's is where the pattern begins the last time, as in the authors' code."""
        ids, length = tokens.token_ids, len(self._pattern)
        places = range(len(ids) - length, -1, -1)
        found = next((i for i in places if ids[i : i + length] == self._pattern), 0)
        return sorted({found, len(ids) - 1})

    def score(self, values: Tensor) -> float:
        gates, rewards = values.chunk(2, dim=-1)
        return float((gates[0] * rewards[-1]).sum())


def load_gated(options: Options, *, gate_at: str) -> CausalReward:
    """`gate_at`: the text between prompt and response, whose first token closes the prompt, such as
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\\n\\n" for Llama 3.

    Raises:
        ValueError: the directory holds no such model; says why.
    """
    regression = load_head(options.directory, "regression_layer.weight")[""]
    model = options.backbone()
    config: Any = model.config
    gate = _Gate(
        _on(load_head(options.directory, "gating."), model.device),
        getattr(config, "gating_temperature", 10.0),
    )
    adjust = load_head(options.directory, "reward_transform_matrix")[""].to(model.device)
    regression = regression.to(model.device)

    def read(states: Tensor, _: Tensor) -> Tensor:
        states = states.float()
        return torch.cat((gate(states), F.linear(states, regression) @ adjust), dim=-1)

    conversation = options.conversation(config)
    pattern: list[int] = conversation.tokenizer.encode(gate_at, add_special_tokens=False)
    _check_pattern(options, conversation, pattern, gate_at)
    return CausalReward(
        options,
        options.fingerprint(kind="gated", gate_at=gate_at),
        "A gated sum of several objectives' rewards for the response as the assistant's turn.",
        conversation,
        CausalScorer(model, read, options.kept_tokens),
        _Gated(pattern),
    )


def _check_pattern(
    options: Options, conversation: Conversation, pattern: list[int], gate_at: str
) -> None:
    """Raises ValueError: it does not stand between a prompt and its response."""
    (tokens,) = conversation.turns(Prompt.from_user("Hello?")).tokenize(["Hello."], [True])
    ids, length = tokens.token_ids, len(pattern)
    if not any(ids[i : i + length] == pattern for i in range(len(ids))):
        raise ValueError(f"{options.directory}: gate_at {gate_at!r} is not in its conversations")


def _on(weights: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in weights.items()}
