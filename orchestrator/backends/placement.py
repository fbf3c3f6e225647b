"""Placement of sessions: power of two choices, with an affinity for equal prompt beginnings.

Pure. The first choice is the backend that a hash of the prompt's beginning selects: equal prompts
and equal system prompts meet there and are prefilled once. The second is drawn at random. The less
loaded of the two wins, with a bonus for the first (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001; consistent hashing after Karger et al., 1997).
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from specrej.contracts import Prompt

T = TypeVar("T")

# Additional load, in sessions, at which the first choice still wins: it may skip a prefill.
AFFINITY_WORTH = 0.25
_PREFIX_CHARACTERS = 256
_POINTS = 32  # of a member on the ring: the more, the more equal are the members' parts of it
_POINT_BYTES = 8


class Ring(Generic[T]):
    """Members on a ring of hashes: one that is added or removed moves only its own prefixes."""

    def __init__(self, members: Mapping[str, T]) -> None:
        """`members` by address."""
        self._members = {
            digest[start : start + _POINT_BYTES]: member
            for address, member in members.items()
            for digest in (_hash(address, _POINTS * _POINT_BYTES),)
            for start in range(0, len(digest), _POINT_BYTES)
        }
        self._points = sorted(self._members)

    def after(self, prefix: str) -> Iterator[T]:
        """The members of all points, from that of the prefix on."""
        start = bisect(self._points, _hash(prefix, _POINT_BYTES))
        for index in range(start - len(self._points), start):
            yield self._members[self._points[index]]


def _hash(text: str, num_bytes: int) -> bytes:
    return hashlib.shake_128(text.encode()).digest(num_bytes)


def order(
    favourite: T, members: Sequence[T], load: Callable[[T], float], random: Callable[[], float]
) -> Iterator[T]:
    """All members, best first; only the loads of the first two are computed before they fail.

    `favourite`: the member for the prompt. `load`: in sessions. `random` draws from [0, 1).
    """
    chosen = [favourite]
    if len(members) > 1:
        other = members[int(random() * (len(members) - 1))]
        other = members[-1] if other is favourite else other
        chosen.append(other)
        if load(other) + AFFINITY_WORTH < load(favourite):
            chosen.reverse()
    yield from chosen
    yield from sorted((member for member in members if member not in chosen), key=load)


def prefix_of(prompt: Prompt, cache_salt: str) -> str:
    """Equal in prompts that may share their prefilled beginning."""
    beginning = prompt.turns[0].text if prompt.turns else ""
    return f"{cache_salt}/{beginning[:_PREFIX_CHARACTERS]}"
