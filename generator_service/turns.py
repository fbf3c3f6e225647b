"""Turns of tenants in the passes of an engine; standard library only.

A pass takes work of the tenant that was served least, in rows per weight, until that tenant has no
more for this pass; so a tenant alone is served as if there were no turns. The difference between
two tenants that always have work is at most one unit of each: the rows that one session has in a
pass, or one chunk of a prompt. A tenant that was away, as between two rounds, is at most `CREDIT`
rows behind the others when it comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

# A pass costs about as much as this many rows before its first row.
LEAST_ROWS = 8
CREDIT = 128


class Turns:
    """The rows per weight that each tenant was served."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._virtual = 0.0  # of the tenant that was served least when the last pass began

    def take(self, lines: Mapping[str, tuple[float, Iterator[int]]]) -> None:
        """Serve one pass: `lines` has each tenant's weight, and an iterator that adds one unit of
        its work to the pass and returns the rows of it. Tenants without work are left out."""
        known = [self._served[tenant] for tenant in lines if tenant in self._served]
        self._virtual = max(self._virtual, min(known, default=self._virtual))
        served = {t: end for t, end in self._served.items() if end > self._virtual - CREDIT}
        for tenant in lines:
            served[tenant] = max(served.get(tenant, 0), self._virtual - CREDIT)
        self._served = served
        waiting, bound, is_empty = [*lines], math.inf, True
        while waiting:
            tenant = min(waiting, key=served.__getitem__)
            if served[tenant] > bound and not is_empty:
                return
            weight, line = lines[tenant]
            if rows := next(line, 0):
                served[tenant] += max(rows, LEAST_ROWS) / weight
                is_empty = False
            else:
                waiting.remove(tenant)
                bound = min(bound, served[tenant])
