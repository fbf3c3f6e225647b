"""Seeds that hold, equal runs of equal seeds, and defects that the simulation must find."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from orchestrator.edge import planning, servicer
from orchestrator.edge.admission import Admission
from orchestrator.loop import rejection
from orchestrator.loop.progress import ProgressReporter
from specrej.contracts import TextDelta
from tests.simulation.loop import Violation
from tests.simulation.run import Simulation

NUM_REQUESTS = 100
MAX_SEEDS = 20


@pytest.mark.parametrize("seed", range(6))
def test_no_invariant_is_violated(seed: int) -> None:
    simulation = Simulation(seed, NUM_REQUESTS)
    simulation.run()
    assert simulation.outcomes["RUN"], "the case did not occur"


def test_equal_seeds_are_equal_runs_in_any_process() -> None:
    """Guards against an order that depends on addresses or on hashes of strings."""
    command = (sys.executable, "-m", "tests.simulation", "--seed", "3", "--requests", "60")
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    printed = subprocess.check_output(command, env=environment, timeout=120)
    digest = json.loads(printed.splitlines()[-1])["digest_of_last"]
    assert digest == Simulation(3, 60).run() != Simulation(4, 60).run()


def _release_unless_cancelled(
    self: Any, *arguments: Any, release: Any = Admission._release
) -> None:
    task = asyncio.current_task()
    if task and not task.cancelling():
        release(self, *arguments)


def _send_again(self: ProgressReporter, winner: Any) -> None:
    self._within.emit(TextDelta(winner.id, winner.text))
    self.sent = winner.text


_reversed = SimpleNamespace(**{**vars(asyncio), "Queue": asyncio.LifoQueue})
_enter, _keys = Admission.enter, vars(planning)["answer_key"]
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "a cancelled request keeps its permit": (Admission, "_release", _release_unless_cancelled),
    "keys ignore the tenant": (
        planning,
        "answer_key",
        lambda *given, **rest: _keys(*given, **{**rest, "tenant": ""}),
    ),
    "events are sent in reverse": (servicer, "asyncio", _reversed),
    "streamed text repeats": (ProgressReporter, "_send", _send_again),
    "of equal scores the higher id ranks first": (
        rejection,
        "rank",
        lambda scores, vetoed=(), truncated=(): sorted(
            scores, key=lambda c: (c in vetoed, c in truncated, -scores[c], -c)
        ),
    ),
}
# An invariant, not a mutation that cannot be called.
FOUND_BY = r"(?s)^seed \d+: (?!.*(TypeError|AttributeError))"


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str) -> None:
    with mock.patch.object(*DEFECTS[defect]), pytest.raises(Violation, match=FOUND_BY):
        for seed in range(MAX_SEEDS):
            Simulation(seed, NUM_REQUESTS).run()
