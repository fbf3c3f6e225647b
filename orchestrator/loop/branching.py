"""Where forks go: the policy of branching (see `specrej.contracts.Branching`).

Pure functions of numbers: no model, no wire, no clock. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence


def forks_of(survivors: Sequence[int], width: int, first_id: int) -> dict[int, int]:
    """The parent of each fork that `width` candidates need, in turn from the first survivor.

    `survivors` are ids, best first; forks have consecutive ids from `first_id` on.
    """
    count = max(0, width - len(survivors)) if survivors else 0
    return {first_id + index: survivors[index % len(survivors)] for index in range(count)}
