"""All cases."""

from __future__ import annotations

from tests.faults import engines, load, processes, readers, redis_faults, rolling, starts, wire
from tests.faults.case import Case

CASES: tuple[Case, ...] = (
    *processes.CASES,
    *redis_faults.CASES,
    *readers.CASES,
    *wire.CASES,
    *load.CASES,
    *starts.CASES,
    *rolling.CASES,
    *engines.CASES,
)
