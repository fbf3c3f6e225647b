"""Which tokens of a growing text are known already: integers only, no tensors.

A session's texts all begin with the prompt's tokens, which are computed once; each candidate's own
tokens follow. Texts are tokenised anew every time, as their last tokens may change when they grow:
the longest common beginning is reused, whatever comes after it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a sequence is known: `shared` tokens of the prompt, then `own` of its own."""

    shared: int
    own: int

    @property
    def total(self) -> int:
        return self.shared + self.own

    def before(self, position: int) -> Match:
        """What of it stands before a position."""
        shared = min(self.shared, position)
        return Match(shared, min(self.own, position - shared) if shared == self.shared else 0)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def match(
    token_ids: Sequence[int], prompt: Sequence[int], shared: int, own: Sequence[int]
) -> Match:
    """What of `token_ids` is known from the prompt's first `shared` tokens and `own` after them.

    Where not even these are all there, nothing of `own` is of use, and `shared` becomes as many as
    the sequence has in common with the whole prompt.
    """
    in_common = common(token_ids, prompt)
    if in_common < shared or not own:
        return Match(in_common, 0)
    return Match(shared, common(token_ids[shared:], own))
