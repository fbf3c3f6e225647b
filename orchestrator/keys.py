"""The keys of the cache: which requests must get the same answer, and which could share one.

Pure: knows no Redis. docs/cache.md lists the keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote

from specrej.contracts import (
    Algorithm,
    GenerationRequest,
    Normalization,
    Schedule,
    WeightedReward,
)

PREFIX = "specrej"  # of all keys; the ACL of docs/cache.md names it
FORMAT_VERSION = 4  # of keys and values; raise it when either changes
ALGORITHM_VERSION = 1  # raise it when the same request would get another answer

# The fields that count for each kind of schedule, and of normalization.
_FIELDS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "memory": (),
    "tokens": ("tokens",),
    "geometric": ("first", "factor"),
    "none": (),
    "fixed": ("mean", "deviation"),
    "batch": (),
}

# What requests of one family may differ in: how hard is searched, not what is searched for.
_OF_THE_SEARCH = ("n", "alpha", "schedule", "algorithm", "return_candidates")


@dataclass(frozen=True, slots=True)
class Family:
    """Requests whose answers are comparable, and what one of them asks for.

    `key` is that of the index of their stored answers.
    """

    key: str
    n: int  # 0: as many as fit
    return_candidates: int


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the answer of a request is stored; `family` is None if it can serve no other."""

    answer: str
    family: Family | None = None


def tenant_digest(tenant: str) -> str:
    """32 characters that stand for a tenant wherever its name has no business."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def cache_keys(
    request: GenerationRequest,
    *,
    tenant: str,
    generator_fingerprint: str,
    reward_fingerprint: str,
) -> Keys:
    """The keys of a request whose defaults are filled in; they hold no text of prompt or tenant.

    Requests that must get the same answer have the same answer key, whatever the order of their
    rewards. No tenant can name another's key: the tenant's place is a digest, other parts are
    escaped.
    """
    made_by = (tenant_digest(tenant), generator_fingerprint, reward_fingerprint)
    answer = _key(made_by, _digest(request))
    chosen = request.selection
    if any(reward.normalization.kind == "batch" for reward in chosen.rewards):
        return Keys(answer)  # such scores compare within one request only
    family = _key(made_by, _digest(request, ignored=_OF_THE_SEARCH), "family")
    return Keys(answer, Family(family, chosen.n, chosen.return_candidates))


def flight_key(answer_key: str) -> str:
    """Where it says who is making the answer of `answer_key`."""
    return f"{PREFIX}:flight:{answer_key.removeprefix(f'{PREFIX}:')}"


def _key(made_by: tuple[str, ...], digest: str, *kind: str) -> str:
    parts = (*kind, f"v{FORMAT_VERSION}", *made_by, f"a{ALGORITHM_VERSION}", digest)
    return ":".join((PREFIX, *(quote(part, safe="") for part in parts)))


def _digest(request: GenerationRequest, ignored: Collection[str] = ()) -> str:
    """SHA-256 of what the answer depends on; a field new to the contract counts by itself.

    With fields of the selection `ignored`, the seed is ignored as well.
    """
    fields = asdict(request)
    # The generator's fingerprint says more than the model's name does.
    # What is degraded is never stored, whoever allows it.
    del fields["cache"], fields["model"], fields["allow_degraded"]
    selection = fields["selection"]
    rewards = sorted(request.selection.rewards, key=lambda reward: reward.name)
    selection["rewards"] = [_reward_fields(reward) for reward in rewards]
    selection["schedule"] = _fields_of(request.selection.schedule)
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        del selection["alpha"], selection["schedule"]
    for name in ignored:
        selection.pop(name, None)
    if ignored:
        del fields["sampling"]["seed"]
    # Escaped to ASCII, so that NFC and NFD stay apart and no text is too strange to encode.
    canonical = json.dumps(_canonical(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _reward_fields(reward: WeightedReward) -> dict[str, object]:
    return {**asdict(reward), "normalization": _fields_of(reward.normalization)}


def _fields_of(value: Schedule | Normalization) -> dict[str, object]:
    """The fields that count for its kind."""
    fields = {name: getattr(value, name) for name in _FIELDS_OF_KIND[value.kind]}
    return {"kind": value.kind, **fields}


def _canonical(value: Any) -> Any:
    """Enums as their values; one spelling for equal numbers (1 and 1.0, 0.0 and -0.0)."""
    match value:
        case dict():
            return {name: _canonical(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_canonical(inner) for inner in value]
        case Enum():
            return value.value
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
