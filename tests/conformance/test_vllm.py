"""What vLLM's own figures must say of the generator on it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from generator_service.vllm_engine import VLLMEngine
from generator_service.vllm_generator import Blocks, VLLMGenerator
from specrej.contracts import Sampling
from tests.conformance.conftest import Started
from tests.conformance.subjects import PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_pausing_and_cutting_compute_nothing_again(started: Started) -> None:
    """The prompt's whole blocks once, its rest by each candidate, and every token once.

    Guards the point of it all: survivors' keys and values stay where they are between rounds.
    """
    subject = await started.get("vllm")
    generator = subject.generator
    assert isinstance(generator, VLLMGenerator)
    subject.steps.clear()
    sampling = Sampling(max_tokens=100, seed=3, ignore_eos=True)
    async with generator.open(PROMPT, 6, sampling, 8, "read anew") as session:
        blocks = Blocks(generator.engine.block_tokens, session.prompt_tokens)
        for until, keep in ((8, [0, 2, 5]), (40, [2]), (99, [2])):
            ended = await session.extend(until)
            # What vLLM holds is never more than what the books say, so it takes nothing back.
            assert isinstance(generator.engine, VLLMEngine)
            assert 0 < generator.engine.used_slots <= ended.slots.owned
            await session.prune(keep)
    assert blocks.shared > 0
    rest = session.prompt_tokens - blocks.shared
    assert sum(step.prefilled for step in subject.steps) == session.prompt_tokens + 5 * rest
    assert sum(step.reused for step in subject.steps) == 5 * blocks.shared
    assert sum(step.generated for step in subject.steps) == 6 * 8 + 3 * 32 + 59
