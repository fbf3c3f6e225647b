"""TCP connections of this process's server, by their peers: grpc cannot close one of them."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_OPEN_FILES = Path("/dev/fd")
_IPV4_IN_IPV6 = "::ffff:"


def shut(peer: str) -> None:
    """Shut down the connection with a peer, as `ServicerContext.peer` names it, if it is TCP."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    address = host.strip("[]").removeprefix(_IPV4_IN_IPV6), port
    for path in _OPEN_FILES.iterdir():
        with (
            suppress(OSError, ValueError),
            socket.socket(fileno=os.dup(int(path.name))) as connection,
        ):
            other_host, other_port, *_ = connection.getpeername()
            if (other_host.removeprefix(_IPV4_IN_IPV6), str(other_port)) == address:
                connection.shutdown(socket.SHUT_RDWR)
