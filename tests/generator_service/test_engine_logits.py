"""The engine's logits against plain transformers, for every supported architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from tests.generator_service import tiny
from tests.generator_service.stepping import (
    ENDLESS,
    PROMPT,
    Recorder,
    admitted,
    grown,
    result,
    steps,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = [3 + 11 * i % 89 for i in range(70)]


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_stored_prompt_gives_the_logits_of_a_new_one(name: str) -> None:
    """Guards against an answer that depends on whether the prompt was cached, and on where its
    chunks end, which other sessions' prompts decide.

    To the last bit: first draws come from the logits of the prompt's last token.
    """
    logits = []
    for chunk in (8, 1, 5):
        model = Recorder(CausalLM(tiny.build(name)))
        engine = Engine(model, 5000, prefill_chunk=chunk, prefix_cache_slots=1000)
        for _ in range(2):
            session_id = admitted(engine)
            grown(engine, session_id, 1)
            engine.close(session_id)
            logits.append(model.passes[-1].logits)
        assert model.num_prompt_tokens == len(PROMPT)
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-5)], ids=str
)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_over_shared_nodes_equal_plain_transformers(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of up to three nodes, one split while it is read; cuts and windows.

    Float64 has no rounding errors; float32 uses compiled code.
    """
    reference = tiny.build(name).to(dtype)
    model = Recorder(CausalLM(tiny.build(name).to(dtype)))
    engine = Engine(model, 5000, prefill_chunk=30)
    tails = [[5, 6, 7], [], PROMPT, [5, 6, 7]]
    prompts = [SYSTEM + tail for tail in tails] + [[*SYSTEM[:66], 90, 91]]
    sessions = [admitted(engine, prompt) for prompt in prompts[:2]]
    steps(engine, 2)
    for prompt in prompts[2:]:
        sessions.append(admitted(engine, prompt, sampling=replace(ENDLESS, seed=len(sessions))))
        engine.check_integrity()
    for until, keep in ((5, {0, 2}), (9, {2})):
        for running in [engine.extend(session_id, until) for session_id in sessions]:
            result(engine, running)
        for session_id in sessions:
            engine.prune(session_id, keep)
    assert model.num_prompt_tokens == 70 + 3 + 17 + 2
    for session_id, prompt in zip(sessions, prompts, strict=True):
        (prefix,) = grown(engine, session_id, 10).prefixes
        tiny.check_candidate(reference, prompt, prefix, model.passes[-1].logits[0], tolerance)
