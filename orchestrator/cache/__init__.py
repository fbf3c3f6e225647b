"""Stored answers, and single flight: equal requests at the same time are one generation."""

from orchestrator.cache.answers import Cache, Hit
from orchestrator.cache.keys import answer_key, tenant_digest
from orchestrator.cache.redis_client import RedisAccess, RedisClient, check_url, has_password
from orchestrator.cache.secret import Secret
from orchestrator.cache.single_flight import Answers, Flight, SingleFlight, Wanted, locked

__all__ = [
    "Answers",
    "Cache",
    "Flight",
    "Hit",
    "RedisAccess",
    "RedisClient",
    "Secret",
    "SingleFlight",
    "Wanted",
    "answer_key",
    "check_url",
    "has_password",
    "locked",
    "tenant_digest",
]
