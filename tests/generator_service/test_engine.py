"""The engine against plain transformers, and its promises to many sessions at once."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generator_service.engine import Engine, OpenCommand, Opened, PrefixBatch
from generator_service.model import CausalLM
from generator_service.steps import Step
from inference.attention import Segment
from inference.kv import SuffixKV
from specrej.contracts import FinishReason, RoundEnd, Sampling
from specrej.errors import (
    InternalError,
    InvalidRequest,
    OutOfOrder,
    Overloaded,
    SessionExpired,
    Unavailable,
)
from tests.generator_service import stepping, tiny
from tests.generator_service.conftest import MakeEngine
from tests.generator_service.stepping import Recorder

PROMPT = [1, *(5 + 7 * i % 80 for i in range(16))]
ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on several threads spend their time on waiting for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def opened(engine: Engine, n: int = 6, sampling: Sampling = ENDLESS, first: int = 8) -> int:
    session_id, future = engine.open(OpenCommand(PROMPT, n, sampling, first))
    assert future.result(30) == Opened(n or future.result().n, future.result().slots)
    return session_id


def extended(engine: Engine, session_id: int, until: int) -> PrefixBatch:
    return engine.extend(session_id, until).result(60)


def tokens_of(batch: PrefixBatch) -> dict[int, tuple[int, ...]]:
    return {prefix.id: prefix.token_ids for prefix in batch.prefixes}


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_plain_transformers(name: str) -> None:
    """Through prefill in chunks, three rounds and two cuts; 1e-3 is the bar, 1e-4 what we hold.

    Guards the split attention, positions, windows, soft caps and the compaction of survivors.
    """
    reference, model = tiny.build(name), CausalLM(tiny.build(name))
    seen: list[torch.Tensor] = []

    class Spy:
        shape, eos_ids = model.shape, model.eos_ids

        def forward(
            self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
        ) -> torch.Tensor:
            seen.append(model.forward(ids, positions, segments, last))
            return seen[-1]

    engine = Engine(Spy(), 2000, prefill_chunk=7)
    engine.start()
    session_id = opened(engine)
    extended(engine, session_id, 8)
    engine.prune(session_id, {0, 2, 5}).result(30)
    extended(engine, session_id, 16)
    engine.prune(session_id, {2, 5}).result(30)
    final = extended(engine, session_id, 24)
    engine.stop()
    for row, prefix in enumerate(final.prefixes):
        ids = [*PROMPT, *prefix.token_ids]
        logits = tiny.full_logits(reference, ids)
        # The last step read all tokens but the newest.
        torch.testing.assert_close(seen[-1][row], logits[-2], atol=1e-4, rtol=0)
        log_probabilities = torch.log_softmax(logits, dim=-1)
        expected = sum(
            log_probabilities[len(PROMPT) - 1 + at, token].item()
            for at, token in enumerate(prefix.token_ids)
        )
        assert prefix.logprob == pytest.approx(expected, abs=1e-3)


def test_unsupported_layers_are_refused() -> None:
    """A model whose layers keep something else than keys and values would be silently wrong."""
    model = tiny.build()
    model.config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="linear_attention"):
        CausalLM(model)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=24, seed=11, ignore_eos=True),
        Sampling(max_tokens=24, seed=11, temperature=0.7, top_k=20, ignore_eos=True),
        Sampling(max_tokens=24, seed=11, temperature=1.3, top_p=0.8, ignore_eos=True),
        Sampling(max_tokens=24, seed=11),
    ],
)
def test_survivors_have_the_tokens_of_a_run_without_cuts(
    make_engine: MakeEngine, sampling: Sampling
) -> None:
    """In place: three rounds, half of the live ones cut twice."""
    engine = make_engine()
    alone = opened(engine, 16, sampling)
    expected = tokens_of(extended(engine, alone, 24))
    session_id = opened(engine, 16, sampling)
    found: dict[int, tuple[int, ...]] = {}
    for until, keep in ((8, range(0, 16, 2)), (16, range(0, 16, 4)), (24, range(16))):
        batch = extended(engine, session_id, until)
        found |= tokens_of(batch)
        engine.prune(session_id, set(keep)).result(30)
    assert len(found) == 16
    for number in range(0, 16, 4):
        assert found[number] == expected[number]
    for number in range(16):
        assert expected[number][: len(found[number])] == found[number]
    for each in (alone, session_id):
        engine.close(each).result(30)


def test_neighbours_do_not_change_a_session(make_engine: MakeEngine) -> None:
    """Sessions share forward passes; what one says may not depend on who else is there."""
    engine = make_engine(prefill_chunk=5)
    alone = opened(engine)
    expected = tokens_of(extended(engine, alone, 24))
    engine.close(alone).result(30)
    others = [opened(engine, 3, Sampling(max_tokens=40, seed=s, ignore_eos=True)) for s in (1, 2)]
    running = [engine.extend(other, 40) for other in others]
    session_id = opened(engine)
    assert tokens_of(extended(engine, session_id, 24)) == expected
    assert all(future.result(60).num_tokens == 40 for future in running)
    for each in (*others, session_id):
        engine.close(each).result(30)


def test_prune_frees_exactly_the_slots_of_the_rejected(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session_id = opened(engine, 6)
    assert extended(engine, session_id, 8).slots.session == 17 + 6 * 7
    pruned = engine.prune(session_id, {1, 4}).result(30)
    assert pruned.freed_slots == 4 * 7
    assert pruned.slots.session == 17 + 2 * 7
    again = engine.prune(session_id, {1, 4, 99, -3}).result(30)
    assert again.freed_slots == 0
    assert engine.close(session_id).result(30) == 17 + 2 * 7
    assert engine.close(session_id).result(30) == 0


@pytest.mark.parametrize("end", ["prune", "finish"])
def test_a_session_without_live_candidates_gives_its_room_back(
    make_engine: MakeEngine, end: str
) -> None:
    """Rejecting everybody, finished answers being better, used to fail on tensors of no rows."""
    engine = make_engine()
    session_id = opened(engine)
    extended(engine, session_id, 8 if end == "prune" else 24)
    assert engine.prune(session_id, set()).result(30).slots.session == 17
    assert engine.ledger.share_of(session_id) == 0
    assert extended(engine, session_id, 24).ended_by is RoundEnd.ALL_FINISHED
    engine.close(session_id).result(30)


def test_rounds_end_when_slots_are_full_and_go_on_after_a_cut(make_engine: MakeEngine) -> None:
    """The paper's own trigger: a capacity for a quarter of N * max_tokens is enough."""
    engine = make_engine(capacity=17 + 8 * 6)
    session_id = opened(engine, 8, Sampling(max_tokens=24, seed=5, ignore_eos=True), first=4)
    ends, live = [], list(range(8))
    while live:
        batch = extended(engine, session_id, 24)
        ends.append(batch.ended_by)
        assert batch.slots.owned <= batch.slots.capacity
        live = [prefix.id for prefix in batch.prefixes if prefix.finish is None]
        live = live[: max(1, len(live) // 2)]
        engine.prune(session_id, set(live)).result(30)
    assert ends.count(RoundEnd.SLOTS_FULL) >= 2
    assert ends[-1] is RoundEnd.ALL_FINISHED
    engine.close(session_id).result(30)


def test_an_end_token_ends_a_candidate_and_frees_its_slots(make_engine: MakeEngine) -> None:
    """Rows may not go on after the end; the tiny vocabulary makes ends frequent."""
    engine = make_engine()
    session_id = opened(engine, 40, Sampling(max_tokens=64, seed=1, temperature=2.0))
    batch = extended(engine, session_id, 64)
    stopped = [prefix for prefix in batch.prefixes if prefix.finish is FinishReason.STOP]
    assert len(stopped) >= 5
    for prefix in batch.prefixes:
        body = prefix.token_ids[:-1] if prefix in stopped else prefix.token_ids
        assert 2 not in body
    assert batch.ended_by is RoundEnd.ALL_FINISHED
    assert batch.slots.session == 17
    engine.close(session_id).result(30)


def test_a_stop_check_ends_a_candidate(make_engine: MakeEngine) -> None:
    def stops(token_ids: Sequence[int]) -> bool:
        return len(token_ids) == 3

    engine = make_engine()
    session_id, future = engine.open(OpenCommand(PROMPT, 2, ENDLESS, 4, stops))
    future.result(30)
    batch = extended(engine, session_id, 24)
    assert [(p.finish, len(p.token_ids)) for p in batch.prefixes] == [(FinishReason.STOP, 3)] * 2
    engine.close(session_id).result(30)


def test_each_token_is_reported_once(make_engine: MakeEngine) -> None:
    """Honest accounting, also for a candidate that ends in the prompt's own step."""
    engine = make_engine()
    session_id = opened(engine, 4, Sampling(max_tokens=20, seed=2, temperature=2.0))
    seen: dict[int, int] = {}
    for until in (1, 2, 7, 7, 20):
        batch = extended(engine, session_id, until)
        for prefix in batch.prefixes:
            seen[prefix.id] = seen.get(prefix.id, 0) + prefix.num_new
            assert seen[prefix.id] == len(prefix.token_ids)
    engine.close(session_id).result(30)


def test_sessions_wait_for_slots_in_order_and_cancelled_ones_leave(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(capacity=17 + 6 * 23, max_waiting=2)
    first = opened(engine, 6, first=24)
    second, second_opened = engine.open(OpenCommand(PROMPT, 6, ENDLESS, 24))
    third, third_opened = engine.open(OpenCommand(PROMPT, 1, ENDLESS, 24))
    _, refused = engine.open(OpenCommand(PROMPT, 1, ENDLESS, 24))
    with pytest.raises(Overloaded):
        refused.result(30)
    assert not second_opened.done()
    engine.close(second).result(30)
    engine.close(first).result(30)
    assert third_opened.result(30).n == 1
    engine.close(third).result(30)


def test_what_can_never_fit_is_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(capacity=100)
    _, refused = engine.open(OpenCommand(PROMPT, 50, ENDLESS, 8))
    with pytest.raises(InvalidRequest) as caught:
        refused.result(30)
    assert caught.value.reason == "SLOTS_EXCEEDED"
    most = (100 - 17) // 7
    assert caught.value.metadata == {
        "needed": str(17 + 50 * 7),
        "capacity": "100",
        "candidates": str(most),
    }
    # Guards against a number that is itself refused.
    session = opened(engine, most)
    engine.close(session).result(30)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_kept_prompt_is_read_as_a_new_one_is(name: str) -> None:
    """Guards against an answer that depends on whether somebody asked the same before.

    To the last bit: first draws come from the logits of the prompt's last token.
    """
    model = Recorder(CausalLM(tiny.build(name)))
    engine = Engine(model, 5000, prefill_chunk=8, prefix_cache_slots=1000)
    engine.start()
    logits = []
    for _ in range(2):
        session = opened(engine)
        extended(engine, session, 1)
        engine.close(session).result(30)
        logits.append(model.passes[-1].logits)
    engine.stop()
    assert model.num_prompt_tokens == len(PROMPT)
    assert torch.equal(*logits)


def test_not_a_bit_depends_on_how_many_there_are(make_engine: MakeEngine) -> None:
    """Guards against products that are made otherwise from some number of rows on: behind a prompt
    of 90 tokens, 128 candidates said something else than 8 alone, and survivors than before."""
    engine = make_engine(capacity=20_000)
    prompt = [1, *(5 + 7 * i % 80 for i in range(89))]
    logprobs = []
    for n in (128, 8):
        session, future = engine.open(OpenCommand(prompt, n, ENDLESS, 8))
        future.result(30)
        batch = extended(engine, session, 24)
        engine.close(session).result(30)
        logprobs.append({p.id: (p.token_ids, tuple(p.new_logprobs)) for p in batch.prefixes})
    many, few = logprobs
    assert {number: many[number] for number in few} == few


def test_two_sessions_make_what_one_would_have_made(make_engine: MakeEngine) -> None:
    """A request that one generator cannot hold is split over several: nobody must see where."""
    engine = make_engine(capacity=4000)
    whole = opened(engine, 6)
    expected = tokens_of(extended(engine, whole, 24))
    engine.close(whole).result(30)
    parts: dict[int, tuple[int, ...]] = {}
    for first, n in ((0, 4), (4, 2)):
        command = OpenCommand(PROMPT, n, ENDLESS, 8, first_candidate=first)
        session, future = engine.open(command)
        future.result(30)
        parts |= tokens_of(extended(engine, session, 24))
        engine.close(session).result(30)
    assert parts == expected


def test_n_zero_fills_the_free_slots(make_engine: MakeEngine) -> None:
    engine = make_engine(capacity=17 + 7 * 10 + 3)
    session_id, future = engine.open(OpenCommand(PROMPT, 0, ENDLESS, 8))
    assert future.result(30).n == 10
    engine.close(session_id).result(30)


@pytest.mark.parametrize("keep", [{1, 4}, set()])
def test_a_prune_while_the_prompt_is_being_read(make_engine: MakeEngine, keep: set[int]) -> None:
    """Open, prune, extend: first tokens were drawn for all N rows, not for those still there."""
    engine = make_engine(prefill_chunk=1)
    prompt = PROMPT * 10  # many steps: the prune comes long before the last one
    session_id, future = engine.open(OpenCommand(prompt, 6, ENDLESS, 8))
    future.result(30)
    assert engine.prune(session_id, keep).result(30).freed_slots == 0
    batch = extended(engine, session_id, 8)
    assert {prefix.id for prefix in batch.prefixes} == keep
    assert all(len(prefix.token_ids) == 8 for prefix in batch.prefixes)
    engine.close(session_id).result(30)


def test_commands_out_of_order(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session_id = opened(engine, 2, Sampling(max_tokens=200, ignore_eos=True))
    growing = engine.extend(session_id, 200)
    with pytest.raises(OutOfOrder):
        engine.prune(session_id, {0}).result(30)
    engine.close(session_id).result(30)
    assert growing.cancelled()
    with pytest.raises(SessionExpired):
        engine.extend(session_id, 5).result(30)


class FailsOnce:
    """A model whose forward pass number `at_step` raises."""

    def __init__(self, at_step: int) -> None:
        self._model = CausalLM(tiny.build())
        self.shape, self.eos_ids = self._model.shape, self._model.eos_ids
        self._left = at_step

    def forward(
        self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            raise RuntimeError("device lost")
        return self._model.forward(ids, positions, segments, last)


def test_a_failing_step_ends_its_sessions_but_not_the_engine() -> None:
    """A forward pass that raises at step 5: a clean error, all slots free, the next one works."""
    engine = Engine(FailsOnce(at_step=5), 1000)
    engine.start()
    session_id = opened(engine)
    with pytest.raises(InternalError):
        engine.extend(session_id, 24).result(30)
    assert engine.ledger.owned == 0
    again = opened(engine)
    assert extended(engine, again, 24).num_tokens == 24
    engine.close(again).result(30)
    engine.stop()


def test_a_session_that_cannot_be_held_leaves_the_others_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out at admission: the slots come back and the caller is told."""
    engine = make_engine()
    session_id = opened(engine)

    def exhausted(shape: object, rows: int) -> None:
        raise MemoryError

    monkeypatch.setattr("generator_service.engine.SuffixKV", exhausted)
    _, refused = engine.open(OpenCommand(PROMPT, 2, ENDLESS, 8))
    with pytest.raises(InternalError):
        refused.result(30)
    monkeypatch.undo()
    assert engine.ledger.num_sessions == 1
    assert extended(engine, session_id, 24).num_tokens == 24
    engine.close(session_id).result(30)


def test_a_bug_between_steps_does_not_end_the_thread(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead engine thread would leave every caller waiting for ever."""
    engine = make_engine()
    session_id = opened(engine)
    monkeypatch.setattr(engine, "_make_room", lambda session: 1 // 0)
    with pytest.raises(InternalError):
        engine.extend(session_id, 24).result(30)
    monkeypatch.undo()
    assert engine.ledger.owned == 0
    again = opened(engine)
    assert extended(engine, again, 24).num_tokens == 24
    engine.close(again).result(30)


def test_stopping_fails_what_is_open(make_engine: MakeEngine) -> None:
    engine = make_engine(capacity=17 + 2 * 4000)
    session_id = opened(engine, 2, Sampling(max_tokens=4000, ignore_eos=True), first=4000)
    _, waiting = engine.open(OpenCommand(PROMPT, 2, Sampling(max_tokens=4000), 4000))
    growing = engine.extend(session_id, 4000)
    engine.stop()
    for future in (growing, waiting):
        with pytest.raises(Unavailable):
            future.result(30)


def test_a_stopped_engine_answers(make_engine: MakeEngine) -> None:
    """A command that nobody will ever execute would hang its sender."""
    engine = make_engine()
    session_id = opened(engine)
    engine.stop()
    _, refused = engine.open(OpenCommand(PROMPT, 2, ENDLESS, 8))
    with pytest.raises(Unavailable):
        refused.result(30)
    with pytest.raises(SessionExpired):
        engine.extend(session_id, 8).result(30)
    assert engine.close(session_id).result(30) == 0


def test_when_the_thread_ends_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against callers that hang, of an engine whose thread something has ended in silence.

    A session that grows, one that waits for slots, and whoever comes later.
    """
    at_work, asked = threading.Event(), threading.Event()

    def leave(step: Step) -> None:
        if step.rows:
            at_work.set()
            assert asked.wait(30)
            raise SystemExit

    engine = Engine(CausalLM(tiny.build("llama")), 17 + 2 * 4000, on_step=leave)
    engine.start()
    command = OpenCommand(PROMPT, 2, replace(ENDLESS, max_tokens=4000), 4000)
    session_id, waiting = opened(engine, 2, command.sampling, 4000), engine.open(command)[1]
    growing = engine.extend(session_id, 4000)
    assert at_work.wait(30)
    unread = engine.prune(session_id, [])
    asked.set()
    with pytest.raises(Unavailable):
        growing.result(30)
    late = (engine.open(command)[1], engine.extend(session_id, 8), engine.prune(session_id, []))
    for future in (waiting, unread, *late):
        with pytest.raises(Unavailable):
            future.result(30)
    assert engine.close(session_id).result(30) == 0
    assert engine.heartbeat_s() == math.inf
    assert (engine.ledger.owned, engine.num_sessions, engine.num_waiting) == (0, 0, 0)
    assert "the engine's thread ends" in caplog.text


def test_a_sender_that_has_gone_does_not_end_the_engine(make_engine: MakeEngine) -> None:
    """Cancelling a future races with its result; the loser used to be the engine's thread."""
    engine = make_engine()
    for _ in range(200):
        session_id, future = engine.open(OpenCommand(PROMPT[:2], 1, ENDLESS, 1))
        future.cancel()
        engine.extend(session_id, 1).cancel()
        engine.close(session_id).cancel()
    session_id = opened(engine)
    assert extended(engine, session_id, 8).num_tokens == 8
    engine.close(session_id).result(30)


class _GoneBetween(Future[PrefixBatch]):
    """A future whose sender cancels between any check of its state and its result."""

    def set_result(self, result: PrefixBatch) -> None:
        self.cancel()
        super().set_result(result)


def test_a_result_that_comes_just_too_late(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same race, made certain."""
    engine = make_engine()
    session_id = opened(engine)
    monkeypatch.setattr("generator_service.engine.Future", _GoneBetween)
    growing = engine.extend(session_id, 8)
    monkeypatch.undo()
    with pytest.raises(CancelledError):
        growing.result(30)
    assert extended(engine, session_id, 16).num_tokens == 16
    engine.close(session_id).result(30)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), capacity=st.integers(60, 400))
def test_random_sessions_all_end_and_nothing_leaks(seed: int, capacity: int) -> None:
    """Conservation and Progress under joint passes, random cuts, closes and full slots."""
    chance = random.Random(seed)
    engine = Engine(_MODEL, capacity, prefill_chunk=chance.randint(1, 20), max_waiting=50)
    engine.start()
    waiting = [
        engine.open(
            OpenCommand(
                PROMPT[: chance.randint(1, 17)],
                chance.randint(0, 6),
                Sampling(max_tokens=chance.randint(1, 30), seed=number, temperature=2.0),
                chance.randint(1, 6),
            )
        )
        for number in range(5)
    ]
    for session_id, future in waiting:
        try:
            n = future.result(60).n
        except InvalidRequest:
            continue
        _drive(engine, session_id, n, chance)
        engine.close(session_id).result(60)
    engine.stop()
    engine.ledger.check_integrity()
    assert engine.ledger.owned == 0


_MODEL = CausalLM(tiny.build())


def _drive(engine: Engine, session_id: int, n: int, chance: random.Random) -> None:
    live = set(range(n))
    until = 0
    while live and chance.random() > 0.05:
        until += chance.randint(1, 12)
        batch = extended(engine, session_id, until)
        engine.ledger.check_integrity()
        live -= {prefix.id for prefix in batch.prefixes if prefix.finish}
        full = batch.ended_by is RoundEnd.SLOTS_FULL
        if live and (full or chance.random() < 0.5):
            keep = set(chance.sample(sorted(live), max(1, len(live) // 2)))
            live = set(keep)
            engine.prune(session_id, keep).result(60)


# Prompts in common. From here on engines have no thread: tests take every step themselves.

SYSTEM = [3 + 11 * i % 89 for i in range(70)]


def admitted(
    engine: Engine,
    prompt: Sequence[int] = PROMPT,
    n: int = 3,
    sampling: Sampling = ENDLESS,
    salt: str = "",
    first: int = 8,
) -> int:
    """A session that has its slots; nothing of its prompt is read yet."""
    session_id, future = engine.open(OpenCommand(prompt, n, sampling, first, cache_salt=salt))
    engine._drain()
    engine._admit_waiting()
    assert future.result(0)
    return session_id


def grown(engine: Engine, session_id: int, until: int = 24) -> PrefixBatch:
    return stepping.result(engine, engine.extend(session_id, until))


def closed(engine: Engine, session_id: int) -> int:
    return stepping.result(engine, engine.close(session_id))


def alone(
    prompt: Sequence[int] = PROMPT, n: int = 3, sampling: Sampling = ENDLESS
) -> dict[int, tuple[int, ...]]:
    """What the candidates say in an engine of their own."""
    engine = Engine(_MODEL, 5000)
    return tokens_of(grown(engine, admitted(engine, prompt, n, sampling), sampling.max_tokens))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-5)], ids=str
)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_over_shared_pieces_equal_plain_transformers(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of up to three pieces, split while one of them is read, cuts and windows included.

    In float64 what is left is no rounding; in float32 other code computes it.
    """
    reference = tiny.build(name).to(dtype)
    model = Recorder(CausalLM(tiny.build(name).to(dtype)))
    engine = Engine(model, 5000, prefill_chunk=30)
    tails = [[5, 6, 7], [], PROMPT, [5, 6, 7]]
    prompts = [SYSTEM + tail for tail in tails] + [[*SYSTEM[:66], 90, 91]]
    sessions = [admitted(engine, prompt) for prompt in prompts[:2]]
    for _ in range(2):
        stepping.step(engine)
    for prompt in prompts[2:]:
        sessions.append(admitted(engine, prompt, sampling=replace(ENDLESS, seed=len(sessions))))
        engine.check_integrity()
    for until, keep in ((5, {0, 2}), (9, {2})):
        for running in [engine.extend(session_id, until) for session_id in sessions]:
            stepping.result(engine, running)
        for session_id in sessions:
            stepping.result(engine, engine.prune(session_id, keep))
    assert model.num_prompt_tokens == 70 + 3 + 17 + 2
    for session_id, prompt in zip(sessions, prompts, strict=True):
        (prefix,) = grown(engine, session_id, 10).prefixes
        logits = tiny.full_logits(reference, [*prompt, *prefix.token_ids])
        # The last step read all tokens but the newest.
        found = model.passes[-1].logits
        torch.testing.assert_close(found, logits[-2:-1], atol=tolerance, rtol=0)
    for session_id in sessions:
        closed(engine, session_id)
        engine.check_integrity()


@pytest.mark.parametrize("is_read_first", [False, True])
def test_equal_prompts_are_read_once(is_read_first: bool) -> None:
    """Sessions with other seeds say what they would say alone, for one prefill in all."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=7)
    samplings = [replace(ENDLESS, seed=seed) for seed in (3, 4, 5)]
    sessions = []
    for sampling in samplings:
        sessions.append(admitted(engine, sampling=sampling))
        while is_read_first and stepping.step(engine):
            pass
    running = [engine.extend(session_id, 24) for session_id in sessions]
    found = [tokens_of(stepping.result(engine, future)) for future in running]
    assert found == [alone(sampling=sampling) for sampling in samplings]
    assert found[0] != found[1]
    assert model.num_prompt_tokens == engine.ledger.held == 17
    for session_id, owned in zip(sessions, (17, 17, 0), strict=True):
        closed(engine, session_id)
        assert engine.ledger.owned == owned
        engine.check_integrity()


def test_a_system_prompt_is_read_once() -> None:
    """The usual case in production: a long beginning in common, questions that differ."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=16)
    prompts = [SYSTEM + PROMPT, [*SYSTEM, 9, 8, 7]]
    running = [engine.extend(admitted(engine, prompt), 24) for prompt in prompts]
    found = [tokens_of(stepping.result(engine, future)) for future in running]
    assert found == [alone(prompt) for prompt in prompts]
    assert model.num_prompt_tokens == engine.ledger.held == 70 + 17 + 3


def test_another_salt_reads_the_prompt_again() -> None:
    """Sharing across tenants would tell each what the other has asked."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefix_cache_slots=1000)
    found = []
    for salt in ("one", "other"):
        session_id = admitted(engine, salt=salt)
        found.append(tokens_of(grown(engine, session_id)))
        closed(engine, session_id)
    assert found[0] == found[1] == alone()
    assert model.num_prompt_tokens == engine.ledger.cached == 2 * 17


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("prompt", [SYSTEM + PROMPT, [*SYSTEM, 9, 8, 7]])
def test_a_session_that_ends_while_another_waits_for_the_same_piece(
    prompt: list[int], num_steps: int
) -> None:
    """The other goes on where it stopped: nothing is read twice, nothing is taken as read."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=20)
    first = admitted(engine, SYSTEM + PROMPT)
    second = admitted(engine, prompt)
    for _ in range(num_steps):
        stepping.step(engine)
    read = engine._sessions[first].prompt
    assert read
    gone = sum(piece.computed for piece in read.chain() if piece.users == 1)
    closed(engine, first)
    engine.check_integrity()
    assert tokens_of(grown(engine, second)) == alone(prompt)
    assert model.num_prompt_tokens == len(prompt) + gone
    closed(engine, second)
    assert engine.ledger.owned == 0


def test_prompts_stay_within_their_slots_and_are_used_again() -> None:
    """The same question once more: only its last token is read, for what comes out of it."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=7, prefix_cache_slots=20)
    first = admitted(engine)
    expected = tokens_of(grown(engine, first))
    assert closed(engine, first) == 17
    assert (engine.gauge().owned, engine.gauge().cached) == (0, 17)
    again = admitted(engine)
    assert (engine.gauge().owned, engine.gauge().cached) == (17, 0)
    assert tokens_of(grown(engine, again)) == expected
    assert model.num_prompt_tokens == 17
    assert sum(each.num_prompt_rows for each in model.passes) == 17 + 1
    closed(engine, again)
    other = admitted(engine, PROMPT[::-1])
    grown(engine, other, 1)
    closed(engine, other)  # 34 would be more than may stay
    assert (engine.gauge().owned, engine.gauge().cached) == (0, 17)
    engine.check_integrity()


def test_cached_prompts_give_way_when_their_room_is_needed() -> None:
    """They may not keep a session waiting, nor take from the share it could have."""
    engine = Engine(_MODEL, 17 + 8 * 23, prefix_cache_slots=1000)
    for prompt in (PROMPT[:9], PROMPT):
        small = admitted(engine, prompt, n=1)
        grown(engine, small, 4)
        closed(engine, small)
    assert engine.gauge().cached == 9 + 17
    large = admitted(engine, PROMPT[::-1], n=8)
    assert engine.gauge().cached == 0
    engine.check_integrity()
    assert grown(engine, large).ended_by is RoundEnd.ALL_FINISHED
    closed(engine, large)
    assert engine.gauge().cached == 17


def test_cached_prompts_give_way_to_a_share_that_widens() -> None:
    """What the end of another session leaves is for those still there, before the next prompt."""
    engine = Engine(_MODEL, 17 + 8 * 23 - 1, prefix_cache_slots=1000)
    other = admitted(engine, PROMPT[::-1], n=4)
    grown(engine, other, 4)
    session_id = admitted(engine, n=8, first=4)
    closed(engine, other)
    assert engine.gauge().cached == 17
    running = engine.extend(session_id, 24)
    engine._drain()
    assert (engine.gauge().cached, engine.ledger.unshared) == (0, 0)
    engine.check_integrity()
    assert stepping.result(engine, running).ended_by is RoundEnd.SLOTS_FULL
    closed(engine, session_id)


# The least length


class EndLover:
    """A model that would end every answer at once."""

    def __init__(self) -> None:
        self.shape, self.eos_ids = _MODEL.shape, _MODEL.eos_ids

    def forward(
        self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> torch.Tensor:
        logits = _MODEL.forward(ids, positions, segments, last).clone()
        logits[:, 2] = logits.amax(dim=-1) + 30
        return logits


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(temperature=0.5, top_k=1),
        Sampling(top_p=0.01),
        Sampling(temperature=2.0, top_k=20, top_p=0.9),
    ],
)
def test_an_end_token_comes_after_the_least_length(min_tokens: int, sampling: Sampling) -> None:
    """With all of the probability on it; log-probabilities are those that the model gave."""
    model = Recorder(EndLover())
    engine = Engine(model, 5000)
    sampling = replace(sampling, max_tokens=24, min_tokens=min_tokens)
    batch = grown(engine, admitted(engine, n=4, sampling=sampling))
    assert batch.ended_by is RoundEnd.ALL_FINISHED
    for row, prefix in enumerate(batch.prefixes):
        assert prefix.finish is FinishReason.STOP
        assert len(prefix.token_ids) == min_tokens + 1
        assert 2 not in prefix.token_ids[:-1]
        logits = [each.logits.expand(4, -1)[row] for each in model.passes[1:]]
        expected = torch.log_softmax(torch.stack(logits), dim=-1)
        chosen = expected.gather(1, torch.tensor(prefix.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(prefix.new_logprobs), chosen)
        assert all(logprob < -25 for logprob in prefix.new_logprobs[:-1])


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 1), (5, 5), (24, 24)])
def test_a_stop_check_counts_from_the_least_length_on(min_tokens: int, length: int) -> None:
    """The text of a stop may come by early; and the least may be the most."""

    def stops(token_ids: Sequence[int]) -> bool:
        return True

    engine = Engine(_MODEL, 5000)
    sampling = replace(ENDLESS, min_tokens=min_tokens)
    session_id, future = engine.open(OpenCommand(PROMPT, 2, sampling, 4, stops))
    stepping.result(engine, future)
    batch = grown(engine, session_id)
    assert [len(prefix.token_ids) for prefix in batch.prefixes] == [length] * 2
    assert {prefix.finish for prefix in batch.prefixes} == {FinishReason.STOP}


def test_each_round_reports_its_log_probabilities() -> None:
    """As many as new tokens, and all of them add up to the sum that is told."""
    engine = Engine(_MODEL, 5000)
    sampling = Sampling(max_tokens=20, seed=2, temperature=2.0)
    session_id = admitted(engine, n=12, sampling=sampling)
    seen: dict[int, list[float]] = {number: [] for number in range(12)}
    ended = set()
    for until in (1, 2, 7, 7, 12, 20):
        batch = grown(engine, session_id, until)
        for prefix in batch.prefixes:
            assert prefix.id not in ended
            seen[prefix.id] += prefix.new_logprobs
            assert len(seen[prefix.id]) == len(prefix.token_ids)
            assert sum(seen[prefix.id]) == pytest.approx(prefix.logprob, abs=1e-9)
        ended |= {prefix.id for prefix in batch.prefixes if prefix.finish}
        if until == 7:
            live = [prefix.id for prefix in batch.prefixes if not prefix.finish]
            stepping.result(engine, engine.prune(session_id, live[::2]))
    assert 0 < len(ended) < 12


# Steps


def test_sessions_take_turns_where_a_step_is_too_small_for_all() -> None:
    """Bounded rows: nobody is left out, and nobody says anything else for it."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, max_rows=6)
    samplings = [replace(ENDLESS, seed=seed) for seed in range(4)]
    numbers = (4, 4, 4, 2)
    prompts = [[number + 5, *PROMPT[1:]] for number in range(4)]
    running = [
        engine.extend(admitted(engine, prompt, n, sampling), 24)
        for prompt, n, sampling in zip(prompts, numbers, samplings, strict=True)
    ]
    while not all(future.done() for future in running):
        assert stepping.step(engine)
        *equals, _ = (session.num_tokens for session in engine._sessions.values())
        assert max(equals) - min(equals) <= 1  # the last one fits beside each of them
    assert max(sum(each.rows) for each in model.passes) == 6
    assert len(model.passes) == 2 + 3 * 23
    for prompt, n, sampling, future in zip(prompts, numbers, samplings, running, strict=True):
        assert tokens_of(future.result()) == alone(prompt, n, sampling)


def test_a_session_of_more_rows_than_a_step_goes_alone() -> None:
    """The bound may not shut out a session that was let in, nor may it shut out others."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, max_rows=6)
    sessions = [admitted(engine, n=n) for n in (10, 2, 10)]
    running = [engine.extend(session_id, 24) for session_id in sessions]
    found = [tokens_of(stepping.result(engine, future, 100)) for future in running]
    assert found == [alone(n=n) for n in (10, 2, 10)]
    assert {each.rows for each in model.passes} <= {(), (10,), (2,)}


@pytest.mark.parametrize("large_at", [0, 3, 10])
def test_nobody_starves(large_at: int) -> None:
    """One large session and ten small ones, two of which fit beside each other, all in order.

    Small ones that pass by would keep the large one waiting for ever, and the reverse.
    """
    engine = Engine(_MODEL, 17 + 20 * 7 + 10)
    numbers = [2] * 10
    numbers.insert(large_at, 20)
    waiting = [
        engine.open(OpenCommand([number + 5, *PROMPT[1:]], n, ENDLESS, 8))
        for number, n in enumerate(numbers)
    ]
    admissions: list[int] = []
    running: dict[int, Future[PrefixBatch]] = {}
    engine._drain()
    for _ in range(1000):
        if engine.num_sessions + engine.num_waiting == 0:
            break
        for session_id, opening in waiting:
            if opening.done() and session_id not in admissions:
                admissions.append(session_id)
                running[session_id] = engine.extend(session_id, 24)
        for session_id, growing in [*running.items()]:
            if growing.done():
                live = [p.id for p in growing.result().prefixes if not p.finish]
                if live:
                    engine.prune(session_id, live[: max(1, len(live) // 2)])
                    running[session_id] = engine.extend(session_id, 24)
                else:
                    del running[session_id]
                    engine.close(session_id)
        stepping.step(engine)
    assert admissions == [session_id for session_id, _ in waiting]
    assert not running
    assert engine.num_sessions == engine.num_waiting == engine.ledger.owned == 0


def test_a_long_prompt_does_not_hold_up_those_who_grow() -> None:
    """Chunks bound a step's prompt tokens, and each step makes a token of everybody else."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=16)
    growing = admitted(engine)
    grown(engine, growing, 1)
    model.passes.clear()
    running = engine.extend(growing, 24)
    reading = admitted(engine, [5 + i % 80 for i in range(200)])
    stepping.result(engine, engine.extend(reading, 1))
    assert [each.num_prompt_tokens for each in model.passes] == [16] * 12 + [7, 1]
    assert [each.rows for each in model.passes] == [(3,)] * 14
    assert engine._sessions[growing].num_tokens == 1 + 14
    assert tokens_of(stepping.result(engine, running)) == alone()


def test_short_prompts_are_read_together() -> None:
    """As many as a chunk holds, the oldest first; last tokens, and what is left, in the next."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000, prefill_chunk=16)
    for number in range(4):
        admitted(engine, [number + 5, *PROMPT[:5]])
    while stepping.step(engine):
        pass
    assert [each.num_prompt_tokens for each in model.passes] == [16, 7, 1]
    assert [len(each.logits) for each in model.passes] == [4, 4, 1]


def test_sessions_on_a_stored_prompt_begin_together() -> None:
    """One after the other, step by step, though nothing of it is left to be written."""
    model = Recorder(_MODEL)
    engine = Engine(model, 5000)
    grown(engine, admitted(engine), 1)
    model.passes.clear()
    for seed in range(4):
        admitted(engine, sampling=replace(ENDLESS, seed=seed))
    stepping.step(engine)
    assert not any(session.is_reading for session in engine._sessions.values())
    assert model.num_prompt_tokens == 0


# Who waits, and who is told


@pytest.mark.parametrize("max_waiting", [0, 1])
def test_a_session_that_need_not_wait_is_not_one_too_many(max_waiting: int) -> None:
    """A burst of commands between two steps was refused, with nearly all slots free."""
    engine = Engine(_MODEL, 5000, max_waiting=max_waiting)
    opening = [engine.open(OpenCommand(PROMPT, 2, ENDLESS, 8))[1] for _ in range(3)]
    assert [stepping.result(engine, future).n for future in opening] == [2, 2, 2]


def test_slots_of_a_failed_session_go_to_those_who_wait(make_engine: MakeEngine) -> None:
    """The engine fell asleep with a session waiting for slots that were free."""
    engine = Engine(FailsOnce(at_step=5), 17 + 6 * 23)
    engine.start()
    first = opened(engine, 6, first=24)
    _, waiting = engine.open(OpenCommand(PROMPT, 6, ENDLESS, 24))
    with pytest.raises(InternalError):
        engine.extend(first, 24).result(30)
    try:
        assert waiting.result(30).n == 6
    finally:
        engine.stop()


def test_broken_books_do_not_end_the_service(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A check that fails between two commands failed again for ever, and no command came through.

    The engine says that it starts over: then its books must, too.
    """
    engine = make_engine()
    caplog.set_level(logging.CRITICAL, "generator_service.engine")
    engine.close(opened(engine)).result(30)
    engine.ledger.held += 1
    engine.close(0).result(30)  # after this command, the engine looks at its books
    session_id, opening = engine.open(OpenCommand(PROMPT, 2, ENDLESS, 8))
    try:
        assert opening.result(30).n == 2
    except TimeoutError:
        engine.ledger.held -= 1
        raise
    finally:
        engine.close(session_id).result(30)


def test_a_bug_in_closing_does_not_end_the_thread(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Books so broken that sessions cannot be closed: their callers are told all the same."""
    engine = make_engine()
    session_id = opened(engine)
    monkeypatch.setattr(engine, "_make_room", lambda session: 1 // 0)
    monkeypatch.setattr(engine._prefixes, "release", lambda piece: 1 // 0)
    with pytest.raises(InternalError):
        engine.extend(session_id, 24).result(30)
    monkeypatch.undo()
    again = opened(engine)
    assert extended(engine, again, 24).num_tokens == 24
    engine.close(again).result(30)


def test_a_step_that_hangs_does_not_hold_up_the_stop(make_engine: MakeEngine) -> None:
    """Guards against a service that its platform has to kill."""
    engine, hanging = make_engine(), threading.Event()

    def hang() -> None:
        hanging.wait()

    engine._commands.put(hang)
    engine.stop(timeout_s=0.01)
    assert engine._thread.is_alive()
    hanging.set()


def test_memory_that_cannot_be_had_ends_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that failed for one session ended all of them."""
    engine = Engine(_MODEL, 5000)
    others, poor = admitted(engine), admitted(engine)
    store = engine._sessions[poor].suffix
    assert store
    reserve = SuffixKV.reserve

    def exhausted(suffix: SuffixKV, tokens_room: int, slots: int = 0) -> None:
        if suffix is store:
            raise MemoryError
        reserve(suffix, tokens_room, slots)

    monkeypatch.setattr(SuffixKV, "reserve", exhausted)
    running, failing = engine.extend(others, 24), engine.extend(poor, 24)
    assert stepping.result(engine, running).num_tokens == 24
    with pytest.raises(InternalError):
        failing.result(0)
    closed(engine, others)
    assert engine.ledger.owned == 0
    engine.check_integrity()
