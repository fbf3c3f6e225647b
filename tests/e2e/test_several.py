"""Several of each service as real processes: restarts without failures."""

from __future__ import annotations

import pytest

from benchmarks.harness import TOYS
from benchmarks.rolling import Load, rolling

pytestmark = [pytest.mark.e2e, pytest.mark.long]


async def test_everything_is_restarted_under_load() -> None:
    phases = await rolling(Load(clients=3, n=8, max_tokens=24, settle=1), TOYS)
    assert [failure for phase in phases for failure in phase.failures] == []
    assert {phase.restarted for phase in phases} == {
        "",
        *(
            f"{kind}{number}"
            for kind in ("orchestrator", "generator", "reward")
            for number in ("", "-2")
        ),
    }
    assert all(phase.answered for phase in phases)
