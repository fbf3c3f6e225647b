"""Seeds that hold, equal runs of equal seeds, and defects that the simulation must find."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.programs import ROOT
from tests.simulation.defects import NOT_FOUND, first_found, listed
from tests.simulation.run import Simulation


def test_a_seed_violates_no_invariant_and_is_the_same_run_in_any_process() -> None:
    """Guards against an order that depends on addresses or on hashes of strings."""
    command = (sys.executable, "-m", "tests.simulation", "--seed", "2", "--requests", "100")
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    printed = subprocess.check_output(command, env=environment, timeout=120)
    simulation = Simulation(2, 100)
    digest = json.loads(printed.splitlines()[-1])["digest_of_last"]
    assert digest == simulation.run() != Simulation(3, 10).run()
    assert simulation.outcomes["RUN"], "the case did not occur"


@pytest.mark.long
def test_defects_are_those_of_the_code() -> None:
    """Guards against a defect whose code has changed, which no run finds any more."""
    for file, old, _ in listed().values():
        assert (ROOT / file).read_text("utf-8").count(old) == 1, old


@pytest.mark.parametrize(
    ("part", "seed"), [("allowed runs", 0), ("later rounds", 0), ("counted twice", 1)]
)
def test_a_defect_is_found(part: str, seed: int) -> None:
    """`make simulation ARGS="--defects"` tries them all, and all seeds."""
    (defect,) = (texts for name, texts in listed().items() if part in name)
    found, violation = first_found(*defect, [seed])
    assert found != NOT_FOUND, violation
