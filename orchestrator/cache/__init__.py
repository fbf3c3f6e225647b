"""Stored answers, and single flight: equal requests at the same time are one generation."""

from orchestrator.cache.answers import Cache, Hit
from orchestrator.cache.keys import Keys, cache_keys, tenant_digest
from orchestrator.cache.records import SharedRecords
from orchestrator.cache.redis_client import RedisAccess, RedisClient, check_access
from orchestrator.cache.secret import Secret
from orchestrator.cache.single_flight import Flight, Lease, SharedSingleFlight, SingleFlight

__all__ = [
    "Cache",
    "Flight",
    "Hit",
    "Keys",
    "Lease",
    "RedisAccess",
    "RedisClient",
    "Secret",
    "SharedRecords",
    "SharedSingleFlight",
    "SingleFlight",
    "cache_keys",
    "check_access",
    "tenant_digest",
]
