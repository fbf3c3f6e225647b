"""The admission queue of all generators, on a ledger alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.admission import AdmissionQueue, Blocks, Demand
from specrej.contracts.errors import InvalidRequest, Overloaded
from specrej_models.slots import SlotLedger


@dataclass(eq=False, slots=True)
class Session:
    id: int
    demand: Demand


def session_of(number: int, n: int, first: int = 10, prompt: int = 5) -> Session:
    """Each candidate takes a slot per token, at most 20."""
    return Session(number, Demand(n, prompt, first, 20, lambda tokens: tokens))


@dataclass
class Room:
    """A queue; its sessions stay open until `leave`."""

    capacity: int = 105
    max_waiting: int = 2
    max_candidates: int = 100
    admitted: list[tuple[int, int]] = field(default_factory=list)  # ids and candidates

    def __post_init__(self) -> None:
        self.ledger = SlotLedger(self.capacity)
        self.queue: AdmissionQueue[Session] = AdmissionQueue(
            self.ledger,
            self.admit,
            max_waiting=self.max_waiting,
            auto_candidates=8,
            max_candidates=self.max_candidates,
        )

    def admit(self, session: Session, n: int) -> None:
        self.ledger.hold(session.demand.prompt_slots)
        self.queue.give_share(session, n)
        self.admitted.append((session.id, n))

    def leave(self, number: int) -> None:
        self.ledger.close(number)
        self.ledger.retire(5)
        self.ledger.evict(5)
        self.admitted = [(other, n) for other, n in self.admitted if other != number]
        self.queue.admit_waiting()


@pytest.mark.parametrize(("n", "prompt", "most"), [(50, 5, 10), (1, 90, 0)])
def test_a_session_that_never_fits_is_refused(n: int, prompt: int, most: int) -> None:
    """With the most candidates that would; 90 + 20 slots of one candidate do not fit."""
    room = Room()
    with pytest.raises(InvalidRequest) as refused:
        room.queue.enter(session_of(0, n, prompt=prompt))
    metadata = refused.value.metadata
    assert (metadata["capacity"], metadata["candidates"]) == ("105", str(most))
    assert refused.value.reason == "SLOTS_EXCEEDED"


def test_too_many_waiting_sessions_are_refused_and_cancelled_ones_leave() -> None:
    room = Room(max_waiting=2)
    for number in range(3):
        room.queue.enter(session_of(number, 10))
    with pytest.raises(Overloaded):
        room.queue.enter(session_of(3, 1))
    room.queue.leave(1)
    room.queue.leave(99)
    assert [session.id for session in room.queue] == [2]
    room.leave(0)
    assert room.admitted == [(2, 10)]


@pytest.mark.parametrize("max_waiting", [0, 1])
def test_a_session_that_need_not_wait_is_not_refused(max_waiting: int) -> None:
    """Guards against a refused burst of commands between two steps, with free slots."""
    room = Room(10_000, max_waiting)
    for number in range(3):
        room.queue.enter(session_of(number, 2))
    assert [number for number, _ in room.admitted] == [0, 1, 2]


def test_a_session_of_too_many_candidates_is_refused() -> None:
    room = Room(10_000, max_candidates=10)
    with pytest.raises(InvalidRequest, match="must be at most 10, is 11"):
        room.queue.enter(session_of(0, 11))
    room.queue.enter(session_of(1, 10))
    assert room.admitted == [(1, 10)]


@pytest.mark.parametrize(("capacity", "n"), [(5 + 3 * 10 + 9, 3), (25, 2), (1000, 8)])
def test_n_zero_fills_the_free_slots(capacity: int, n: int) -> None:
    room = Room(capacity)
    alone = session_of(0, 0)
    room.queue.enter(alone)
    assert room.admitted == [(0, n)]
    assert not room.queue.is_reduced(alone, n)


@pytest.mark.parametrize(("n", "is_reduced"), [(0, True), (2, False)])
def test_n_zero_beside_another_session_is_reduced(n: int, is_reduced: bool) -> None:
    room = Room(5 + 4 * 20 + 5 + 3 * 10)
    first, second = session_of(0, 4), session_of(1, n)
    room.queue.enter(first)
    room.queue.enter(second)
    assert room.admitted == [(0, 4), (1, n or 3)]
    assert room.queue.is_reduced(second, n or 3) == is_reduced


def test_a_share_widens_to_free_slots_and_narrows_for_waiting_sessions() -> None:
    room = Room(capacity=125)
    first, second = session_of(0, 4, prompt=0), session_of(1, 4, prompt=0)
    room.queue.enter(first)
    assert room.ledger.share_of(0) == 80  # 4 whole candidates
    room.queue.enter(second)
    assert room.ledger.share_of(1) == 45
    room.queue.enter(session_of(2, 4, prompt=0))
    room.ledger.take(0, 4 * 5)
    room.queue.narrow(first, 4, 5)
    assert room.ledger.share_of(0) == 4 * 15  # the next round of 10 tokens
    room.queue.leave(2)
    room.queue.widen(first, 4)
    assert room.ledger.share_of(0) == 80
    room.queue.narrow(first, 1, 5)
    assert room.ledger.share_of(0) == 20


@given(
    capacity=st.integers(20, 200),
    kept=st.integers(0, 6),
    num_forks=st.integers(1, 12),
    num_tokens=st.integers(1, 19),
    is_awaited=st.booleans(),
)
def test_forks_have_room_for_their_next_token(
    capacity: int, kept: int, num_forks: int, num_tokens: int, is_awaited: bool
) -> None:
    """As many as fit, and not one more: guards against forks whose round ends at once."""
    room = Room(capacity)
    session = session_of(0, max(1, kept), first=1, prompt=0)
    room.queue.enter(session)
    if is_awaited:
        room.queue.enter(session_of(1, min(capacity, 100), first=1, prompt=0))
    forks = {100 + number: number % 3 for number in range(num_forks)}
    made = room.queue.with_room(session, forks, [0, 1, 2], kept, num_tokens)
    assert [*made] == [*forks][: len(made)]
    share, each = room.ledger.share_of(0), num_tokens + 1
    assert not made or (kept + len(made)) * each <= share
    assert len(made) == num_forks or (kept + len(made) + 1) * each > share


@given(
    size=st.integers(1, 64),
    prompt_tokens=st.integers(1, 300),
    tokens=st.integers(1, 500),
    room=st.integers(0, 1000),
)
def test_reach_is_the_most_that_fits(size: int, prompt_tokens: int, tokens: int, room: int) -> None:
    """Guards against preemption by vLLM, which stores whole blocks."""
    blocks = Blocks(size, prompt_tokens)
    assert 0 <= blocks.shared < prompt_tokens
    assert blocks.own(tokens) % size == 0
    assert blocks.shared + blocks.own(tokens) >= prompt_tokens + tokens - 1
    reach = blocks.reach(room)
    assert blocks.own(reach) <= room
    assert blocks.own(reach + 1) > room
    assert blocks.reach(blocks.own(tokens)) >= tokens
