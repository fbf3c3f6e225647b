"""One session over several generators: parts of its candidates at each, one ranking for all.

Each part is a session of its own whose ids follow those of the part before, so that together they
say what one session would have said. A part that is lost takes its candidates with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrator.backends.sessions import Opening, PlacedSession
from specrej.contracts import GeneratorDescription, Pruned, Round, RoundEnd, Session, SlotGauge
from specrej.errors import InternalError, InvalidRequest, Unavailable, Violation

T = TypeVar("T")

_TOO_LARGE = "SLOTS_EXCEEDED"


def sizes(n: int, room: Mapping[str, int]) -> dict[str, int]:
    """How many of `n` candidates go where; few places, each in proportion to its room.

    `room`: the most that each place takes, in the order of preference.

    Raises:
        InvalidRequest: all of them together have not the room.
    """
    chosen: dict[str, int] = {}
    for place, most in room.items():
        if sum(chosen.values()) < n and most > 0:
            chosen[place] = most
    total = sum(chosen.values())
    if total < n:
        raise InvalidRequest(
            [Violation("n", f"at most {total} candidates fit into all generators, n is {n}")],
            reason=_TOO_LARGE,
            metadata={"candidates": str(total)},
        )
    shares = {place: n * most // total for place, most in chosen.items()}
    for place, most in chosen.items():
        shares[place] += min(n - sum(shares.values()), most - shares[place])
    return {place: share for place, share in shares.items() if share}


def room_of(
    description: GeneratorDescription, refused: InvalidRequest, refused_by: GeneratorDescription,
    first_round_tokens: int,
) -> int:  # fmt: skip
    """The most candidates that a generator takes, from what another one said when it refused."""
    most = description.max_candidates
    if refused.reason == _TOO_LARGE:
        told = int(refused.metadata.get("candidates", 0))
        more_slots = description.slots.capacity - refused_by.slots.capacity
        most = min(most, told + more_slots // max(1, first_round_tokens))
    return max(0, most)


def may_split(opening: Opening, refused: InvalidRequest, refused_by: GeneratorDescription) -> bool:
    """Whether a request was refused for the number of its candidates alone."""
    if refused.reason == _TOO_LARGE:
        return int(refused.metadata.get("candidates", 0)) > 0
    return opening.n > refused_by.max_candidates


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
        self.n = sum(session.n for _, session in sessions)
        self.prompt_tokens = sessions[0][1].prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        rounds = await self._of_all(lambda part: part.session.extend(until_tokens))
        for index, ended in rounds.items():
            part = self._parts[index]
            part.live -= {each.id for each in ended.candidates if each.finish}
            self._slots[index] = ended.slots
        lost, self._lost = self._lost, set()
        joined = _joined(list(rounds.values()))
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
    )
