"""The shipped test double, beyond tests/conformance."""

from __future__ import annotations

import time

import pytest

from generator_service.toy import is_toy, load_toy
from specrej.contracts import Prompt, Sampling, SessionSpec

PROMPT = Prompt.from_user("one two three")


async def test_options_of_a_toy_are_in_its_name() -> None:
    """Guards against faults that come after the end of the toy's answers."""
    toy = load_toy("toy:step_ms=20,failing_seed=13", 1000)
    async with toy.open(SessionSpec(PROMPT, 2, Sampling(max_tokens=20), 8)) as session:
        began = time.monotonic()
        await session.extend(5)
        assert time.monotonic() - began >= 5 * 0.02
    with pytest.raises(RuntimeError):
        async with toy.open(SessionSpec(PROMPT, 2, Sampling(max_tokens=20, seed=13), 8)) as session:
            await session.extend(20)
    assert toy.ledger.owned == 0


@pytest.mark.parametrize("name", ["toy:step_ms=x", "toy:speed=9", "toy:failing_seed=1.5"])
def test_unknown_options_of_a_toy_are_refused(name: str) -> None:
    """Guards against misspelt options without effect."""
    assert is_toy(name)
    assert not is_toy("toys")
    with pytest.raises(FileNotFoundError, match="no such toy"):
        load_toy(name, 1000)
