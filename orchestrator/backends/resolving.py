"""Resolves the configured names to the addresses of backends.

Each address of a name, such as that of a headless Service, is one backend.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One backend: "host:port" to connect to, and the name in its certificate."""

    address: str
    name: str


class Resolver:
    """Resolves names; keeps the last addresses of a name that cannot be resolved now."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: "host:port" each."""
        self._addresses = tuple(dict.fromkeys(addresses))
        self._known: dict[str, frozenset[Target]] = {}

    async def resolve(self) -> frozenset[Target]:
        for address in self._addresses:
            targets = await _resolved(address)
            # An empty result may be a failure of the name server. A backend that is really gone
            # does not report, so it gets no sessions.
            if targets:
                self._known[address] = targets
            elif address not in self._known:
                log.info("cannot resolve %s", address)
        return frozenset().union(*self._known.values())


async def _resolved(address: str) -> frozenset[Target]:
    host, _, port = address.rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):  # an unknown or an invalid name
        return frozenset()
    # A machine with an IPv4 and an IPv6 address is one backend.
    families = {family for family, *_ in infos}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = {str(where[0]) for family, _, _, _, where in infos if family == wanted}
    return frozenset(
        Target(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host) for ip in hosts
    )
