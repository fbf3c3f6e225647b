"""A fast part of `make attacks`."""

from __future__ import annotations

from deploy.local import edge
from tests.attacks.__main__ import DEFENCES, run
from tests.attacks.wire import ATTACKS
from tests.programs import ROOT
from tests.serving import need


async def test_fast_attacks_are_withstood() -> None:
    """Guards against an edge that an attack passes, and attacks that do not run. Durations are
    judged by `make attacks` alone."""
    need(edge.FETCHED, "Envoy: make envoy fetches it")
    problems = await run(["h2/continuation", "hold/slow-headers"], 1, without=False)
    assert not [problem for problem in problems.values() if not problem.startswith("p95")]


def test_defences_are_those_of_the_code() -> None:
    """Guards against a run without a defence that is there."""
    assert DEFENCES.keys() <= ATTACKS.keys()
    for file, old, _ in DEFENCES.values():
        assert (ROOT / file).read_text("utf-8").count(old) == 1, old
