"""What load tests measure: kinds of rows in Locust's statistics, and what answers cost and buy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from loadtest.workload import split_label


class Kind(StrEnum):
    """Types of the rows in Locust's statistics."""

    ANSWER = "answer"
    FAILED = "failed"  # separate rows: quick refusals must not lower the latency of answers
    # Of answers, in the columns of times; no calls, so kept out of Locust's totals.
    REWARD = "reward x 1000"


@dataclass(frozen=True, slots=True)
class Bought:
    """Generated answers of an algorithm, N and number of users; tokens and reward are means."""

    algorithm: str
    n: int
    users: int
    answers: int
    median_s: float
    p95_s: float
    tokens: float  # generated for an answer, those of rejected candidates included
    reward: float
    answers_per_s: float

    @property
    def cells(self) -> dict[str, Any]:
        """The fields as they are shown: floats as texts of four digits."""
        return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(self).items()}


def bought(rows: Iterable[Mapping[str, Any]], users: int) -> list[Bought]:
    """What answers cost and buy, by algorithm and N, of rows as Locust's page receives them."""
    by_kind: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if int(row["num_requests"]):
            by_kind[row["method"]][row["name"]] = row
    made = [
        Bought(
            *split_label(name),
            users,
            int(row["num_requests"]),
            float(row["median_response_time"]) / 1e3,
            float(row["response_time_percentile_0.95"]) / 1e3,
            float(row["avg_content_length"]),
            float(by_kind[Kind.REWARD][name]["avg_response_time"]) / 1e3,
            float(row["total_rps"]),
        )
        for name, row in by_kind[Kind.ANSWER].items()
    ]
    return sorted(made, key=lambda one: (one.algorithm, one.n))


def at_equal_reward(one: Bought, others: Sequence[Bought]) -> tuple[float, float]:
    """Tokens and median seconds for which `others`, in order of N, have the mean reward of `one`.

    Interpolated between two of them; those of the first or the last one if it is beyond them.
    """
    for before, after in pairwise([others[0], *others]):
        if after.reward > one.reward:
            share = max(0.0, (one.reward - before.reward) / (after.reward - before.reward or 1.0))
            tokens = before.tokens + share * (after.tokens - before.tokens)
            return tokens, before.median_s + share * (after.median_s - before.median_s)
    return others[-1].tokens, others[-1].median_s
