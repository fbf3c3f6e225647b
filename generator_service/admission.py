"""The queue of sessions that wait for KV slots, first come, first served; standard library only.

The own engine, the stock engine and the toy use it. They differ in how many slots a candidate's
tokens take, which is `Demand.slots_of`, and in how they store prompts.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specrej.contracts import Forks
from specrej.contracts.errors import InvalidRequest, Overloaded, Violation
from specrej_models.slots import SlotLedger

# Blocks that no candidate gets: vLLM reserves one, and counts the newest token, which is never
# stored, against the longest text.
SPARE_BLOCKS = 2


def own_slots(tokens: int) -> int:
    """Slots of one candidate in the own engine, which stores the newest token in the next step."""
    return max(0, tokens - 1)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a session needs, in slots.

    n: candidates; 0: as many as fit. prompt_slots: slots of the whole prompt. slots_of: slots of
    one candidate by its number of new tokens, without the prompt.
    """

    n: int
    prompt_slots: int
    first_round_tokens: int
    max_tokens: int
    slots_of: Callable[[int], int]

    @property
    def least(self) -> int:
        """The fewest candidates at the start."""
        return self.n or 1

    @property
    def first_round_slots(self) -> int:
        """Slots of one candidate at the end of the first round."""
        return self.slots_of(max(1, min(self.first_round_tokens, self.max_tokens)))

    def floor(self, n: int) -> int:
        """The least useful share: a first round for `n` candidates, or one whole answer, whichever
        takes more slots."""
        return max(n * self.first_round_slots, self.whole(1))

    def max_candidates_within(self, slots: int) -> int:
        """The most candidates whose `floor` is at most `slots`, which exclude the prompt's."""
        if slots < self.whole(1):
            return 0
        return slots // max(1, self.first_round_slots)

    def whole(self, n: int) -> int:
        """The most that `n` candidates can ever use."""
        return n * self.slots_of(self.max_tokens)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Slots of a prompt's candidates in vLLM, in whole blocks of `size` tokens."""

    size: int
    prompt_tokens: int

    @property
    def shared(self) -> int:
        """Slots of the prompt's whole blocks before its last token, computed per candidate."""
        return (self.prompt_tokens - 1) // self.size * self.size

    def own(self, tokens: int) -> int:
        """Slots of one candidate of so many new tokens, the newest of which is not stored yet."""
        if not tokens:
            return 0
        stored = self.prompt_tokens - self.shared + tokens - 1
        return -(-stored // self.size) * self.size

    def reach(self, room: int) -> int:
        """The most new tokens for which `own` is at most `room`."""
        stored = room // self.size * self.size
        return max(0, stored - (self.prompt_tokens - self.shared) + 1) if stored else 0


class Waiting(Protocol):
    """A session as the queue sees it."""

    @property
    def id(self) -> int: ...
    @property
    def demand(self) -> Demand: ...


S = TypeVar("S", bound=Waiting)


class AdmissionQueue(Generic[S]):
    """Sessions that wait, and the shares of those that were admitted."""

    def __init__(
        self,
        ledger: SlotLedger,
        admit: Callable[[S, int], None],
        *,
        max_waiting: int,
        auto_candidates: int,
        max_candidates: int = sys.maxsize,
        missing: Callable[[S], int] = lambda session: session.demand.prompt_slots,
    ) -> None:
        """`admit(session, n)` opens a session with n candidates; it must call `give_share`.

        max_waiting: sessions that may wait; auto_candidates: most candidates where N is left open,
        at most max_candidates, the most of a session; `missing(session)`: slots of its prompt that
        no open session holds yet.
        """
        self._ledger = ledger
        self._admit = admit
        self._max_waiting = max_waiting
        self._auto_candidates = min(auto_candidates, max_candidates)
        self._max_candidates = max_candidates
        self._missing = missing
        self._waiting: deque[S] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[S]:
        return iter(self._waiting)

    def enter(self, session: S) -> None:
        """Admit a session, now or when slots are free.

        Raises:
            InvalidRequest: more candidates than `max_candidates`, or it can never fit.
            Overloaded: too many sessions wait already.
        """
        self._check_capacity(session.demand)
        self._waiting.append(session)
        self.admit_waiting()
        if session in self._waiting and len(self._waiting) > self._max_waiting:
            self._waiting.remove(session)
            raise Overloaded(f"no slots are free and {self._max_waiting} sessions wait already")

    def leave(self, session_id: int) -> None:
        """Remove a session if it waits."""
        for session in [*self._waiting]:
            if session.id == session_id:
                self._waiting.remove(session)

    def admit_waiting(self) -> None:
        """Admit the sessions that fit, in order of arrival: none overtakes, so none starves."""
        while self._waiting and (n := self._fitting(self._waiting[0])):
            self._admit(self._waiting.popleft(), n)

    def give_share(self, session: S, n: int) -> None:
        """Give an admitted session its share; its prompt is held already."""
        demand = session.demand
        self._ledger.admit(session.id, demand.floor(n), demand.whole(n), len(self._waiting))

    def widen(self, session: S, live: int) -> None:
        """Raise the share towards all that `live` candidates can use, unless a session waits."""
        self._ledger.widen(session.id, session.demand.whole(live), len(self._waiting))

    def narrow(self, session: S, live: int, num_tokens: int) -> None:
        """Lower the share after a prune to what `live` candidates of `num_tokens` can use.

        If sessions wait, lower it to the fair share, but never below the next round's slots, nor
        below one whole answer.
        """
        demand = session.demand
        ahead = min(num_tokens + demand.first_round_tokens, demand.max_tokens)
        floor = max(demand.whole(min(live, 1)), live * demand.slots_of(ahead))
        self._ledger.narrow(session.id, floor, demand.whole(live), len(self._waiting))

    def with_room(
        self, session: S, forks: Forks, live: Collection[int], num_kept: int, num_tokens: int
    ) -> Forks:
        """The forks of `live` candidates that fit beside `num_kept` survivors, in order.

        Each candidate holds the slots of `num_tokens` tokens and needs those of one more. Forks
        raise the share only if no session waits.
        """
        possible = [(number, parent) for number, parent in forks.items() if parent in live]
        if not possible:
            return {}
        self.widen(session, num_kept + len(possible))
        next_slots = session.demand.slots_of(num_tokens + 1)
        rows = self._ledger.share_of(session.id) // max(1, next_slots)
        return dict(possible[: max(0, rows - num_kept)])

    def is_reduced(self, session: S, n: int) -> bool:
        """Whether N was left open, and without other sessions it would be more than `n`."""
        demand = session.demand
        room = demand.max_candidates_within(self._ledger.capacity - demand.prompt_slots)
        return not demand.n and n < min(self._auto_candidates, room)

    def _fitting(self, session: S) -> int:
        """Candidates with which a session can be admitted now; 0: none."""
        demand = session.demand
        least = demand.least
        floor = demand.floor(least)
        # First without the prompt: comparing it with the stored prompts in every step is slow.
        if floor > self._ledger.unshared:
            return 0
        missing = self._missing(session)
        if missing + floor > self._ledger.unshared:
            return 0
        room = demand.max_candidates_within(self._ledger.unshared - missing)
        return demand.n or max(least, min(self._auto_candidates, room))

    def _check_capacity(self, demand: Demand) -> None:
        least, limit = demand.least, self._max_candidates
        if least > limit:
            raise InvalidRequest([Violation("n", f"must be at most {limit}, is {least}")])
        capacity = self._ledger.capacity
        needed = demand.prompt_slots + demand.floor(least)
        if needed <= capacity:
            return
        most = demand.max_candidates_within(capacity - demand.prompt_slots)
        numbers = {"needed": needed, "capacity": capacity, "candidates": min(most, limit)}
        raise InvalidRequest(
            [Violation("n", f"needs {needed} KV slots, capacity is {capacity}")],
            reason="SLOTS_EXCEEDED",
            metadata={name: str(number) for name, number in numbers.items()},
        )
