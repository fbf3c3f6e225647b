"""Which machines stand behind the addresses that were configured.

A name stands for all of its addresses, as the name of a headless Service does: each is a backend of
its own. Knows no channel and nobody's load.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One backend: "host:port" to connect to, and the name that its certificate is of."""

    address: str
    name: str


class Resolver:
    """Looks names up, again and again; what cannot be looked up now is where it was."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: "host:port" each."""
        self._addresses = tuple(dict.fromkeys(addresses))
        self._known: dict[str, frozenset[Target]] = {}

    async def resolve(self) -> frozenset[Target]:
        """Everyone behind all names, as of now."""
        for address in self._addresses:
            found = await _resolved(address)
            # An empty answer may be a name server's trouble: whoever is really gone does not answer
            # either, and is not given anything to do.
            if found:
                self._known[address] = found
            elif address not in self._known:
                log.info("cannot resolve %s", address)
        return frozenset().union(*self._known.values())


async def _resolved(address: str) -> frozenset[Target]:
    host, _, port = address.rpartition(":")
    if _is_literal(host):
        return frozenset({Target(address, host)})
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):  # nobody has that name, or nobody can have it
        return frozenset()
    # The same machine must not count twice because it has an address of each kind.
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = {str(where[0]) for family, _, _, _, where in found if family == wanted}
    return frozenset(
        Target(f"[{each}]:{port}" if ":" in each else f"{each}:{port}", host) for each in hosts
    )


def _is_literal(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
