"""Where forks go: the policy of branching (see `specrej.contracts.Branching`).

Pure functions of numbers: no model, no wire, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrej.contracts import Branching


def width_at(branching: Branching, first_tokens: int, growth_tokens: int) -> int:
    """Live candidates of a round of `growth_tokens`; the first round has `first_tokens`."""
    part = math.pow(first_tokens / max(first_tokens, growth_tokens), branching.taper)
    return max(branching.keep, round(branching.width * part))


def forks_of(survivors: Sequence[int], width: int, first_id: int) -> dict[int, int]:
    """The parent of each fork that `width` candidates need, in turn from the first survivor.

    `survivors` are ids, best first; forks have consecutive ids from `first_id` on.
    """
    count = max(0, width - len(survivors)) if survivors else 0
    return {first_id + index: survivors[index % len(survivors)] for index in range(count)}
