"""Client channels: keepalive, message limits, the published retry policy, TLS and tokens.

The keepalive settings match those of the server in `serving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import methodcaller
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from specrej.contracts.limits import MAX_MESSAGE_BYTES
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

    `retries` is for the first hop only; services call services without. Changed certificate and
    token files are used from the next call on.

    Raises:
        OSError, ValueError: the credentials cannot be used, or may not be sent there.
    """

    how = options(address, retries=retries, max_message_bytes=max_message_bytes)
    if certified_name:
        how.append(("grpc.ssl_target_name_override", certified_name))

    def connect(tls: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(address, options=how)
        return grpc.aio.secure_channel(address, tls, options=how)

    if not any(credentials.values()):
        return connect(None)
    check_credentials(address, credentials)
    return _Channel(_Link(connect, credentials))


def open_blocking_channel(address: str, **credentials: Unpack[Credentials]) -> grpc.Channel:
    """`open_channel` for threads, without retries. Certificates are read once; the caller sends its
    token."""
    how, files = options(address, retries=False), tls_files(credentials)
    if any(credentials.values()):
        check_credentials(address, credentials)
    if not files:
        return grpc.insecure_channel(address, options=how)
    return grpc.secure_channel(address, _channel_credentials(files.watch().get()), options=how)


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


class _Link:
    """The channel for the next call, reopened when its certificates change, and the token."""

    def __init__(
        self,
        connect: Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel],
        given: Credentials,
    ) -> None:
        self._connect = connect
        self._token = watch_token(given)
        files = tls_files(given)
        self._files = files and files.watch()
        self._pem = self._files.get() if self._files else None
        self._channel = connect(_channel_credentials(self._pem) if self._pem else None)
        # The previous channel, kept for its running calls: grpc closes one without references.
        self._last: grpc.aio.Channel | None = None

    def channel(self) -> grpc.aio.Channel:
        """The channel with the current certificates."""
        if self._files and (pem := self._files.get()) is not self._pem:
            self._last, self._channel = self._channel, self._connect(_channel_credentials(pem))
            self._pem = pem
        return self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata added to every call: the token."""
        return (("authorization", f"Bearer {self._token.get()}"),) if self._token else ()

    def opened(self) -> list[grpc.aio.Channel]:
        """Every channel to close."""
        return [self._channel, *([self._last] if self._last is not None else ())]


def _channel_credentials(pem: PEM) -> grpc.ChannelCredentials:
    authorities = pem.ca or system_authorities()
    return grpc.ssl_channel_credentials(authorities, pem.key, pem.cert)


class _Method:
    """One method of a stub, with the current channel and token at every call."""

    def __init__(self, link: _Link, make: Callable[[grpc.aio.Channel], Callable[..., Any]]) -> None:
        self._link = link
        self._make = make
        self._channel: grpc.aio.Channel | None = None
        self._call: Callable[..., Any]

    def __call__(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        channel = self._link.channel()
        if channel is not self._channel:
            self._channel, self._call = channel, self._make(channel)
        given = tuple(metadata or ())
        if all(name != "authorization" for name, _ in given):  # the call's own token replaces it
            given += self._link.metadata()
        return self._call(*request, metadata=given, **options)


class _Channel(grpc.aio.Channel):
    """A channel with the current certificates and token at every call."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        return _Method(self._link, methodcaller("unary_unary", *method, **how))

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        return _Method(self._link, methodcaller("unary_stream", *method, **how))

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        return _Method(self._link, methodcaller("stream_unary", *method, **how))

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        return _Method(self._link, methodcaller("stream_stream", *method, **how))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for channel in self._link.opened():
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._link.channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._link.channel().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._link.channel().channel_ready()
