"""Preference pairs: what a reward is trained on, and how right it is about them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrej.contracts import Message, Prompt


class BadPairs(ValueError):
    """A file of pairs that cannot be read; says where."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and two answers to it."""

    prompt: Prompt
    chosen: str
    rejected: str


def read_pairs(path: Path) -> list[Pair]:
    """JSON lines of {prompt or messages, chosen, rejected}, gzipped or not.

    Raises:
        BadPairs: a line is something else.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    lines = enumerate(text.split("\n"), 1)
    return [_pair(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _pair(line: str, where: str) -> Pair:
    try:
        data = json.loads(line)
        turns = data.get("messages") or [{"role": "user", "content": data["prompt"]}]
        messages = tuple(Message(str(turn["role"]), str(turn["content"])) for turn in turns)
        pair = Pair(Prompt(messages=messages), data["chosen"], data["rejected"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        needs = "must be {prompt or messages, chosen, rejected}"
        raise BadPairs(f"{where}: {needs}: {error}") from None
    if not isinstance(pair.chosen, str) or not isinstance(pair.rejected, str):
        raise BadPairs(f"{where}: chosen and rejected must be texts")
    return pair


def share_right(margins: Sequence[float]) -> float:
    """The share of pairs whose chosen answer is ahead; ties count half."""
    if not margins:
        return math.nan
    return sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins) / len(
        margins
    )


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` (Wilson 1927)."""
    if not count:
        return math.nan, math.nan
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = z / (1 + z * z / count)
    spread *= math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - spread, middle + spread
