"""All cases."""

from __future__ import annotations

from tests.faults import engines, processes, redis_faults, rolling, wire
from tests.faults.case import Case

CASES: tuple[Case, ...] = (
    *processes.CASES,
    *redis_faults.CASES,
    *wire.CASES,
    *rolling.CASES,
    *engines.CASES,
)
