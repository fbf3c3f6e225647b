"""Client channels: keepalive, message limits and the published retry policy.

Keepalive is one half of a pair whose other half is in `serving.py`.
"""

from __future__ import annotations

import json

import grpc.aio

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# One layer of retries only: this one, at the edge nearest the caller. Session streams are never
# retried: their state is gone with them.
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": "specrej.v1.OrchestratorService"},
                {"service": "specrej.v1.RewardService", "method": "Score"},
                {"service": "specrej.v1.RewardService", "method": "Describe"},
                {"service": "specrej.v1.GeneratorService", "method": "Describe"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def open_channel(address: str, *, retries: bool = True) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"); connects when first used.

    `retries` is for the caller's outermost hop; services calling services leave it off.
    """
    return grpc.aio.insecure_channel(address, options=options(retries=retries))


def options(*, retries: bool) -> list[tuple[str, int | str]]:
    """What every channel to a service is opened with."""
    return [
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A restarted backend is found again within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", int(retries)),
        ("grpc.service_config", json.dumps(SERVICE_CONFIG if retries else {})),
    ]
