"""Small TCP servers that fail in ways in which a real Redis cannot be made to fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.serving import turns

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def reply(data: bytes, *, reset: bool = False) -> Answer:
    """Sends `data`, then resets the connection or leaves it open."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if reset:
            writer.transport.abort()

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    """Sends nothing."""


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[tuple[str, Counter[str]]]:
    """The URL of a server that answers every piece of data; its "connections" and "commands"."""
    counts: Counter[str] = Counter()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts["connections"] += 1
        writers.append(writer)
        try:
            with suppress(ConnectionError):
                while await reader.read(65536):
                    counts["commands"] += 1
                    await answer(writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts
        server.close()
        await turns()  # connections that have just been accepted have a writer
        for writer in writers:
            writer.close()
        await turns()
