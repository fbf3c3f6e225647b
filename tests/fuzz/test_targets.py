"""Parsers of untrusted input: mutations of valid examples raise only documented errors."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

SEEDS = seeds()


def test_every_target_has_seeds() -> None:
    assert set(SEEDS) == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_examples(name: str) -> None:
    """Guards against examples that are rejected at once, whose mutations reach no parser."""
    accepted = [TARGETS[name](data) for data in SEEDS[name]]
    assert any(accepted)


@pytest.mark.parametrize("name", TARGETS)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=64), seed=st.integers(0, 2**32))
def test_only_documented_errors_are_raised(name: str, data: bytes, seed: int) -> None:
    """Guards against crashes and leaked error texts by untrusted input."""
    TARGETS[name](data)
    TARGETS[name](_mutated(random.Random(seed), SEEDS[name], data))


def _mutated(chance: random.Random, examples: object, data: bytes) -> bytes:
    assert isinstance(examples, list)
    whole = bytearray(chance.choice(examples))
    for _ in range(chance.randrange(1, 4)):
        at, end = (chance.randrange(len(whole) + 1) for _ in range(2))
        whole[at : min(end, at + 8)] = chance.choice((b"", data[:8], chance.randbytes(1)))
    return bytes(whole)
