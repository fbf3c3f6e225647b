"""One session over several generators: parts of its candidates at each, one ranking for all.

Each part is a session of its own whose ids follow those of the part before, so that together they
say what one session would have said. A part that is lost takes its candidates with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrator.backends.sessions import PlacedSession
from specrej.contracts import GeneratorDescription, Pruned, Round, RoundEnd, Session, SlotGauge
from specrej.errors import InternalError, InvalidRequest, Unavailable, Violation

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

SLOTS_EXCEEDED = "SLOTS_EXCEEDED"


def sizes(n: int, room: Mapping[K, int]) -> dict[K, int]:
    """How many of `n` candidates go where; few places, each in proportion to its room.

    `room`: the most that each place takes, in the order of preference.

    Raises:
        InvalidRequest: all of them together have not the room.
    """
    chosen: dict[K, int] = {}
    for place, most in room.items():
        if sum(chosen.values()) < n and most > 0:
            chosen[place] = most
    total = sum(chosen.values())
    if total < n:
        raise InvalidRequest(
            [Violation("n", f"at most {total} candidates fit into all generators, n is {n}")],
            reason=SLOTS_EXCEEDED,
            metadata={"candidates": str(total)},
        )
    shares = {place: n * most // total for place, most in chosen.items()}
    for place, most in chosen.items():
        shares[place] += min(n - sum(shares.values()), most - shares[place])
    return {place: share for place, share in shares.items() if share}


class Rooms:
    """The most candidates of a request that generators take, as far as is known.

    Learned from what they refuse: exact for who has refused, for others of more slots never too
    little.
    """

    def __init__(self, first_round_tokens: int) -> None:
        # A candidate holds at least so many slots: its newest token is not stored yet.
        self._least_slots = max(1, first_round_tokens - 1)
        self._refusals: list[tuple[int, int]] = []  # candidates, and the slots they were told for

    def learn(self, refused: InvalidRequest) -> None:
        """What somebody has refused to take."""
        if refused.reason == SLOTS_EXCEEDED:
            told = refused.metadata
            self._refusals.append((int(told.get("candidates", 0)), int(told.get("capacity", 0))))

    def of(self, description: GeneratorDescription) -> int:
        """The most that a generator takes."""
        most, slots = description.max_candidates, description.slots.capacity
        for candidates, capacity in self._refusals:
            more = max(0, slots - capacity)
            most = min(most, candidates + -(-more // self._least_slots))
        return most


@dataclass(slots=True)
class _Part:
    session: Session
    live: set[int]
    is_lost: bool = False


class SplitSession:
    """A `Session` of several; their ids follow each other."""

    def __init__(self, sessions: Sequence[tuple[int, PlacedSession]]) -> None:
        """`sessions`: each with the id of its first candidate."""
        self._parts = [_Part(each, set(range(first, first + each.n))) for first, each in sessions]
        self._lost: set[int] = set()  # ids, not told yet
        self._slots: dict[int, SlotGauge] = {}  # by part
        self._num_tokens = 0  # of every live candidate
        self.n = sum(session.n for _, session in sessions)
        self.prompt_tokens = sessions[0][1].prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        if not (self._lost or any(part.live for part in self._parts)):
            return Round((), RoundEnd.ALL_FINISHED, self._num_tokens, self._gauge())
        rounds = await self._of_all(lambda part: part.session.extend(until_tokens))
        for index, ended in rounds.items():
            part = self._parts[index]
            part.live -= {each.id for each in ended.candidates if each.finish}
            self._slots[index] = ended.slots
        lost, self._lost = self._lost, set()
        joined = _joined(list(rounds.values()))
        self._num_tokens = joined.num_tokens
        return replace(joined, slots=self._gauge(), lost=tuple(sorted(lost)))

    async def prune(self, keep: Collection[int]) -> Pruned:
        wanted = set(keep)
        for part in self._parts:
            part.live &= wanted
        pruned = await self._of_all(lambda part: part.session.prune(part.live), also_empty=True)
        self._slots |= {index: each.slots for index, each in pruned.items()}
        return Pruned(sum(each.freed_slots for each in pruned.values()), self._gauge())

    async def _of_all(
        self, ask: Callable[[_Part], Awaitable[T]], *, also_empty: bool = False
    ) -> dict[int, T]:
        """What every part answers that is there, and has anybody to answer for.

        Raises:
            Unavailable, InternalError: no part is left.
        """
        asked = [
            (index, part)
            for index, part in enumerate(self._parts)
            if not part.is_lost and (part.live or also_empty)
        ]
        if not asked:
            raise Unavailable("the generators that had the rest of the candidates were lost")
        answers = await asyncio.gather(*(ask(part) for _, part in asked), return_exceptions=True)
        answered: dict[int, T] = {}
        for (index, part), answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                answered[index] = answer
            elif isinstance(answer, Unavailable | InternalError):
                self._lose(index, part)
            else:
                raise answer
        if not answered:
            raise next(each for each in answers if isinstance(each, BaseException))
        return answered

    def _lose(self, index: int, part: _Part) -> None:
        part.is_lost = True
        self._lost |= part.live
        part.live = set()
        self._slots.pop(index, None)

    def _gauge(self) -> SlotGauge:
        return together(list(self._slots.values()))


def together(gauges: Sequence[SlotGauge]) -> SlotGauge:
    """The slots of all."""
    return SlotGauge(
        sum(each.capacity for each in gauges),
        sum(each.owned for each in gauges),
        sum(each.session for each in gauges),
        sum(each.cached for each in gauges),
    )


def _joined(rounds: Sequence[Round]) -> Round:
    """One round of all candidates; a part that is full is behind, and catches up after a cut."""
    ends = {each.ended_by for each in rounds}
    if RoundEnd.SLOTS_FULL in ends:
        ended_by = RoundEnd.SLOTS_FULL
    elif ends == {RoundEnd.ALL_FINISHED}:
        ended_by = RoundEnd.ALL_FINISHED
    else:
        ended_by = RoundEnd.DECISION_TOKEN
    return Round(
        tuple(sorted((c for each in rounds for c in each.candidates), key=lambda c: c.id)),
        ended_by,
        max(each.num_tokens for each in rounds),
        rounds[0].slots,
        sum(each.repeated_tokens for each in rounds),
        made_by=frozenset().union(*(each.made_by for each in rounds)),
    )
