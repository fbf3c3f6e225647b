"""Connections are shut by the address of their peer."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from specrej.server.connections import shut


def test_only_the_connection_of_the_peer_is_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        accepted = [listener.accept()[0] for _ in clients]
        shut([f"ipv4:127.0.0.1:{clients[0].getsockname()[1]}"])
        assert clients[0].recv(1) == b""
        accepted[1].sendall(b"x")
        assert clients[1].recv(1) == b"x"
        for connection in (*clients, *accepted):
            connection.close()


def test_no_file_stays_open() -> None:
    """Guards against unread replies that use up the files which a process may open."""
    ends, before = os.pipe(), len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        shut(["ipv4:127.0.0.1:1"])
    assert len(list(Path("/dev/fd").iterdir())) == before
    for end in ends:
        os.close(end)
