"""An HTTP server that scores responses by their lengths, or as a test defines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers are in lower case."""

    headers: dict[str, str]
    body: Any


@dataclass
class Endpoint:
    """What a server has received. A slow batch waits for `release`, unless its client leaves."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    is_slow: Callable[[Any], bool] = lambda body: body["responses"] == ["slow"]
    release: asyncio.Event = field(default_factory=asyncio.Event)
    num_gone: int = 0  # requests whose client left before the answer
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"

    def cut(self) -> None:
        """End all connections."""
        for writer in self.writers:
            writer.transport.abort()


def lengths(body: Any) -> Any:
    """The length of each response."""
    return {"scores": [len(response) for response in body["responses"]]}


@asynccontextmanager
async def served(
    answer: Callable[[Any], Any] = lengths, status: int = 200, port: int = 0
) -> AsyncIterator[Endpoint]:
    """A server; `answer` returns the answer to a body: bytes, or a value for JSON."""
    endpoint = Endpoint()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endpoint.writers.add(writer)
        try:
            while request := await _read(reader):
                endpoint.requests.append(request)
                if not await _is_due(endpoint, request, reader):
                    endpoint.num_gone += 1
                    return
                content = answer(request.body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        endpoint.cut()
        await server.wait_closed()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    pairs = (line.partition(": ") for line in head.split("\r\n")[1:] if line)
    headers = {name.lower(): value for name, _, value in pairs}
    return Request(headers, json.loads(await reader.readexactly(int(headers["content-length"]))))


async def _is_due(endpoint: Endpoint, request: Request, reader: asyncio.StreamReader) -> bool:
    """Whether to answer now; False if the client has left."""
    if not endpoint.is_slow(request.body):
        return True
    waiting = asyncio.ensure_future(endpoint.release.wait())
    # A client sends nothing while it waits: the read ends when the connection does.
    leaving = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        waiting.cancel()
        leaving.cancel()
        await asyncio.wait({leaving})  # only one read at a time
