"""Small TCP servers that misbehave on purpose: what a real Redis will not do on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """Reads whatever arrives and answers each piece by `answer`; counts connections and pieces."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self.commands = 0
        self.asked = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while await reader.read(65536):
                self.commands += 1
                self.asked.set()
                await self.answer(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def reply(data: bytes) -> Answer:
    """Sends `data`."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


def reset_after(data: bytes) -> Answer:
    """Sends `data`, then breaks the connection off."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.transport.abort()

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    """Never answers."""


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[tuple[str, Scripted]]:
    """A server's URL and the server."""
    script = Scripted(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", script
        script.close()


class Valve:
    """Lets replies of the real server pass, or holds them back."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.held = asyncio.Event()

    def shut(self) -> None:
        self.open.clear()
        self.held.clear()

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if not self.open.is_set():
                    self.held.set()
                    await self.open.wait()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[tuple[str, Valve]]:
    """A URL that leads to the local server at `port`, and the valve its replies go through."""
    valve, free = Valve(), Valve()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(free.pump(reader, upstream_writer))
            pumps.create_task(valve.pump(upstream_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", valve
        valve.open.set()
