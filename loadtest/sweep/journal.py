"""Every request of a sweep, on disk as soon as its block is over: JSON lines.

A block is added in one write and ends with a line of its own, so that a sweep that was stopped, or
killed, goes on with the first block that is not whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A round as its event told: seconds since the request began, and slots of the session."""

    at_s: float
    decision_token: int
    num_live: int
    session_slots: int
    freed_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request and how it ended; times are from the moment when it was due.

    `code` is a gRPC status, or GAVE_UP where its user did. Without an answer, what belongs to
    answers is 0.
    """

    block: str
    n: int
    prompt: int
    seed: int
    due_s: float  # since the block began
    late_s: float  # sent that much after it was due
    code: str
    seconds: float
    first_round_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0  # generated, of all candidates
    reward: float = 0.0
    complete: bool = False
    answer_tokens: int = 0
    score_s: float = 0.0  # of it, spent scoring
    rounds: tuple[RoundSeen, ...] = ()

    @property
    def answered(self) -> bool:
        return self.code == "OK"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a journal holds: its first line, blocks by key, requests by block."""

    head: Line
    blocks: dict[str, Line]
    requests: dict[str, list[Request]]


class Journal:
    """One file; made by the first write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, head: Line) -> None:
        """A new file that starts with this."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(head) + "\n", "utf-8")

    def add(self, requests: Iterable[Request], block: Line) -> None:
        """A whole block; `block` has its key as "block", and whatever else is known of it."""
        lines = [*(asdict(request) for request in requests), {**block, "ends": True}]
        with self._path.open("a", encoding="utf-8") as file:
            # A line that was torn by a kill must not swallow the next.
            file.write("" if self._path.read_bytes().endswith(b"\n") else "\n")
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def read(self) -> Kept | None:
        """None where there is nothing yet.

        Raises:
            ValueError: it is not a sweep's journal.
        """
        lines = _whole_lines(self._path)
        if not lines:
            return None
        if "settings" not in lines[0]:
            raise ValueError(f"{self._path} is not a sweep's journal")
        kept = Kept(lines[0], {}, {})
        waiting: list[Request] = []
        for line in lines[1:]:
            if not line.get("ends"):
                waiting.append(_request(line))
                continue
            key = line["block"]
            kept.blocks[key] = line
            # Lines of a block that was cut off may lie before.
            kept.requests[key] = [each for each in waiting if each.block == key][-line["size"] :]
            waiting = []
        return kept


def _whole_lines(path: Path) -> list[Line]:
    """All that parse; a line that was torn is nothing."""
    lines = []
    for text in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _request(line: Line) -> Request:
    rounds = tuple(RoundSeen(**each) for each in line["rounds"])
    return Request(**(line | {"rounds": rounds}))
