"""A reward without a model, for tests, demos and dry runs: the share of vowels in a response.

Deterministic, cheap, never NaN; like a real reward, a prefix's score resembles the answer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from reward_service.reward import Reward, distinct
from reward_service.specs import Resources, ToySpec
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scores


class ToyReward(Reward):
    """Scores in [0, 1]; an empty response scores 0. Its tokens are words."""

    fingerprint = fingerprint.of_values(kind="toy", version=1)
    description = "The share of vowels (a, e, i, o, u) among a response's characters; a toy."

    def __init__(self, name: str = "toy") -> None:
        self.name = name

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        """The prompt does not matter."""
        unique, where = distinct([candidate.text for candidate in candidates])
        lower = [text.lower() for text in unique]
        shares = [sum(map(text.count, "aeiou")) / max(1, len(text)) for text in lower]
        words = sum(len(text.split()) for text in unique)
        return Scores(tuple(shares[index] for index in where), words)


def load_toy(spec: ToySpec, resources: Resources) -> ToyReward:
    """The toy under the spec's name."""
    return ToyReward(spec.name)
