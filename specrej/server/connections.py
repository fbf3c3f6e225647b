"""TCP connections of this process's server, by their peers: grpc cannot close one of them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_OPEN_FILES = Path("/dev/fd")
_IPV4_IN_IPV6 = "::ffff:"
# Seconds between two scans of all open files, which take some milliseconds.
_PAUSE_S = 0.1


class Connections:
    """Shuts down connections; of an event loop."""

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self._pausing = False

    def shut(self, peer: str) -> None:
        """Shut down the connection with a peer, as `ServicerContext.peer` names it, if it is TCP.

        At once, or after a short pause since the last one.
        """
        self._peers.add(peer)
        if not self._pausing:
            self._shut_all()

    def _shut_all(self) -> None:
        peers, self._peers = self._peers, set()
        self._pausing = bool(peers)
        if peers:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._shut_all)
            try:
                shut(peers)
            except OSError:  # no descriptor is left: again after the pause
                self._peers |= peers


def shut(peers: Collection[str]) -> None:
    """Shut down the TCP connections with these peers.

    Raises:
        OSError: this process may open no more files.
    """
    addresses = {_address(peer) for peer in peers}
    for path in _OPEN_FILES.iterdir():
        if not path.is_socket():  # `socket` would raise, and leave the duplicate open
            continue
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(path.name))) as other:
            if other.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            host, port, *_ = other.getpeername()
            if (host.removeprefix(_IPV4_IN_IPV6), str(port)) in addresses:
                other.shutdown(socket.SHUT_RDWR)


def _address(peer: str) -> tuple[str, str]:
    """Host and port of "ipv4:HOST:PORT" or "ipv6:%5BHOST%5D:PORT"."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").removeprefix(_IPV4_IN_IPV6), port
