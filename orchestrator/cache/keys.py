"""Keys of the cache: which requests have the same answer.

Pure: no calls to Redis. docs/configuration.md lists the keys.
"""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from orchestrator.cache.secret import Secret
from specrej import fingerprint
from specrej.contracts import Algorithm, GenerationRequest

PREFIX = "specrej"  # of all keys; the ACL rules in docs/configuration.md contain it
FORMAT_VERSION = 15  # of keys and values; raise it when either changes
ALGORITHM_VERSION = 2  # raise it when the same request would get another answer


def tenant_digest(tenant: str) -> str:
    """32 characters that identify a tenant outside of Redis, where its name must not appear."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def answer_key(
    request: GenerationRequest,
    generator_fingerprint: str,
    reward_fingerprint: str,
    *,
    tenant: str,
    secret: Secret,
) -> str:
    """The key of the answer to a request with its defaults filled in; it contains no text of prompt
    or tenant.

    The order of rewards and of biases does not matter. No tenant can construct another's key: the
    tenant's part is a keyed hash, and the other parts are escaped. A reader of Redis that lacks the
    secret cannot compute the hash of a request, and so cannot confirm a guessed prompt.
    """
    owner = hashed_tenant(tenant, secret)
    # Nothing else in a key has a character that must be escaped.
    made_by = f"{quote(generator_fingerprint, safe='')}:{quote(reward_fingerprint, safe='')}"
    canonical: dict[str, Any] = _canonical(request)
    # Degraded answers are never stored. The generator's fingerprint identifies its model, and
    # `model` is set only where there are several.
    del canonical["cache"], canonical["allow_degraded"]
    canonical["absent"] = request.fits_context  # all else is filled in
    if not request.model:
        del canonical["model"]
    canonical["sampling"]["logit_bias"].sort(key=itemgetter("token_id"))
    canonical["selection"]["rewards"].sort(key=itemgetter("name"))
    # Hash the prompt once: it can have megabytes.
    canonical["prompt"] = hashlib.sha256(_encoded(canonical["prompt"])).hexdigest()
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        del canonical["selection"]["alpha"], canonical["selection"]["schedule"]
    digest = secret.hash("request", _encoded(canonical)).hex()
    return f"{PREFIX}:v{FORMAT_VERSION}:{owner}:{made_by}:a{ALGORITHM_VERSION}:{digest}"


def hashed_tenant(tenant: str, secret: Secret) -> str:
    """The part of all keys that identifies their tenant."""
    return secret.hash("tenant", tenant.encode(errors="surrogatepass")).hex()[:32]


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
        case bytes():  # of an image
            return hashlib.sha256(value).hexdigest()
    return {name: _canonical(inner) for name, inner in fingerprint.fields_of(value).items()}


def _encoded(value: Any) -> bytes:
    """JSON, unescaped: four times as fast for text beyond ASCII; NFC and NFD stay apart."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")
