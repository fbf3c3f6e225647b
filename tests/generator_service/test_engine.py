"""The engine against plain transformers, and its promises to many sessions at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generator_service.attention import Segment
from generator_service.engine import Engine, OpenCommand, Opened, PrefixBatch
from generator_service.model import CausalLM
from specrej.contracts import FinishReason, RoundEnd, Sampling
from specrej.errors import (
    InternalError,
    InvalidRequest,
    OutOfOrder,
    Overloaded,
    SessionExpired,
    Unavailable,
)
from tests.generator_service import tiny
from tests.generator_service.conftest import MakeEngine

PROMPT = [1, *(5 + 7 * i % 80 for i in range(16))]
ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)


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
    assert caught.value.metadata == {"needed": str(17 + 50 * 7), "capacity": "100"}


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


def test_a_failing_step_ends_its_sessions_but_not_the_engine() -> None:
    """A forward pass that raises at step 5: a clean error, all slots free, the next one works."""
    model = CausalLM(tiny.build())

    class Failing:
        shape, eos_ids, steps = model.shape, model.eos_ids, 0

        def forward(
            self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
        ) -> torch.Tensor:
            self.steps += 1
            if self.steps == 5:
                raise RuntimeError("device lost")
            return model.forward(ids, positions, segments, last)

    engine = Engine(Failing(), 1000)
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
