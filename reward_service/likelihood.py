"""How likely a local language model finds a response: its own reward, or that of a DPO-trained one.

    score = beta * (log p(response | prompt) - log q(response | prompt))

summed or averaged over the response's tokens; q is the reference model, if there is one. With it,
this is the implicit reward of direct preference optimisation (Rafailov et al. 2023, arXiv
2305.18290, equation 5, without the term that is the same for all responses to a prompt).

An unfinished text is left open by default: what comes next is not said to be the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from reward_service.causal import CausalScorer
from reward_service.causal_reward import (
    CausalReward,
    CausalRewardSession,
    CausalRewardTask,
    Options,
)
from reward_service.conversation import Tokenized
from reward_service.reward import Reward
from reward_service.words import Words
from specrej.contracts import Candidate, Prompt, Scores


@dataclass(frozen=True, slots=True)
class Likelihood:
    """`mean`: per token, so that long responses do not lose for being long; else the sum."""

    beta: float = 1.0
    mean: bool = True


class _Logprobs:
    """Read at every token that is followed by one of the response's."""

    def __init__(self, likelihood: Likelihood) -> None:
        self._likelihood = likelihood

    def prepare(self, text: str, closed: bool) -> str:
        return text

    def marks(self, tokens: Tokenized) -> list[int]:
        """The last token is followed by nothing; an empty response is as likely as token 0 there,
        which is the end of texts, or some other token that does not come."""
        last = len(tokens.token_ids) - 1
        if tokens.start > last:
            return [last]
        return list(range(max(0, tokens.start - 1), max(1, last)))

    def score(self, values: Tensor) -> float:
        logprobs = values[:, 0]
        total = float(logprobs.double().sum())
        return self._likelihood.beta * (total / len(logprobs) if self._likelihood.mean else total)


def load_likelihood(
    options: Options, *, likelihood: Likelihood, reference: Path | None = None
) -> Reward:
    """Raises ValueError: a directory holds no such model; says why."""
    own = _load_one(options, likelihood)
    if reference is None:
        return own
    return _Contrast(own, _load_one(replace(options, directory=reference), likelihood))


def _load_one(options: Options, likelihood: Likelihood) -> CausalReward:
    model = options.backbone(with_words=True)
    words = Words(model)
    return CausalReward(
        options,
        options.fingerprint(kind="likelihood", likelihood=likelihood),
        "A language model's log-likelihood of the response as the assistant's turn.",
        options.conversation(model.config),
        CausalScorer(model, words.logprobs, options.kept_tokens, looks_ahead=True),
        _Logprobs(likelihood),
    )


class _Contrast:
    """The difference of two rewards, computed side by side."""

    description = "How much likelier a language model finds the response than its reference does."

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


class _ContrastSession:
    def __init__(self, sessions: Sequence[CausalRewardSession]) -> None:
        self._sessions = sessions

    def begin(self, candidates: Sequence[Candidate]) -> _ContrastTask:
        return _ContrastTask([session.begin(candidates) for session in self._sessions])

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class _ContrastTask:
    """Pieces carry the number of their model."""

    def __init__(self, tasks: Sequence[CausalRewardTask]) -> None:
        self._tasks = tasks

    @property
    def next_tokens(self) -> int:
        return next((task.next_tokens for task in self._tasks if task.next_tokens), 0)

    def take(self) -> tuple[int, Any]:
        index = next(i for i, task in enumerate(self._tasks) if task.next_tokens)
        return index, self._tasks[index].take()

    def scores(self) -> Scores:
        own, reference = (task.scores() for task in self._tasks)
        pairs = zip(own.values, reference.values, strict=True)
        values = tuple(math.fsum((mine, -theirs)) for mine, theirs in pairs)
        return Scores(values, own.computed_tokens + reference.computed_tokens)
