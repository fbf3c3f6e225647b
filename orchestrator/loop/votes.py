"""Votes of complete answers: which answer leads, and whether it can still lose.

Pure functions of numbers: no model, no wire, no clock. Standard library only.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specrej.contracts import ToolCall, Vote


class Ballot(NamedTuple):
    """What one candidate votes for, the weight of its vote, 0 or more, and its score."""

    candidate: int
    answer: str
    weight: float
    score: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: its weight, its voters, and the best of them by score; ties: the lower id."""

    answer: str
    weight: float
    voters: tuple[int, ...]
    best: int
    score: float

    @property
    def count(self) -> int:
        return len(self.voters)


def vote_of_calls(calls: Sequence[ToolCall]) -> str:
    """What an answer with these calls votes for: their names and arguments in order, whatever the
    spelling of the JSON. All answers without calls agree on "text"."""
    named = [{"name": call.name, "arguments": _plain(call.arguments)} for call in calls]
    if not named:
        return "text"
    chosen = named[0] if len(named) == 1 else named
    return json.dumps(chosen, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _plain(arguments: str) -> Any:
    def number(text: str) -> float:
        value = float(text)
        return int(value) if value.is_integer() else value

    return json.loads(arguments, parse_float=number)


def tally(ballots: Iterable[Ballot]) -> list[Choice]:
    """The answers by descending weight; ties by the best voter's score, then by its lower id."""
    by_answer: dict[str, list[Ballot]] = {}
    for ballot in ballots:
        by_answer.setdefault(ballot.answer, []).append(ballot)
    choices = []
    for answer, of in by_answer.items():
        best = min(of, key=lambda one: (-one.score, one.candidate))
        weight = math.fsum(one.weight for one in of)  # independent of their order
        voters = tuple(sorted(one.candidate for one in of))
        choices.append(Choice(answer, weight, voters, best.candidate, best.score))
    return sorted(choices, key=lambda choice: (-choice.weight, -choice.score, choice.best))


def is_decided(choices: list[Choice], vote: Vote, num_left: int) -> bool:
    """Whether the leading answer is safe while `num_left` candidates may still vote.

    Exact where a vote counts 1: even if all of them vote for the second, or for one that nobody has
    voted for yet, it leads; a tie is not safe, since the score decides it. With a
    `stop_probability` below 1 also once the leader is as probably the more frequent one of the two.
    """
    return bool(choices and num_left) and _is_safe(*_leaders(choices), vote, num_left)


def votes_needed(choices: list[Choice], vote: Vote, num_left: int) -> int:
    """The fewest of `num_left` further votes that decide, if all are for the leading answer."""
    first, second = _leaders(choices)

    def decide(more: int) -> bool:
        return _is_safe(first + more, second, vote, num_left - more)

    return min(num_left, 1 + bisect_left(range(1, num_left), True, key=decide))


def _leaders(choices: list[Choice]) -> tuple[int, int]:
    """The votes of the two leading answers."""
    first, second, *_ = [*(choice.count for choice in choices[:2]), 0, 0]
    return first, second


def _is_safe(first: int, second: int, vote: Vote, num_left: int) -> bool:
    if vote.weight == "one" and first > second + num_left:
        return True
    is_exact = vote.stop_probability == 1
    return not is_exact and probability_ahead(first, second) >= vote.stop_probability


def probability_ahead(count: int, other: int) -> float:
    """The probability that an answer with `count` votes is more frequent than one with `other`.

    Of the share p of the first one among the votes for both, under a uniform prior: P(p > 1/2) for
    Beta(count + 1, other + 1), as in adaptive consistency (Aggarwal et al. 2023, arXiv 2305.11860).
    In closed form: at most `count` heads in count + other + 1 tosses of a fair coin.
    """
    tosses = count + other + 1
    ways = all_ways = 1  # of tosses with so many heads, and with at most so many
    for heads in range(count):
        ways = ways * (tosses - heads) // (heads + 1)
        all_ways += ways
    return all_ways / (1 << tosses)
