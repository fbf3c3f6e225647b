"""Failures, minimum lengths, shared prompts and steps of one engine.

`test_engine_machine` covers the life of random sessions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import pytest
import torch

from generator_service.engine import commands
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from specrej.contracts import FinishReason, Sampling
from specrej.contracts.errors import InternalError, OutOfOrder, SessionExpired
from specrej_models.attention import DecodeSegment, Segment
from specrej_models.kv import SuffixKV
from tests.generator_service import tiny
from tests.generator_service.stepping import (
    ENDLESS,
    MODEL,
    PROMPT,
    Recorder,
    admitted,
    alone,
    grown,
    opened,
    result,
    steps,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_no_bit_depends_on_the_number_of_candidates() -> None:
    """Guards against products that depend on the number of rows: after a prompt of 90 tokens,
    128 candidates drew other tokens than 8."""
    engine = Engine(MODEL, 20_000)
    prompt = [1, *(5 + 7 * i % 80 for i in range(89))]
    made: list[dict[int, commands.GrowingCandidate]] = []
    for n in (128, 8):
        session_id = admitted(engine, prompt, n)
        made.append({prefix.id: prefix for prefix in grown(engine, session_id).prefixes})
        engine.close(session_id)
    many, few = made
    assert {number: many[number] for number in few} == few


def test_commands_out_of_order() -> None:
    engine = Engine(MODEL, 5000)
    session_id = admitted(engine)
    growing = engine.extend(session_id, 24)
    with pytest.raises(OutOfOrder):
        engine.prune(session_id, {0})
    engine.close(session_id)
    assert growing.cancelled()
    with pytest.raises(SessionExpired):
        engine.extend(session_id, 5)


# Failures


def test_a_failure_between_two_commands_is_the_next_ones() -> None:
    """Guards against a bug that looks like an expired session, which is moved and fails again."""
    model = Recorder(MODEL)
    engine = Engine(model, 100)
    session = admitted(engine, n=2, first=4)
    model.is_failing = True
    engine.step()  # the prompt is read before a round begins
    with pytest.raises(InternalError):
        engine.extend(session, 4)
    engine.close(session)
    with pytest.raises(SessionExpired):
        engine.extend(session, 4)
    idle = admitted(engine, n=2, first=4)
    engine.start_over(InternalError("a bug"))
    with pytest.raises(SessionExpired):  # no fault of this one: it may be moved
        engine.extend(idle, 4)


class FailsFor:
    """A model whose passes fail if they have rows of these sessions."""

    def __init__(self) -> None:
        self.shape, self.eos_ids = MODEL.shape, MODEL.eos_ids
        self.culprits: list[SuffixKV] = []

    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> torch.Tensor:
        suffixes = [segment.suffix for segment in segments if isinstance(segment, DecodeSegment)]
        if any(suffix in self.culprits for suffix in suffixes):
            # What a pass has stored when it fails is wrong.
            MODEL.forward([1] * len(token_ids), positions, segments, last)
            raise MemoryError
        return MODEL.forward(token_ids, positions, segments, last)


@pytest.mark.parametrize("culprits", [{3}, {1, 4}, {0, 1, 2, 3, 4}])
def test_a_step_that_fails_ends_only_the_sessions_that_cause_it(culprits: set[int]) -> None:
    """Guards bystanders of a failure: their tokens are those of a run without it, to the bit."""
    model = FailsFor()
    engine = Engine(model, 20_000)
    samplings = [replace(ENDLESS, seed=seed) for seed in range(5)]
    ids = [admitted(engine, PROMPT[: 9 + i], 2 + i, s) for i, s in enumerate(samplings)]
    growing = [engine.extend(session_id, 24) for session_id in ids]
    steps(engine, 5)
    model.culprits = [engine.sessions[ids[i]].suffix for i in culprits]
    late = admitted(engine)  # its prompt is read in the step that fails
    last = engine.extend(late, 24)
    steps(engine)
    for i, future in enumerate(growing):
        if i in culprits:
            with pytest.raises(InternalError):
                future.result(0)
        else:
            undisturbed = Engine(MODEL, 20_000)
            session_id = admitted(undisturbed, PROMPT[: 9 + i], 2 + i, samplings[i])
            expected = grown(undisturbed, session_id).prefixes
            assert future.result(0).prefixes == expected  # log-probabilities, too
            engine.close(ids[i])
    assert tokens_of(last.result(0)) == alone()
    engine.close(late)
    assert engine.ledger.owned == 0
    engine.check_integrity()


@pytest.mark.parametrize(
    "sampling",
    [ENDLESS, replace(ENDLESS, top_p=0.9), replace(ENDLESS, top_k=5), replace(ENDLESS, min_p=0.1)],
)
def test_logits_that_are_not_finite_end_their_session(sampling: Sampling) -> None:
    """Guards against answers of the first or the last token of the vocabulary, and bystanders
    against a step that fails for them."""
    broken = tiny.build()
    engine = Engine(CausalLM(broken, tiny.END_IDS), 20_000)
    with torch.no_grad():  # afterwards: such weights are refused at load
        broken.get_input_embeddings().weight[90] = float("nan")
    good = engine.extend(admitted(engine, PROMPT, 2, sampling), 8)
    bad = engine.extend(admitted(engine, [*PROMPT, 90], 2, sampling), 8)
    steps(engine)
    with pytest.raises(InternalError):
        bad.result(0)
    assert [len(prefix.token_ids) for prefix in good.result(0).prefixes] == [8, 8]
    engine.check_integrity()


class StopsAt:
    """Stop texts that the given number of tokens complete, by default the first."""

    def __init__(self, num_tokens: int = 1) -> None:
        self.left = num_tokens

    def __call__(self, token_id: int) -> bool:
        self.left -= 1
        return self.left <= 0

    def copy(self) -> Self:
        return type(self)(self.left)


def test_no_memory_for_a_suffix_ends_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a failed allocation that ends all sessions."""
    engine = Engine(MODEL, 5000)
    others, poor = admitted(engine), admitted(engine)
    store = engine.sessions[poor].suffix
    reserve = SuffixKV.reserve

    def exhausted(suffix: SuffixKV, tokens_room: int, slots: int = 0) -> None:
        if suffix is store:
            raise MemoryError
        reserve(suffix, tokens_room, slots)

    monkeypatch.setattr(SuffixKV, "reserve", exhausted)
    running, failing = engine.extend(others, 24), engine.extend(poor, 24)
    assert result(engine, running).num_tokens == 24
    with pytest.raises(InternalError):
        failing.result(0)
    engine.close(others)
    assert engine.ledger.owned == 0
    engine.check_integrity()


# min_tokens and stop texts


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 1), (5, 5), (24, 24)])
def test_a_stop_text_counts_from_min_tokens_on(min_tokens: int, length: int) -> None:
    engine = Engine(MODEL, 5000)
    sampling = replace(ENDLESS, min_tokens=min_tokens)
    command = commands.OpenCommand(PROMPT, 2, sampling, 4, StopsAt)
    batch = grown(engine, opened(engine, command).id)
    assert [len(prefix.token_ids) for prefix in batch.prefixes] == [length] * 2
    assert {prefix.finish for prefix in batch.prefixes} == {FinishReason.STOP}


def test_a_fork_has_stop_texts_of_its_own() -> None:
    """Guards against two candidates whose tokens go into one state, and end too early."""
    engine = Engine(MODEL, 5000)
    command = commands.OpenCommand(PROMPT, 1, ENDLESS, 4, lambda: StopsAt(10))
    session_id = opened(engine, command).id
    grown(engine, session_id, 4)
    engine.prune(session_id, {0}, {1: 0})
    batch = grown(engine, session_id)
    assert [len(prefix.token_ids) for prefix in batch.prefixes] == [10, 10]


def test_steps_report_each_token_once() -> None:
    """Guards against metrics that lose or invent tokens; an equal prompt is read once."""
    reports: list[commands.Step] = []
    engine = Engine(MODEL, 4000, prefill_chunk=5, prefix_cache_slots=400, on_step=reports.append)
    made = 0
    for n in (6, 4):
        session_id = admitted(engine, n=n)
        rounds = [grown(engine, session_id, 6)]
        engine.prune(session_id, {0, 1})
        rounds.append(grown(engine, session_id, 12))
        made += sum(prefix.num_new for batch in rounds for prefix in batch.prefixes)
        engine.close(session_id)
    assert sum(step.generated for step in reports) == made == 6 * 6 + 2 * 6 + 4 * 6 + 2 * 6
    assert sum(step.prefilled for step in reports) == len(PROMPT)
    assert sum(step.reused for step in reports) == len(PROMPT)
    assert max(step.rows for step in reports) == 6 and all(step.seconds > 0 for step in reports)


def test_sessions_take_turns() -> None:
    """Guards against a large session, or many small ones, that always go first."""
    engine = Engine(MODEL, 50_000, max_rows=8)
    large = opened(engine, commands.OpenCommand(PROMPT, 8, ENDLESS, 24))
    whole = engine.extend(large.id, 24)
    small = Sampling(max_tokens=2, seed=1, ignore_eos=True)
    running, num_waiting = [], 0
    for _ in range(100):
        session = opened(engine, commands.OpenCommand(PROMPT, 1, small, 2))
        running.append((session.id, engine.extend(session.id, 2)))
        engine.step()
        for number, future in [item for item in running if item[1].done()]:
            engine.close(number)
            running.remove((number, future))
        num_waiting = max(num_waiting, len(running))
    assert whole.done()
    assert num_waiting < 5


def test_sessions_on_a_stored_prompt_begin_together() -> None:
    """Guards against sessions that begin one after the other although their prompt is stored."""
    model = Recorder(MODEL)
    engine = Engine(model, 5000)
    grown(engine, admitted(engine), 1)
    model.passes.clear()
    for seed in range(4):
        admitted(engine, sampling=replace(ENDLESS, seed=seed))
    engine.step()
    assert not any(session.is_reading for session in engine.sessions.values())
    assert model.num_prompt_tokens == 0
