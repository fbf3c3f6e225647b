"""Slot accounting: no slot is owned twice or lost, and every session is admitted."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specrej_models.slots import SlotLedger


class LedgerMachine(RuleBasedStateMachine):
    """Random sessions that stay within their room: the books balance at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SlotLedger(200)
        self.owned: dict[int, int] = {}
        self.next_id = 1

    @rule(floor=st.integers(1, 120), extra=st.integers(0, 300), waiting=st.integers(0, 3))
    def admit(self, floor: int, extra: int, waiting: int) -> None:
        if floor <= self.ledger.unshared:
            self.ledger.admit(self.next_id, floor, floor + extra, waiting)
            assert self.ledger.share_of(self.next_id) >= floor
            self.owned[self.next_id] = 0
            self.next_id += 1

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), count=st.integers(1, 50))
    def take(self, data: st.DataObject, count: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.owned)))
        count = min(count, self.ledger.room_of(session))
        self.ledger.take(session, count)
        self.owned[session] += count

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), waiting=st.integers(0, 3), floor=st.integers(0, 60))
    def prune(self, data: st.DataObject, waiting: int, floor: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.owned)))
        freed = self.owned[session] // 2
        self.ledger.give_back(session, freed)
        self.owned[session] -= freed
        before = self.ledger.share_of(session)
        self.ledger.narrow(session, floor, 500, waiting)
        assert min(before, max(floor, self.owned[session])) <= self.ledger.share_of(session)
        assert self.ledger.share_of(session) <= before

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), waiting=st.integers(0, 1), useful=st.integers(1, 400))
    def widen(self, data: st.DataObject, waiting: int, useful: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.owned)))
        before = self.ledger.share_of(session)
        self.ledger.widen(session, useful, waiting)
        assert self.ledger.share_of(session) >= before
        assert not waiting or self.ledger.share_of(session) == before

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.owned)))
        assert self.ledger.close(session) == self.owned.pop(session)
        assert self.ledger.close(session) == 0

    @invariant()
    def balances(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.owned == sum(self.owned.values())
        assert all(self.ledger.owned_by(i) == count for i, count in self.owned.items())


TestLedger = LedgerMachine.TestCase
