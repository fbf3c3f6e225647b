"""Who gets the next session: power of two choices, with a liking for where its prompt has been.

Pure. One choice is the backend that a hash of the prompt's beginning points at: equal prompts and
equal system prompts meet there, and are read once. The other is drawn at random. The less loaded of
the two wins, the first as long as it is not much busier (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001; rendezvous hashing after Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from specrej.contracts import Prompt

# Sessions' worth of load that a prompt which need not be read again makes up for.
AFFINITY_WORTH = 0.25
_PREFIX_CHARACTERS = 256


def order(prefix: str, loads: Mapping[str, float], random: Callable[[], float]) -> list[str]:
    """Addresses in the order in which they should be asked; all of `loads`.

    `loads`: in sessions, by address. `random` draws from [0, 1).
    """
    if not loads:
        return []
    favourite = max(loads, key=lambda address: _affinity(prefix, address))
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
    """What prompts that may share their beginning have in common: who asks, and how it begins."""
    beginning = prompt.turns[0].content if prompt.turns else ""
    return f"{cache_salt}/{beginning[:_PREFIX_CHARACTERS]}"


def _affinity(prefix: str, address: str) -> bytes:
    return hashlib.sha256(f"{address}/{prefix}".encode()).digest()
