"""Keys of the cache: which requests have the same answer, and which have comparable ones.

Pure: no calls to Redis. docs/cache.md lists the keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from json import JSONEncoder
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from orchestrator.cache.secret import Secret
from specrej import fingerprint
from specrej.contracts import Algorithm, GenerationRequest, Selection

PREFIX = "specrej"  # of all keys; the ACL rules in docs/cache.md contain it
FORMAT_VERSION = 9  # of keys and values; raise it when either changes
ALGORITHM_VERSION = 2  # raise it when the same request would get another answer

# The fields that each kind of normalization uses.
_FIELDS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "fixed": ("mean", "deviation"),
    "batch": (),
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the answer of a request is stored, and listed for comparable requests.

    Comparable requests differ only in how they search: in n, alpha, schedule, algorithm, candidates
    to return and seed. `index` is the key of the hash that lists their stored answers; empty if the
    scores of this request compare with no other's.
    """

    answer: str
    index: str = ""
    n: int = 0  # of the request; 0: as many as fit
    return_candidates: int = 1  # of the request
    prefer_complete: bool = True  # of the request
    tenant: str = ""  # key of the index of all answers of the tenant; empty: they are not counted


def tenant_digest(tenant: str) -> str:
    """32 characters that identify a tenant where its name must not appear; keys in Redis have
    `hashed_tenant` instead."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def cache_keys(
    request: GenerationRequest,
    *,
    tenant: str,
    generator_fingerprint: str,
    reward_fingerprint: str,
    secret: Secret,
) -> Keys:
    """The keys of a request with its defaults filled in. They contain no text of prompt or tenant.

    The order of rewards and of biases does not matter. No tenant can construct another's key: the
    tenant's part is a keyed hash, and the other parts are escaped. A reader of Redis that lacks the
    secret cannot compute the hash of a request, and so cannot confirm a guessed prompt.
    """
    owner = hashed_tenant(tenant, secret)
    # Nothing else in a key has a character that must be escaped.
    made_by = (
        f"{owner}:{quote(generator_fingerprint, safe='')}:{quote(reward_fingerprint, safe='')}"
    )
    canonical = _canonical_fields(request)
    # Hash the prompt once: it can have megabytes.
    canonical["prompt"] = hashlib.sha256(_encoded(canonical["prompt"])).hexdigest()
    selection, of_tenant = request.selection, tenant_key(owner)
    search = dict(canonical["selection"])
    if selection.algorithm is Algorithm.BEST_OF_N:
        del search["alpha"], search["schedule"]
    answer = _key("", made_by, {**canonical, "selection": search}, secret)
    if any(reward.normalization.kind == "batch" for reward in selection.rewards):
        return Keys(answer, tenant=of_tenant)  # such scores compare only within one request
    comparable = {
        **canonical,
        "selection": {**search, **_ANY_SEARCH},
        "sampling": {**canonical["sampling"], "seed": 0},
    }
    index = _key(":comparable", made_by, comparable, secret)
    returned, prefer_complete = selection.return_candidates, selection.prefer_complete
    return Keys(answer, index, selection.n, returned, prefer_complete, of_tenant)


def hashed_tenant(tenant: str, secret: Secret) -> str:
    """The part of all keys that identifies their tenant."""
    return secret.hash("tenant", tenant.encode(errors="surrogatepass")).hex()[:32]


def tenant_key(hashed: str) -> str:
    """The key of the index of all answers of a tenant."""
    return f"{PREFIX}:tenant:v{FORMAT_VERSION}:{hashed}"


def record_key(request_id: str, hashed_tenant: str) -> str:
    """The key of the record of a request; with an empty id that of the tenant's list."""
    return f"{PREFIX}:record:v{FORMAT_VERSION}:{hashed_tenant}:{request_id}"


def flight_key(answer_key: str) -> str:
    """The key of the lease of the process that computes the answer of `answer_key`."""
    return f"{PREFIX}:flight:{answer_key.removeprefix(f'{PREFIX}:')}"


def _key(kind: str, made_by: str, canonical: Mapping[str, Any], secret: Secret) -> str:
    digest = secret.hash("request", _encoded(canonical)).hex()
    return f"{PREFIX}{kind}:v{FORMAT_VERSION}:{made_by}:a{ALGORITHM_VERSION}:{digest}"


def _canonical_fields(request: GenerationRequest) -> dict[str, Any]:
    """All fields that the answer depends on, new ones of the contract included."""
    fields: dict[str, Any] = _canonical(request)
    # Degraded answers are never stored. The generator's fingerprint identifies its model, and
    # `model` is the name of one of its adapters.
    del fields["cache"], fields["allow_degraded"]
    if not request.model:
        del fields["model"]
    fields["sampling"]["logit_bias"].sort(key=itemgetter("token_id"))
    rewards: list[dict[str, Any]] = fields["selection"]["rewards"]
    rewards.sort(key=itemgetter("name"))
    for reward in rewards:
        kind = reward["normalization"]["kind"]
        used = {name: reward["normalization"][name] for name in _FIELDS_OF_KIND[kind]}
        reward["normalization"] = {"kind": kind, **used}
    return fields


def _canonical(value: Any) -> Any:
    """Plain values; one spelling for equal numbers (1 and 1.0, 0.0 and -0.0)."""
    match value:
        case str() | int() | None:
            return value
        case float():
            return int(value) if value.is_integer() else value
        case tuple():
            return [_canonical(inner) for inner in value]
        case Enum():
            return value.value
    return {name: _canonical(inner) for name, inner in fingerprint.fields_of(value).items()}


def _encoded(value: Any) -> bytes:
    """JSON, unescaped: four times as fast for text beyond ASCII; NFC and NFD stay apart."""
    return _JSON.encode(value).encode(errors="surrogatepass")


_JSON = JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
# What comparable requests may differ in, their seed apart.
_ANY_SEARCH: Mapping[str, Any] = {
    name: value
    for name, value in _canonical(Selection()).items()
    if name in ("n", "alpha", "schedule", "algorithm", "return_candidates")
}
