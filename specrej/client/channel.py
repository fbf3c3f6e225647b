"""Client channels: keepalive, message limits, the published retry policy, TLS and tokens.

The keepalive settings match those of the server in `serving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Self, Unpack, cast

import grpc
import grpc.aio

from specrej.contracts.validation import MAX_MESSAGE_BYTES
from specrej.reloading_file import ReloadingFile
from specrej.security import (
    PEM,
    Credentials,
    check_credentials,
    is_local,
    system_authorities,
    tls_files,
    watch_token,
)

# gRPC retries only in the caller's channel; `specrej.client.Retries` replaces this policy. Session
# streams are never retried: their state is lost. A name of several orchestrators is balanced.
_BALANCING: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
SERVICE_CONFIG = {
    **_BALANCING,
    "methodConfig": [
        {
            "name": [
                {"service": "specrej.v1.OrchestratorService"},
                {"service": "specrej.backend.v1.RewardService", "method": "Score"},
                {"service": "specrej.backend.v1.RewardService", "method": "Describe"},
                {"service": "specrej.backend.v1.GeneratorService", "method": "Describe"},
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
    # Each failure takes a token, and below half of them nothing is retried: enough for all calls of
    # a client that lose their orchestrator at the same time.
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 0.1},
}


def open_channel(
    address: str,
    *,
    retries: bool = True,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    certified_name: str = "",
    **credentials: Unpack[Credentials],
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"); connects when first used.

    `certified_name`: the name in the server's certificate, if it is not the host of the address.

    `retries` is for the first hop only; services call services without. Certificates are read once;
    a changed token file is used from the next call on.

    Raises:
        OSError, ValueError: the credentials cannot be used, or may not be sent there.
    """
    how = options(address, retries=retries, max_message_bytes=max_message_bytes)
    if certified_name:
        how.append(("grpc.ssl_target_name_override", certified_name))
    if not any(credentials.values()):
        return grpc.aio.insecure_channel(address, options=how)
    check_credentials(address, credentials)
    files, token = tls_files(credentials), watch_token(credentials)
    if files:
        tls = _channel_credentials(files.read())
        channel = grpc.aio.secure_channel(address, tls, options=how)
    else:
        channel = grpc.aio.insecure_channel(address, options=how)
    return cast(grpc.aio.Channel, _TokenChannel(channel, token)) if token else channel


def open_blocking_channel(address: str, **credentials: Unpack[Credentials]) -> grpc.Channel:
    """`open_channel` for threads, without retries. Certificates are read once; the caller sends its
    token."""
    how, files = options(address, retries=False), tls_files(credentials)
    if any(credentials.values()):
        check_credentials(address, credentials)
    if not files:
        return grpc.insecure_channel(address, options=how)
    return grpc.secure_channel(address, _channel_credentials(files.read()), options=how)


def options(
    address: str, *, retries: bool, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> list[tuple[str, int | str]]:
    """The gRPC options of a channel to a service at `address`."""
    return [
        # Calls to this machine may be in plaintext, so they must not go through a proxy.
        ("grpc.enable_http_proxy", int(not is_local(address))),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # No compressed replies, which may be a thousand times as large.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A restarted backend is reconnected before the retries of a call end. The second option is
        # the time a connection attempt may take.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 400),
        ("grpc.enable_retries", int(retries)),
        ("grpc.service_config", json.dumps(SERVICE_CONFIG if retries else _BALANCING)),
    ]


def _channel_credentials(pem: PEM) -> grpc.ChannelCredentials:
    authorities = pem.ca or system_authorities()
    return grpc.ssl_channel_credentials(authorities, pem.key, pem.cert)


class _TokenChannel:
    """A channel that sends the current token with every call that has none of its own."""

    def __init__(self, channel: grpc.aio.Channel, token: ReloadingFile[str]) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, name: str) -> Any:
        """What the channel has; its methods that make calls add the token."""
        member = getattr(self._channel, name)
        return partial(self._method, member) if name in _CALLS else member

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    def _method(self, make: Callable[..., Callable[..., Any]], *path: Any, **how: Any) -> Any:
        start = make(*path, **how)

        def call(*request: Any, metadata: Any = None, **options: Any) -> Any:
            given = tuple(metadata or ())
            if all(name != "authorization" for name, _ in given):
                given += (("authorization", f"Bearer {self._token.get()}"),)
            return start(*request, metadata=given, **options)

        return call
