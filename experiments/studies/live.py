"""Live runs that somebody has timed, as JSON: what a replay cannot know is seconds.

    {"machine": "...", "runs": [{"prompt_id": "...", "reward": "relevance", "max_tokens": 128,
      "algorithm": "best-of-n", "n": 64, "alpha": 0, "schedule": "no cuts", "seconds": 12.5,
      "score": 0.71, "as_replayed": true}, ...]}

Algorithms take turns on every prompt, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One request. algorithm: "best-of-n" or "speculative-rejection".

    as_replayed: whether its replay says the same of answer and tokens.
    """

    prompt_id: str
    reward: str
    max_tokens: int
    algorithm: str
    n: int
    seconds: float
    score: float
    alpha: float = 0.0
    schedule: str = "no cuts"
    as_replayed: bool = True

    @property
    def is_best_of_n(self) -> bool:
        return self.algorithm == "best-of-n"

    @property
    def key(self) -> tuple[str, int, float, str]:
        """Its setting."""
        return (self.algorithm, self.n, self.alpha, self.schedule)


@dataclass(frozen=True, slots=True)
class Live:
    """All of a file, and the machine they ran on."""

    machine: str
    runs: tuple[LiveRun, ...]

    def of(self, reward: str, max_tokens: int) -> tuple[LiveRun, ...]:
        """Those of one study."""
        return tuple(
            each for each in self.runs if each.reward == reward and each.max_tokens == max_tokens
        )


def read(path: Path) -> Live:
    """A file of live runs; fields that are not known here are left out.

    Raises:
        ValueError: it is not such a file.
    """
    kept: Any = json.loads(path.read_text("utf-8"))
    names = {field.name for field in fields(LiveRun)}
    try:
        runs = [
            LiveRun(**{name: value for name, value in each.items() if name in names})
            for each in kept["runs"]
        ]
        return Live(str(kept.get("machine", "")), tuple(runs))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not hold live runs: {error}") from error
