"""Retries and reconnects that belong together."""

from __future__ import annotations

import itertools
from typing import Any

from specrej.channel import SERVICE_CONFIG, options

_JITTER = 0.2  # of gRPC's waits, both ways


def test_a_backend_that_is_back_is_found_before_the_retries_are_over() -> None:
    """Guards against calls that fail in the second after a restart: all four attempts were over
    while the connection still waited to be tried again."""
    config: Any = SERVICE_CONFIG
    (method,) = config["methodConfig"]
    policy = method["retryPolicy"]
    first, most = (float(policy[name].rstrip("s")) for name in ("initialBackoff", "maxBackoff"))
    waits = itertools.islice(
        _growing(first, policy["backoffMultiplier"]), policy["maxAttempts"] - 1
    )
    retrying_s = sum(min(each, most) for each in waits) * (1 - _JITTER)
    told = dict(options(retries=True))
    assert float(told["grpc.max_reconnect_backoff_ms"]) / 1e3 * (1 + _JITTER) < retrying_s


def _growing(first: float, factor: float) -> itertools.accumulate[float]:
    return itertools.accumulate(itertools.repeat(factor), lambda wait, by: wait * by, initial=first)
