"""One session over several generators: parts of its candidates at each, one ranking for all.

Each part is a session of its own. Its ids follow those of the part before, so that the candidates
are those of one session. If a part is lost, its candidates are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from orchestrator.backends.sessions import PlacedSession
from specrej.contracts import (
    NO_FORKS,
    Forks,
    GeneratorDescription,
    Pruned,
    Round,
    RoundEnd,
    Session,
    SlotGauge,
)
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    SlotsExceeded,
    Unavailable,
    Violation,
)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def shares_of(n: int, room: Mapping[K, int]) -> dict[K, int]:
    """Candidates by place: the first places that together hold `n`, in proportion to their room.

    `room`: the most candidates that each place accepts, in the order of preference.

    Raises:
        SlotsExceeded: all places together accept fewer.
    """
    chosen: dict[K, int] = {}
    for place, most in room.items():
        if sum(chosen.values()) < n and most > 0:
            chosen[place] = most
    total = sum(chosen.values())
    if total < n:
        violation = Violation("n", f"at most {total} candidates fit into all generators, n is {n}")
        raise SlotsExceeded([violation], max_candidates=total)
    shares = {place: n * most // total for place, most in chosen.items()}
    for place, most in chosen.items():
        shares[place] += min(n - sum(shares.values()), most - shares[place])
    return {place: share for place, share in shares.items() if share}


class CapacityEstimates:
    """The most candidates of one request that each generator accepts, learned from refusals.

    Exact for a generator that has refused; for others with more slots never too small.
    """

    def __init__(self, first_round_tokens: int) -> None:
        # A candidate holds at least so many slots: its newest token has none yet.
        self._least_slots = max(1, first_round_tokens - 1)
        self._refusals: list[tuple[int, int]] = []  # candidates, capacity

    def learn(self, refused: InvalidRequest) -> None:
        """Note a generator's refusal."""
        if isinstance(refused, SlotsExceeded):
            self._refusals.append((refused.max_candidates, refused.capacity))

    def of(self, description: GeneratorDescription) -> int:
        """The most candidates that a generator accepts."""
        most, slots = description.max_candidates, description.slots.capacity
        for candidates, capacity in self._refusals:
            more = max(0, slots - capacity)
            most = min(most, candidates + -(-more // self._least_slots))
        return most


@dataclass(eq=False, slots=True)
class _Part:
    session: Session
    live: set[int]
    is_lost: bool = False


class SplitSession:
    """A `Session` of several sessions with consecutive ids."""

    def __init__(self, sessions: Sequence[tuple[int, PlacedSession]]) -> None:
        """`sessions`: with the id of the first candidate of each."""
        self._parts = [_Part(one, set(range(first, first + one.n))) for first, one in sessions]
        self._lost: set[int] = set()  # ids, until the next round reports them
        self._slots: dict[int, SlotGauge] = {}  # by part
        self._num_tokens = 0  # of every live candidate
        self.n = sum(session.n for _, session in sessions)
        self.prompt_tokens = sessions[0][1].prompt_tokens
        self.reduced = False  # only sessions with a given n are split

    async def extend(self, until_tokens: int) -> Round:
        """As `Session.extend`. Raises InternalError: a generator sent candidates of others."""
        if not (self._lost or any(part.live for part in self._parts)):
            return Round((), RoundEnd.ALL_FINISHED, self._num_tokens, self._gauge())
        rounds = await self._of_all(lambda part: part.session.extend(until_tokens))
        for index, ended in rounds.items():
            part = self._parts[index]
            if foreign := {c.id for c in ended.candidates} - part.live:
                raise InternalError(f"a generator sent {len(foreign)} candidates of others")
            part.live -= {c.id for c in ended.candidates if c.finish}
            self._slots[index] = ended.slots
        lost, self._lost = self._lost, set()
        joined = _joined(list(rounds.values()))
        self._num_tokens = joined.num_tokens
        return replace(joined, slots=self._gauge(), lost=tuple(sorted(lost)))

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """As `Session.prune`; a fork is made where its parent is."""
        wanted, forked = set(keep), dict[_Part, Forks]()
        for part in self._parts:
            forked[part] = {n: parent for n, parent in forks.items() if parent in part.live}
            part.live &= wanted
        pruned = await self._of_all(
            lambda part: part.session.prune(part.live, forked[part]), also_empty=True
        )
        refused = set(forks)
        for index, outcome in pruned.items():
            part, self._slots[index] = self._parts[index], outcome.slots
            made = forked[part].keys() - {*outcome.refused}
            part.live |= made
            refused -= made
        freed = sum(outcome.freed_slots for outcome in pruned.values())
        return Pruned(freed, self._gauge(), tuple(sorted(refused)))

    async def _of_all(
        self, call: Callable[[_Part], Awaitable[T]], *, also_empty: bool = False
    ) -> dict[int, T]:
        """Results of all parts that are not lost and have live candidates, by index.

        Raises:
            Unavailable, InternalError: no part is left.
        """
        parts = [
            (index, part)
            for index, part in enumerate(self._parts)
            if not part.is_lost and (part.live or also_empty)
        ]
        if not parts:
            raise Unavailable("the generators that had the rest of the candidates were lost")
        outcomes = await asyncio.gather(*(call(part) for _, part in parts), return_exceptions=True)
        results: dict[int, T] = {}
        for (index, part), outcome in zip(parts, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                results[index] = outcome
            elif isinstance(outcome, Unavailable | InternalError):
                part.is_lost = True
                self._lost |= part.live
                part.live = set()
                self._slots.pop(index, None)
            else:
                raise outcome
        if not results:
            raise next(outcome for outcome in outcomes if isinstance(outcome, BaseException))
        return results

    def _gauge(self) -> SlotGauge:
        return together(list(self._slots.values()))


def together(gauges: Sequence[SlotGauge]) -> SlotGauge:
    return SlotGauge(
        sum(gauge.capacity for gauge in gauges),
        sum(gauge.owned for gauge in gauges),
        sum(gauge.session for gauge in gauges),
        sum(gauge.cached for gauge in gauges),
    )


def _joined(rounds: Sequence[Round]) -> Round:
    """One round of all candidates; a part with full slots lags until it has been cut."""
    ends = {part.ended_by for part in rounds}
    if RoundEnd.SLOTS_FULL in ends:
        ended_by = RoundEnd.SLOTS_FULL
    elif ends == {RoundEnd.ALL_FINISHED}:
        ended_by = RoundEnd.ALL_FINISHED
    else:
        ended_by = RoundEnd.DECISION_TOKEN
    return Round(
        tuple(sorted((c for part in rounds for c in part.candidates), key=lambda c: c.id)),
        ended_by,
        max(part.num_tokens for part in rounds),
        rounds[0].slots,
        sum(part.repeated_tokens for part in rounds),
        made_by=frozenset().union(*(part.made_by for part in rounds)),
        token_texts=tuple(dict.fromkeys(text for part in rounds for text in part.token_texts)),
        prompt_tokens=rounds[0].prompt_tokens,
    )
