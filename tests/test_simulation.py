"""Seeds that hold, equal runs of equal seeds, and defects that the simulation must find."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.simulation.defects import NOT_FOUND, first_found, listed
from tests.simulation.run import Simulation

NUM_REQUESTS = 100


@pytest.mark.parametrize("seed", [2, 3])
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


@pytest.mark.parametrize(
    ("part", "seed"), [("allowed runs", 0), ("later rounds", 0), ("counted twice", 1)]
)
def test_a_defect_is_found(part: str, seed: int) -> None:
    """`make simulation ARGS="--defects"` tries them all, and all seeds."""
    (defect,) = (texts for name, texts in listed().items() if part in name)
    found, violation = first_found(*defect, [seed])
    assert found != NOT_FOUND, violation
