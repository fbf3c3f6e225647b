"""Stored answers, and single flight: equal requests at the same time are one generation."""

from orchestrator.cache.answers import Cache, Hit
from orchestrator.cache.keys import answer_key, tenant_digest
from orchestrator.cache.redis_client import RedisAccess, RedisClient, check_access
from orchestrator.cache.secret import Secret
from orchestrator.cache.single_flight import Flight, SingleFlight, locked

__all__ = [
    "Cache",
    "Flight",
    "Hit",
    "RedisAccess",
    "RedisClient",
    "Secret",
    "SingleFlight",
    "answer_key",
    "check_access",
    "locked",
    "tenant_digest",
]
