"""What a reward model is to the rest of the service; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specrej.contracts import Candidate, Prompt, Scores


class Reward(Protocol):
    """Judges responses to a prompt; called by one thread at a time, always the same one."""

    @property
    def name(self) -> str:
        """The name to ask for."""

    @property
    def fingerprint(self) -> str:
        """Digest of weights and settings."""

    @property
    def description(self) -> str:
        """What it measures, in a sentence."""

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Scores:
        """One finite score per text, higher is better; texts may be empty.

        `computed_tokens` counts the tokens that the model computed, padding left out.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """


class RewardSession(Protocol):
    """One reward, bound to one prompt; called by the reward's thread."""

    def score(self, candidates: Sequence[Candidate]) -> Scores:
        """One finite score per candidate; those missing from the batch are forgotten."""

    def close(self) -> None:
        """Free what is kept."""


@runtime_checkable
class KeepingReward(Protocol):
    """A reward that keeps what it has computed of a prompt's growing texts."""

    def open(self, prompt: Prompt) -> RewardSession:
        """A session that keeps nothing yet.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """


@dataclass(frozen=True, slots=True)
class ForgetfulSession:
    """A session of a reward that keeps nothing but the prompt."""

    reward: Reward
    prompt: Prompt

    def score(self, candidates: Sequence[Candidate]) -> Scores:
        return self.reward.score(self.prompt, [candidate.text for candidate in candidates])

    def close(self) -> None:
        """There is nothing to free."""


def open_session(reward: Reward, prompt: Prompt) -> RewardSession:
    """Raises InvalidRequest where the model cannot take this prompt, now or at the first batch."""
    if isinstance(reward, KeepingReward):
        return reward.open(prompt)
    return ForgetfulSession(reward, prompt)
