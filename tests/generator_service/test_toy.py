"""The shipped test double keeps the promises it stands in for."""

from __future__ import annotations

import pytest

from generator_service.toy import ToyGenerator
from specrej.contracts import Prompt, Sampling
from specrej.errors import InvalidRequest, Overloaded

PROMPT = Prompt.from_user("one two three")


async def test_it_accounts_for_slots_and_frees_them() -> None:
    generator = ToyGenerator(1000, end_every=10**9)
    async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 8) as session:
        assert (await session.extend(8)).slots.owned == 3 + 4 * 8
        assert (await session.prune({1, 2})).freed_slots == 2 * 8
        assert [c.id for c in (await session.extend(20)).candidates] == [1, 2]
    assert generator.ledger.owned == 0


async def test_it_refuses_what_does_not_fit() -> None:
    generator = ToyGenerator(100)
    with pytest.raises(InvalidRequest):
        async with generator.open(PROMPT, 50, Sampling(max_tokens=20), 8):
            raise AssertionError("must not open")
    async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 20):
        with pytest.raises(Overloaded):
            async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 20):
                raise AssertionError("must not open")
