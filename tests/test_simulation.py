"""Seeds that hold, equal runs of equal seeds, and defects that the simulation must find."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from orchestrator.backends.sessions import FailoverSession
from orchestrator.cache import Flight, Lease, answers, single_flight
from orchestrator.edge import planning
from orchestrator.edge.admission import Admission
from tests.simulation.loop import Violation
from tests.simulation.run import Simulation

NUM_REQUESTS = 200
MAX_SEEDS = 400  # the rarest defect shows in one of 250


@pytest.mark.parametrize("seed", range(6))
def test_no_invariant_is_violated(seed: int) -> None:
    simulation = Simulation(seed, NUM_REQUESTS)
    simulation.run()
    assert simulation.outcomes["RUN"], "the case did not occur"


# Seeds that found a defect, with their numbers of requests.
FOUND = {
    "a release overtook the claim of a cancelled refresh": (100336, 500),
    "the check rejected a moved candidate's end, that of the second version": (500238, 500),
}


@pytest.mark.parametrize("defect", FOUND)
def test_a_seed_that_found_a_defect_holds(defect: str) -> None:
    Simulation(*FOUND[defect]).run()


def test_equal_seeds_are_equal_runs_in_any_process() -> None:
    """Guards against an order that depends on addresses or on hashes of strings."""
    digests = set()
    for hash_seed in ("1", "2"):
        command = (sys.executable, "-m", "tests.simulation", "--seed", "3", "--requests", "150")
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        printed = subprocess.check_output(command, env=environment, timeout=120)
        digests.add(json.loads(printed.splitlines()[-1])["digest_of_last"])
    assert digests == {Simulation(3, 150).run()}
    assert Simulation(4, 150).run() not in digests


async def _nothing(*_: object, **__: object) -> None:
    pass


def _release_unless_cancelled(
    self: Any, *arguments: Any, release: Any = Admission._release
) -> None:
    task = asyncio.current_task()
    if task and not task.cancelling():
        release(self, *arguments)


def _without_wake_up(self: Any, *arguments: Any, init: Any = Flight.__init__) -> None:
    init(self, *arguments)
    self._over = mock.Mock(wait=asyncio.Event().wait)


_enter, _publish, _keys = Admission.enter, Flight.publish, vars(planning)["cache_keys"]
# Each with a seed from which on it is searched for.
DEFECTS: dict[str, tuple[int, Any, str, Any]] = {
    "a cancelled request keeps its permit": (0, Admission, "_release", _release_unless_cancelled),
    "turns ignore the tenant": (15, Admission, "enter", lambda s, _, *rest: _enter(s, "", *rest)),
    "a lease is not released": (2, Lease, "release", _nothing),
    "sessions stay open": (0, FailoverSession, "__aexit__", _nothing),
    "keys ignore the tenant": (
        0,
        planning,
        "cache_keys",
        lambda request, **rest: _keys(request, **{**rest, "tenant": ""}),
    ),
    "the leader wakes no follower": (0, Flight, "__init__", _without_wake_up),
    "followers get the leader's deadline": (16, single_flight, "OWN_REASONS", ()),
    "hurried answers are for all": (
        85,
        Flight,
        "publish",
        lambda f, result, **_: _publish(f, result),
    ),
    "degraded answers are stored": (85, answers, "is_shareable", lambda _: True),
}


# An invariant, not a mutation that cannot be called.
FOUND_BY = r"(?s)^seed \d+: (?!.*(TypeError|AttributeError))"


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str) -> None:
    first, *patched = DEFECTS[defect]
    with mock.patch.object(*patched), pytest.raises(Violation, match=FOUND_BY):
        for seed in range(first, first + MAX_SEEDS):
            Simulation(seed, NUM_REQUESTS).run()
