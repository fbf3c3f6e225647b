"""A TCP proxy that misbehaves on command: between the orchestrator and whatever it talks to.

No library was found that does this in Python (Toxiproxy is a server of its own, in Go). It knows no
protocol: it holds, delays, cuts and replaces bytes.
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
    """One direction of all connections: open, shut, slow, or cut after so many bytes."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.cut_after: int | None = None  # bytes that still pass before the connection is reset
        self.held = asyncio.Event()  # set once a piece waits at the shut lane
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        """Hold what comes from now on."""
        self._open.clear()
        self.held.clear()

    def open(self) -> None:
        """Let pass what was held, and all that comes."""
        self._open.set()

    async def passes(self, piece: bytes) -> bytes:
        """The part of a piece that passes; all of it but where the lane is cut."""
        if not self._open.is_set():
            self.held.set()
            await self._open.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.cut_after is None:
            return piece
        passing = piece[: self.cut_after]
        self.cut_after -= len(passing)
        return passing

    def heal(self) -> None:
        """As at first."""
        self.delay_s, self.cut_after = 0.0, None
        self.open()


class Proxy:
    """Forwards connections on `port` to `target`, until told otherwise; made by `proxy`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.requests = Lane()  # towards the server
        self.replies = Lane()
        self.answer = b""  # if set, the answer to every piece; the server sees none of them
        self._target = target
        self._hold_after = b""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Future[None]] = set()

    async def listen(self) -> None:
        """Accept connections; after `refuse` on the same port as before."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse connections and reset those that are open."""
        if self._server:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Reset all connections; what was on its way is lost."""
        for writer in self._writers:
            _reset(writer)

    def hold_replies_after(self, marker: bytes) -> None:
        """Shut the replies' lane as soon as a request holds `marker`."""
        self.replies.held.clear()
        self._hold_after = marker

    async def heal(self) -> None:
        """Forward again as at first."""
        self.answer = self._hold_after = b""
        self.requests.heal()
        self.replies.heal()
        if self._server is None:
            await self.listen()

    async def close(self) -> None:
        """Refuse, and wait until nothing is forwarded any more."""
        self.requests.open()
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
            _reset(writer)
            return
        both = (writer, upstream_writer)
        self._writers.update(both)
        pumps = {
            asyncio.ensure_future(self._forward(reader, upstream_writer, writer)),
            asyncio.ensure_future(self._return(upstream_reader, writer)),
        }
        self._pumps |= pumps
        try:
            await asyncio.wait(pumps)
        finally:
            self._pumps -= pumps
            self._writers.difference_update(both)
            for each in both:
                each.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                if self.answer:
                    client.write(self.answer)
                    continue
                if self._hold_after and self._hold_after in piece:
                    self._hold_after = b""
                    self.replies.shut()
                upstream.write(await self.requests.passes(piece))
                await upstream.drain()
        upstream.close()

    async def _return(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                passing = await self.replies.passes(piece)
                client.write(passing)
                if len(passing) < len(piece):
                    break
                await client.drain()
        # A server that is gone, or cut off, takes the client's connection with it.
        _reset(client)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off by RST, as a dying kernel would; an orderly end is another case."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def proxy(target: int) -> AsyncIterator[Proxy]:
    """A proxy to the local server at port `target`."""
    running = Proxy(target)
    await running.listen()
    try:
        yield running
    finally:
        await running.close()
