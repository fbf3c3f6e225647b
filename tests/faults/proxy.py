"""A TCP proxy that misbehaves on command, between the orchestrator and its peers.

No Python library was found that does this (Toxiproxy is a separate server in Go). The proxy parses
no protocol: it holds and cuts bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

HOST = "127.0.0.1"
_PIECE_BYTES = 65536


class Lane:
    """The replies of all connections: open or shut."""

    def __init__(self) -> None:
        self.held = asyncio.Event()  # set once bytes wait at the shut lane
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        """Hold all bytes that arrive from now on."""
        self._open.clear()
        self.held.clear()

    def open(self) -> None:
        """Forward the held bytes and all that follow."""
        self._open.set()

    async def passed(self) -> None:
        """Wait while the lane is shut."""
        if not self._open.is_set():
            self.held.set()
            await self._open.wait()


class Proxy:
    """Forwards connections on `port` to `target`; created by `proxy`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.replies = Lane()
        self._target = target
        self._hold_after = b""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Future[None]] = set()

    async def listen(self) -> None:
        """Accept connections; after `refuse`, on the same port."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections and reset open ones."""
        if self._server:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Reset all connections; bytes in transit are lost."""
        for writer in self._writers:
            reset(writer)

    def hold_replies_after(self, marker: bytes) -> None:
        """Shut the lane of replies once a request contains `marker`."""
        self.replies.held.clear()
        self._hold_after = marker

    async def heal(self) -> None:
        """Remove all faults."""
        self._hold_after = b""
        self.replies.open()
        if self._server is None:
            await self.listen()

    async def close(self) -> None:
        """Refuse connections and wait until all forwarding has ended."""
        self.replies.open()
        self.refuse()
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(HOST, self._target)
        except OSError:
            self._writers.discard(writer)
            reset(writer)
            return
        both = (writer, upstream_writer)
        self._writers.update(both)
        pumps = {
            asyncio.ensure_future(self._forward(reader, upstream_writer)),
            asyncio.ensure_future(self._return(upstream_reader, writer)),
        }
        self._pumps |= pumps
        try:
            await asyncio.wait(pumps)
        finally:
            self._pumps -= pumps
            self._writers.difference_update(both)
            for end in both:
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                if self._hold_after and self._hold_after in piece:
                    self._hold_after = b""
                    self.replies.shut()
                upstream.write(piece)
                await upstream.drain()
        upstream.close()

    async def _return(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                await self.replies.passed()
                client.write(piece)
                await client.drain()
        # The client's connection ends with the server's.
        reset(client)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST, as after a crash."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def proxy(target: int) -> AsyncIterator[Proxy]:
    """Run a proxy to the local server at port `target`."""
    running = Proxy(target)
    await running.listen()
    try:
        yield running
    finally:
        await running.close()
