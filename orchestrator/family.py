"""Which stored answer of a family may serve which request. Pure: knows no Redis.

A family are requests for the same thing under the same reward that differ only in how hard is
searched (n, alpha, schedule, algorithm, seed), so that the scores of their answers compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.envelope import Envelope
from orchestrator.keys import Family
from specrej.contracts import FinishReason

Merit = tuple[bool, bool, float]


@dataclass(frozen=True, slots=True)
class Member:
    """What a family's index says of a stored answer."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )
    n: int  # candidates at the start
    score: float
    complete: bool  # ended by itself, not at max_tokens
    vetoed: bool
    returned: int  # candidates that were asked for
    stored_at: float  # seconds since the epoch

    @property
    def merit(self) -> Merit:
        """As in a single request: vetoed answers last, complete ones before truncated ones."""
        return (not self.vetoed, self.complete, self.score)


_MEMBER = TypeAdapter(Member)


def member_of(envelope: Envelope) -> Member:
    """The index's entry of a stored answer."""
    best = envelope.generation.best
    return Member(
        n=envelope.generation.n,
        score=best.score,
        complete=best.finish is FinishReason.STOP,
        vetoed=best.vetoed,
        returned=envelope.returned,
        stored_at=envelope.stored_at,
    )


def packed(member: Member) -> bytes:
    """As it stands in the index."""
    return _MEMBER.dump_json(member)


def unpacked(text: object) -> Member | None:
    """None for what is no entry of an index."""
    try:
        return _MEMBER.validate_json(text) if isinstance(text, bytes) else None
    except ValueError:
        return None


def may_serve(member: Member, asked: Family, own: Member | None) -> bool:
    """Whether an answer may stand in for the one stored for the request itself, or for none.

    Either it was searched for at least as hard, or it is better than what there is.
    """
    if member.vetoed or asked.n == 0 or member.returned < asked.return_candidates:
        return False
    if own is None:
        return member.n >= asked.n
    return member.merit > own.merit


def better_ones(members: Mapping[str, Member], asked: Family, own: Member | None) -> list[str]:
    """Names of the answers that may serve, best first; truncated ones only if none is complete."""
    fitting = {name: each for name, each in members.items() if may_serve(each, asked, own)}
    if any(each.complete and not each.vetoed for each in members.values()):
        fitting = {name: each for name, each in fitting.items() if each.complete}
    return sorted(fitting, key=lambda name: fitting[name].merit, reverse=True)
