"""The shipped test double keeps the promises it stands in for."""

from __future__ import annotations

import time

import pytest

from generator_service.toy import ToyGenerator, is_toy, load_toy
from specrej.contracts import FinishReason, Prompt, Sampling
from specrej.errors import InvalidRequest, Overloaded

PROMPT = Prompt.from_user("one two three")


async def test_it_accounts_for_slots_and_frees_them() -> None:
    generator = ToyGenerator(1000, end_every=10**9)
    async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 8) as session:
        assert (await session.extend(8)).slots.owned == 3 + 4 * 8
        assert (await session.prune({1, 2})).freed_slots == 2 * 8
        assert [c.id for c in (await session.extend(20)).candidates] == [1, 2]
    assert generator.ledger.owned == 0


async def test_nothing_ends_before_min_tokens() -> None:
    """Guards against tests of min_tokens that pass on a toy that ignores it."""
    sampling = Sampling(max_tokens=20, min_tokens=7)
    async with ToyGenerator(end_every=1).open(PROMPT, 4, sampling, 8, "salt") as session:
        assert all(c.finish is None for c in (await session.extend(7)).candidates)
        assert [c.num_tokens for c in (await session.extend(20)).candidates] == [8] * 4


async def test_min_tokens_may_be_max_tokens() -> None:
    """Guards against a candidate that may never end, not even at max_tokens."""
    sampling = Sampling(max_tokens=7, min_tokens=7)
    async with ToyGenerator(end_every=1).open(PROMPT, 4, sampling, 7) as session:
        ended = await session.extend(7)
    assert {c.finish for c in ended.candidates} == {FinishReason.LENGTH}


async def test_logprobs_are_those_of_the_rounds_own_tokens() -> None:
    """Guards against logprobs told twice, and a sum that says something else than its parts."""
    generator, sampling = ToyGenerator(end_every=10**9), Sampling(max_tokens=20, logprobs=True)
    async with generator.open(PROMPT, 2, sampling, 8) as session:
        rounds = [await session.extend(until) for until in (8, 20)]
    for first, second in zip(*(ended.candidates for ended in rounds), strict=True):
        assert (len(first.new_logprobs), len(second.new_logprobs)) == (8, 12)
        assert sum(first.new_logprobs + second.new_logprobs) == pytest.approx(second.logprob)


async def test_no_logprobs_unless_asked_for() -> None:
    """Guards against a toy more talkative than the engine it stands in for."""
    async with ToyGenerator().open(PROMPT, 2, Sampling(max_tokens=20), 8) as session:
        assert not any(c.new_logprobs for c in (await session.extend(8)).candidates)


async def test_it_refuses_what_does_not_fit() -> None:
    generator = ToyGenerator(100)
    with pytest.raises(InvalidRequest):
        async with generator.open(PROMPT, 50, Sampling(max_tokens=20), 8):
            raise AssertionError("must not open")
    async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 20):
        with pytest.raises(Overloaded):
            async with generator.open(PROMPT, 4, Sampling(max_tokens=20), 20):
                raise AssertionError("must not open")


async def test_its_name_says_how_it_behaves() -> None:
    """Guards against fault tests that hit nothing, as the toy was done before them."""
    toy = load_toy("toy:step_ms=20,failing_seed=13", 1000)
    async with toy.open(PROMPT, 2, Sampling(max_tokens=20), 8) as session:
        began = time.monotonic()
        await session.extend(5)
        assert time.monotonic() - began >= 5 * 0.02
    with pytest.raises(RuntimeError):
        async with toy.open(PROMPT, 2, Sampling(max_tokens=20, seed=13), 8) as session:
            await session.extend(20)
    assert toy.ledger.owned == 0


@pytest.mark.parametrize("name", ["toy:step_ms=x", "toy:speed=9", "toy:failing_seed=1.5"])
def test_there_is_no_such_toy(name: str) -> None:
    """Guards against an option with a slip in it that then does nothing."""
    assert is_toy(name)
    assert not is_toy("toys")
    with pytest.raises(FileNotFoundError, match="no such toy"):
        load_toy(name, 1000)
