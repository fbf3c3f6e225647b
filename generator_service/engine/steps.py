"""Numbers that describe a generator at work, for telemetry; imports no telemetry itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrej.contracts import SlotGauge


@dataclass(frozen=True, slots=True)
class Load:
    """Slots and sessions at a moment; `waiting`: sessions that wait for slots."""

    slots: SlotGauge
    sessions: int
    waiting: int


@dataclass(slots=True)
class Step:
    """One forward pass: its duration, the candidates in it and the tokens it computed.

    `reused`: prompt tokens of newly admitted sessions that were stored, or being computed, already.
    """

    seconds: float = 0.0
    rows: int = 0
    generated: int = 0
    prefilled: int = 0
    reused: int = 0


OnStep = Callable[[Step], None]
