"""Rounds that end because the slots are full, and N by the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from generator_service.toy import ToyGenerator
from specrej.contracts import (
    PLAIN,
    Forks,
    Generator,
    Pruned,
    Report,
    Round,
    RoundEnd,
    Schedule,
    SessionSpec,
)
from tests.orchestrator.runs import PROMPT, FixedScorer, answer, request


async def test_rounds_of_full_blocks_grow_soon() -> None:
    """Guards against rounds that release one candidate, grow by nothing and score all again, also
    where a token may need a block of slots, as on vLLM."""
    toy = ToyGenerator(1000 * 30, end_every=10**9)

    class Blocks:
        """Slots for 120 blocks of 8 tokens."""

        @asynccontextmanager
        async def open(self, spec: SessionSpec) -> AsyncIterator[Any]:
            async with toy.open(spec) as session:
                self.session, self.live, self.n = session, spec.n, spec.n
                self.prompt_tokens, self.reduced = session.prompt_tokens, False
                self.max_tokens = session.max_tokens
                self.fingerprint, self.costly_rounds = "", False
                self.answer_form = PLAIN
                yield self

        async def extend(self, until_tokens: int, report: Report | None = None) -> Round:
            most = 8 * (120 // self.live)
            ended = await self.session.extend(min(until_tokens, most))
            is_full = most < until_tokens
            return replace(ended, ended_by=RoundEnd.SLOTS_FULL) if is_full else ended

        async def prune(self, keep: Collection[int], forks: Forks) -> Pruned:
            self.live = len(keep)
            return await self.session.prune(keep, forks)

    never = request(40, 60, alpha=0.0, schedule=Schedule("memory", first=4))
    rounds = (await answer(never, cast(Generator, Blocks()), FixedScorer())).rounds
    positions = Counter(trace.decision_token for trace in rounds)
    assert len(positions) > 4 and max(positions.values()) < 4, positions


@pytest.mark.parametrize(("first", "n"), [(16, 8), (32, 4), (200, 2)])
async def test_the_memory_decides_n_by_the_first_decision_token(first: int, n: int) -> None:
    """As in the paper: all slots are full at the first cut. No cut before max_tokens: 2 fit."""
    prompt_slots = len(PROMPT.turns[0].content.split())
    generator = ToyGenerator(8 * 16 + prompt_slots, end_every=10**9)
    open_n = request(0, 64, schedule=Schedule("memory", first=first))
    generation = await answer(open_n, generator, FixedScorer())
    ended = generation.rounds[0]
    assert (generation.n, ended.decision_token) == (n, min(first, 64))
    assert n * ended.decision_token == 8 * 16  # all slots
