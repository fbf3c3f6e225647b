"""What a reward model is to the rest of the service; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrej.contracts import Prompt, Scores


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
