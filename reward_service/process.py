"""Process rewards: every step of a response is scored, and the steps' scores become one.

A step ends with a separator in the response; in its place the model sees its own step token, and
is read there. The token is put between the tokens of the steps, as merges of neighbouring letters
would hide it; models that were trained on whole texts get it as text. What is read is the
probability of the good label of a token classifier, or of the good word against the bad one of a
language model (Math-Shepherd, arXiv 2312.08935).

An unfinished text is left open by default: a step is judged where it ends, and what is half written
says nothing yet. As long as no step has ended, what there is counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from reward_service.causal import CausalScorer, Read
from reward_service.causal_reward import CausalReward, Options
from reward_service.checkpoint import load_head
from reward_service.conversation import SPLICE, Conversation, Tokenized
from reward_service.words import Words, single_token
from specrej.contracts import Prompt


@dataclass(frozen=True, slots=True)
class Steps:
    """How a response falls into steps, and what the model says of each.

    separator ends a step in a response; token, one token of the model's, stands there instead; or
    text, which holds it, where the model was trained on texts that were tokenised whole.
    good and bad: words whose probabilities are compared; where they are empty, the model is a token
    classifier and good_label the index of the label that means good.
    """

    separator: str = "\n\n"
    token: str = "\n\n"
    text: str = ""
    good: str = ""
    bad: str = ""
    good_label: int = 1
    aggregate: Literal["last", "min", "mean"] = "min"


class _StepReading:
    def __init__(self, steps: Steps, step_token: int) -> None:
        self._steps = steps
        self._step_token = step_token
        self.separator = steps.separator

    def prepare(self, text: str, closed: bool) -> str:
        """Every step that has ended, and its token; of an open text, also the rest."""
        *ended, rest = text.replace(SPLICE, "").split(self._steps.separator)
        ended = [step for step in ended if step.strip()]
        if rest.strip() and (closed or not ended):
            ended, rest = [*ended, rest], ""
        return "".join(step + (self._steps.text or SPLICE) for step in ended) + rest

    def marks(self, tokens: Tokenized) -> list[int]:
        own = range(tokens.start, len(tokens.token_ids))
        found = [i for i in own if tokens.token_ids[i] == self._step_token]
        return found or [len(tokens.token_ids) - 1]  # an empty response has no step

    def score(self, values: Tensor) -> float:
        good = values[:, 0]
        match self._steps.aggregate:
            case "last":
                return float(good[-1])
            case "min":
                return float(good.min())
            case "mean":
                return float(good.mean())


def load_process(options: Options, *, steps: Steps) -> CausalReward:
    """Raises ValueError: the directory holds no such model; says why."""
    with_words = bool(steps.good)
    model = options.backbone(with_words=with_words)
    conversation = options.conversation(model.config)
    tokenizer = conversation.tokenizer
    step_token = single_token(tokenizer, steps.token, "the step token")
    conversation.spliced_token = None if steps.text else step_token
    reading = _StepReading(steps, step_token)
    _check_steps(options, conversation, reading)
    if with_words:
        pair = [single_token(tokenizer, word, "the word") for word in (steps.good, steps.bad)]
        read = Words(model).preferring(pair)
    else:
        read = _by_labels(options, steps.good_label, model.device)
    return CausalReward(
        options,
        options.fingerprint(kind="process", steps=steps),
        f"The {steps.aggregate} of the probabilities that the response's steps are good.",
        conversation,
        CausalScorer(model, read, options.kept_tokens),
        reading,
    )


def _check_steps(options: Options, conversation: Conversation, reading: _StepReading) -> None:
    """Raises ValueError: the model's tokens do not show where a step ends."""
    text = reading.prepare("One is one.\n\nTwo is two.".replace("\n\n", reading.separator), True)
    (tokens,) = conversation.turns(Prompt.from_user("Count.")).tokenize([text], [True])
    if len(reading.marks(tokens)) != 2:
        reason = "the step token is not found in whole texts: leave out step_text, or write it so"
        raise ValueError(f"{options.directory}: {reason} that it stays one token")


def _by_labels(options: Options, good_label: int, device: torch.device) -> Read:
    """A linear head, or two layers with a ReLU between (Qwen2.5-Math-PRM, arXiv 2501.07301)."""
    found = load_head(options.directory, "score.")
    layers = [""] if "weight" in found else ["0.", "2."]
    try:
        weights: list[Any] = [
            (found[f"{n}weight"].to(device), _to(found.get(f"{n}bias"), device)) for n in layers
        ]
    except KeyError as error:
        raise ValueError(f"{options.directory}: lacks score.{error.args[0]}") from None
    num_labels = len(weights[-1][0])
    if not 0 <= good_label < num_labels:
        raise ValueError(f"{options.directory}: has {num_labels} labels, none is {good_label}")

    def read(states: Tensor, _: Tensor) -> Tensor:
        states = states.float()
        for number, (weight, bias) in enumerate(weights):
            states = F.linear(F.relu(states) if number else states, weight, bias)
        return F.softmax(states, dim=-1)[:, good_label, None]

    return read


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return tensor if tensor is None else tensor.to(device)
