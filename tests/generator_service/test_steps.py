"""What an engine tells of its steps: every token once, whatever becomes of the step."""

from __future__ import annotations

import pytest

from generator_service.engine import Engine, OpenCommand
from generator_service.model import CausalLM
from generator_service.steps import Step
from specrej.contracts import Sampling
from specrej.errors import SpecrejError
from tests.generator_service import tiny
from tests.generator_service.stepping import Recorder

PROMPT = [1, *(5 + 7 * i % 80 for i in range(80))]
ENDLESS = Sampling(max_tokens=12, seed=3, ignore_eos=True)


def test_tokens_of_steps_are_those_of_rounds() -> None:
    """Guards against tokens that metrics lose or make up; an equal prompt is read once."""
    steps: list[Step] = []
    engine = Engine(
        CausalLM(tiny.build()), 4000, prefill_chunk=32, prefix_cache_slots=400, on_step=steps.append
    )
    engine.start()
    made = 0
    for n in (6, 4):
        session_id, opened = engine.open(OpenCommand(PROMPT, n, ENDLESS, 4))
        opened.result(30)
        rounds = [engine.extend(session_id, 6).result(60)]
        engine.prune(session_id, {0, 1}).result(30)
        rounds.append(engine.extend(session_id, 12).result(60))
        made += sum(prefix.num_new for batch in rounds for prefix in batch.prefixes)
        engine.close(session_id).result(30)
    engine.stop()
    assert sum(step.generated for step in steps) == made == 6 * 6 + 2 * 6 + 4 * 6 + 2 * 6
    assert sum(step.prefilled for step in steps) == len(PROMPT)
    assert sum(step.reused for step in steps) == len(PROMPT)
    assert max(step.rows for step in steps) == 6 and all(step.seconds > 0 for step in steps)


def test_a_step_that_fails_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an engine that looks idle while all its steps fail."""
    steps: list[Step] = []
    model = Recorder(CausalLM(tiny.build()))
    engine = Engine(model, 4000, on_step=steps.append)
    engine.start()
    model.is_failing = True
    session_id, opened = engine.open(OpenCommand(PROMPT, 2, ENDLESS, 4))
    opened.result(30)
    with pytest.raises(SpecrejError):
        engine.extend(session_id, 6).result(60)
    engine.stop()
    assert [(step.generated, step.rows) for step in steps] == [(0, 0)]
