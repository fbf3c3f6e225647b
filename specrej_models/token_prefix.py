"""How many tokens of a text are computed already: longest common beginnings of token lists.

A session's texts begin with the prompt's tokens, which are computed once; each candidate's own
tokens follow. Every batch tokenizes its texts anew, as the last tokens of a text may change when it
grows: the longest common beginning is used again, the rest is computed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

_SLICE = 1024  # tokens that are compared at once


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    least = min(len(first), len(second))
    for begin in range(0, least, _SLICE):
        end = min(begin + _SLICE, least)
        if first[begin:end] != second[begin:end]:
            for index in range(begin, end):
                if first[index] != second[index]:
                    return index
    return least


def match(
    token_ids: Sequence[int], prompt: Sequence[int], shared: int, own: Sequence[int]
) -> tuple[int, int]:
    """How many of the first `token_ids` are the prompt's, and how many are computed in all.

    Computed are the prompt's first `shared` tokens and `own` after them, or all of the prompt's. If
    `token_ids` does not begin with these `shared` tokens, nothing of `own` can be used.
    """
    in_common = common_length(token_ids, prompt)
    if in_common < shared or not own:
        return in_common, in_common
    return shared, shared + common_length(token_ids[shared:], own)
