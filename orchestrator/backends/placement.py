"""Placement of sessions: power of two choices, with an affinity for equal prompt beginnings.

Pure. The first choice is the backend that a hash of the prompt's beginning selects: equal prompts
and equal system prompts meet there and are prefilled once. The second is drawn at random. The less
loaded of the two wins, with a bonus for the first (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001; rendezvous hashing after Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from specrej.contracts import Prompt

# Additional load, in sessions, at which the first choice still wins: it may skip a prefill.
AFFINITY_WORTH = 0.25
_PREFIX_CHARACTERS = 256


def order(prefix: str, loads: Mapping[str, float], random: Callable[[], float]) -> list[str]:
    """All addresses of `loads`, best first.

    `loads`: in sessions, by address. `random` draws from [0, 1).
    """
    if not loads:
        return []
    favourite = max(
        loads, key=lambda address: hashlib.sha256(f"{address}/{prefix}".encode()).digest()
    )
    others = sorted(address for address in loads if address != favourite)
    chosen = [favourite]
    if others:
        other = others[int(random() * len(others))]
        chosen.append(other)
        if loads[other] + AFFINITY_WORTH < loads[favourite]:
            chosen.reverse()
    rest = sorted(loads.keys() - set(chosen), key=lambda address: (loads[address], address))
    return [*chosen, *rest]


def prefix_of(prompt: Prompt, cache_salt: str) -> str:
    """Equal in prompts that may share their prefilled beginning."""
    beginning = prompt.turns[0].content if prompt.turns else ""
    return f"{cache_salt}/{beginning[:_PREFIX_CHARACTERS]}"
