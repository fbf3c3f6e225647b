"""Stored answers, and single flight: equal requests at the same time are one generation."""

from orchestrator.cache.answers import Cache
from orchestrator.cache.keys import answer_key, tenant_digest
from orchestrator.cache.redis_client import RedisClient
from orchestrator.cache.secret import Secret
from orchestrator.cache.single_flight import Answers

__all__ = ["Answers", "Cache", "RedisClient", "Secret", "answer_key", "tenant_digest"]
