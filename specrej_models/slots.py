"""Ownership of KV slots: integers only, no tensors, no scheduling.

A slot is room for one token's keys and values across all layers. Each session *owns* the slots
that hold its candidates' tokens and may own at most its *share*. Prompts, which sessions may have
in common, are *held* while a session uses them and *cached* afterwards. Prompts held and shares
never add up to more than the capacity, and what is cached gives way to them, so a session that
stays within its share can never run the machine out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """One session's slots: those that hold tokens, and the most that may."""

    owned: int
    share: int


class SlotLedger:
    """All slots of a generator and their owners."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 slot, is {capacity}")
        self.capacity = capacity
        self.held = 0  # prompt tokens that sessions use, each counted once
        self.cached = 0  # prompt tokens that no session uses any more
        self._holdings: dict[int, Holding] = {}

    @property
    def owned(self) -> int:
        """Slots in use: those that sessions own, and held prompts."""
        # Other threads read gauges while the engine changes them. dict.copy() is atomic;
        # iterating, even by tuple(), is not: its allocation can run the garbage collector.
        return self.held + sum(holding.owned for holding in self._holdings.copy().values())

    @property
    def unshared(self) -> int:
        """Slots outside all shares, those of cached prompts included."""
        return self.capacity - self.held - sum(h.share for h in self._holdings.values())

    @property
    def num_sessions(self) -> int:
        return len(self._holdings)

    def owned_by(self, session_id: int) -> int:
        """Slots a session owns; 0 for one that is gone."""
        holding = self._holdings.get(session_id)
        return holding.owned if holding else 0

    def share_of(self, session_id: int) -> int:
        return self._holdings[session_id].share

    def admit(self, session_id: int, floor: int, useful: int, num_waiting: int) -> None:
        """Give a session a share from `floor`, which must be at most `unshared`, to `useful`: the
        fair one if others wait, else `useful`."""
        fair = self._fair(self.num_sessions + 1 + num_waiting) if num_waiting else self.capacity
        share = min(self.unshared, max(floor, min(useful, fair)))
        self._holdings[session_id] = Holding(owned=0, share=share)

    def take(self, session_id: int, count: int) -> None:
        """Own `count` more slots; the caller has checked `room_of`."""
        self._holdings[session_id].owned += count

    def give_back(self, session_id: int, count: int) -> None:
        """Own `count` slots less."""
        self._holdings[session_id].owned -= count

    def room_of(self, session_id: int) -> int:
        """Slots a session may still take."""
        holding = self._holdings[session_id]
        return holding.share - holding.owned

    def widen(self, session_id: int, useful: int, num_waiting: int) -> None:
        """Raise a share towards `useful` from unshared slots, unless sessions wait for them."""
        holding = self._holdings[session_id]
        if not num_waiting:
            holding.share += max(0, min(useful - holding.share, self.unshared))

    def narrow(self, session_id: int, floor: int, useful: int, num_waiting: int) -> None:
        """Lower a share after a prune: to `useful`, or to the fair one if others wait.

        Never below `floor`.
        """
        holding = self._holdings[session_id]
        fair = self._fair(self.num_sessions + num_waiting) if num_waiting else self.capacity
        target = max(holding.owned, floor, min(useful, fair))
        holding.share = min(holding.share, target)

    def close(self, session_id: int) -> int:
        """Free everything a session owns; returns how much; 0 if it is gone already."""
        holding = self._holdings.pop(session_id, None)
        return holding.owned if holding else 0

    def hold(self, count: int) -> None:
        """A session's prompt takes `count` more slots."""
        self.held += count

    def reuse(self, count: int) -> None:
        """A session uses cached slots."""
        self.cached -= count
        self.held += count

    def retire(self, count: int) -> None:
        """The last session that used these prompt slots is gone; they stay cached."""
        self.held -= count
        self.cached += count

    def evict(self, count: int) -> None:
        """Free `count` cached slots."""
        self.cached -= count

    def check_integrity(self) -> None:
        """Raises AssertionError if the numbers of slots are inconsistent."""
        for session_id, holding in self._holdings.items():
            assert 0 <= holding.owned <= holding.share, (session_id, holding)
        assert self.held >= 0
        assert 0 <= self.cached <= self.unshared <= self.capacity, (self, self._holdings)

    def _fair(self, num_sessions: int) -> int:
        return (self.capacity - self.held) // num_sessions
