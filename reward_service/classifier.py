"""Sequence classifiers: Bradley-Terry models, and regression heads with several labels.

The score is what the head says at the last token of the conversation: one label's logit, or a
weighted sum of several, and what is declared to be done to it.

An unfinished text is closed by default: these models were trained on whole conversations, and read
the reward off the tokens that close the last turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from reward_service.causal import CausalScorer
from reward_service.causal_reward import CausalReward, LastToken, Options
from reward_service.checkpoint import load_head
from specrej import fingerprint

# The tensor in a head's file that `training` writes, [hidden].
HEAD_TENSOR = "head"

# What `training` writes beside it: {"backbone", "head", "adapter"}, paths from where it is.
MANIFEST = "reward.json"


@dataclass(frozen=True, slots=True)
class Transform:
    """scale * f(logit) + offset, f being the identity or the logistic function."""

    kind: Literal["identity", "sigmoid"] = "identity"
    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, logit: float) -> float:
        if self.kind == "sigmoid":
            # Without an overflow on either side.
            logit = 0.5 * (1 + math.tanh(0.5 * logit))
        return self.scale * logit + self.offset


class _Logits(LastToken):
    def __init__(self, label_weights: Sequence[float], transform: Transform) -> None:
        self._label_weights = label_weights
        self._transform = transform

    def score(self, values: Tensor) -> float:
        logits: list[float] = values[-1].tolist()
        pairs = zip(logits, self._label_weights, strict=True)
        return self._transform(math.fsum(logit * weight for logit, weight in pairs))


def load_classifier(
    options: Options,
    *,
    head: Path | None = None,
    adapter: Path | None = None,
    label_weights: Sequence[float] = (1.0,),
    transform: Transform | None = None,
) -> CausalReward:
    """A decoder-only model with `score.weight` [labels, hidden] on its last token, or a directory
    that `training` has written.

    head: a file that `training` has written, for a directory that holds the backbone only;
    adapter: a directory with LoRA weights of it; label_weights: one for each label.

    Raises:
        ValueError: the directory holds no such model; says why.
    """
    if (manifest := options.directory / MANIFEST).is_file():
        if head or adapter:
            raise ValueError(f"{manifest} names its own head: leave out head and adapter")
        told = {name: options.directory / path for name, path in _read(manifest).items()}
        options = replace(options, directory=told["backbone"])
        head, adapter = told["head"], told.get("adapter")
    transform = transform or Transform()
    weight, bias = _head(options.directory, head, len(label_weights))
    model = options.backbone()
    if adapter:
        # Peft takes a second to load, and only adapters need it.
        from reward_service import lora

        model = lora.merged(model, adapter)
    if weight.shape[1] != model.config.hidden_size:
        shape, hidden = [*weight.shape][1:], model.config.hidden_size
        raise ValueError(
            f"{head or options.directory}: a head of {shape}, the backbone has {hidden}"
        )
    weight, bias = weight.to(model.device), bias.to(model.device)

    def read(states: Tensor, _: Tensor) -> Tensor:
        return torch.nn.functional.linear(states.float(), weight, bias)

    digests = [
        fingerprint.of_file(head) if head else "",
        fingerprint.of_directory(adapter) if adapter else "",
    ]
    return CausalReward(
        options,
        options.fingerprint(
            kind="classifier", heads=digests, labels=tuple(label_weights), transform=transform
        ),
        "A reward model's logit for the response as the assistant's turn.",
        options.conversation(model.config),
        CausalScorer(model, read, options.kept_tokens),
        _Logits(label_weights, transform),
    )


def _read(manifest: Path) -> dict[str, str]:
    """Raises ValueError: the file says something else."""
    try:
        told: dict[str, str] = json.loads(manifest.read_text())
        if {"backbone", "head"} <= told.keys() <= {"backbone", "head", "adapter"}:
            return told
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"{manifest}: must be a JSON object of backbone, head and adapter")


def _head(directory: Path, head: Path | None, num_labels: int) -> tuple[Tensor, Tensor]:
    """Weight [labels, hidden] and bias [labels].

    Raises:
        ValueError: there is none, or it has another number of labels.
    """
    if head:
        try:
            return load_head(head, HEAD_TENSOR)[""][None], torch.zeros(1)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{head}: not a reward's head: {error}") from None
    try:
        found = load_head(directory, "score.")
        weight = found["weight"]
    except (KeyError, ValueError):
        reason = "not a trained decoder-only classifier, lacks score.weight"
        raise ValueError(f"{directory}: {reason}") from None
    if len(weight) != num_labels:
        raise ValueError(
            f"{directory}: has {len(weight)} labels, label_weights has {num_labels} of them"
        )
    return weight, found.get("bias", torch.zeros(len(weight)))
