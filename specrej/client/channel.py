"""Client channels: keepalive, message limits, TLS and tokens.

The keepalive settings match those of the server in `serving.py`. Calls are sent once: `Retries` of
the clients repeats them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Self, Unpack, cast

import grpc
import grpc.aio

from specrej import security
from specrej.contracts.validation import MAX_MESSAGE_BYTES
from specrej.reloading_file import ReloadingFile

_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
# A name of several orchestrators is balanced.
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


def check_address(address: str) -> None:
    """Raises ValueError: the address is one of HTTP."""
    if address.startswith(("http://", "https://")):
        how = "use HOST:PORT; HTTP is the gateway's, gRPC has a port of its own"
        raise ValueError(f"{address!r}: {how}")


def open_channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    certified_name: str = "",
    **credentials: Unpack[security.Credentials],
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"); connects when first used.

    `certified_name`: the name in the server's certificate, if it is not the host of the address.
    Certificates are read once; a changed token file is used from the next call on.

    Raises:
        OSError, ValueError: the credentials cannot be used, or may not be sent there.
    """
    how = options(address, max_message_bytes)
    if certified_name:
        how.append(("grpc.ssl_target_name_override", certified_name))
    security.check_credentials(address, credentials)
    files, token = security.tls_files(credentials), security.watch_token(credentials)
    if files:
        tls = _channel_credentials(files.read())
        channel = grpc.aio.secure_channel(address, tls, options=how)
    else:
        channel = grpc.aio.insecure_channel(address, options=how)
    return cast(grpc.aio.Channel, _TokenChannel(channel, token)) if token else channel


def open_blocking_channel(
    address: str, **credentials: Unpack[security.Credentials]
) -> grpc.Channel:
    """`open_channel` for threads. Certificates are read once; the caller sends its token."""
    how, files = options(address), security.tls_files(credentials)
    security.check_credentials(address, credentials)
    if not files:
        return grpc.insecure_channel(address, options=how)
    return grpc.secure_channel(address, _channel_credentials(files.read()), options=how)


def options(
    address: str, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> list[tuple[str, int | str]]:
    """The gRPC options of a channel to a service at `address`."""
    return [
        # Calls to this machine may be in plaintext, so they must not go through a proxy.
        ("grpc.enable_http_proxy", int(not security.is_local(address))),
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
        ("grpc.enable_retries", 0),
        ("grpc.service_config", _SERVICE_CONFIG),
    ]


def _channel_credentials(pem: security.PEM) -> grpc.ChannelCredentials:
    authorities = pem.ca or security.system_authorities()
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
