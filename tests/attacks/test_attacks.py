"""What `make attacks ARGS=--without` leaves out."""

from __future__ import annotations

from tests.attacks.__main__ import BURST, DEFENCES, PER_S, REFUSED
from tests.attacks.wire import ATTACKS
from tests.programs import ROOT


def test_defences_are_those_of_the_code() -> None:
    """Guards against a run without a defence that is there."""
    assert {*DEFENCES, *REFUSED} <= ATTACKS.keys()
    edge = (ROOT / "deploy/chart/files/envoy.yaml").read_text("utf-8")
    assert f"max_tokens: {BURST}, tokens_per_fill: {PER_S}, fill_interval: 1s" in edge
    for file, old, _ in DEFENCES.values():
        assert (ROOT / file).read_text("utf-8").count(old) == 1, old
