"""An HTTP server on loopback that replies as a test defines, and counts clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers are in lower case."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; `content` is bytes, or a value for JSON. `is_held`: it waits for `release`."""

    content: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_held: bool = False


# The reply to a body, given how many requests came before.
Replies = Callable[[Any, int], Reply]


@dataclass
class Endpoint:
    """How a server replies, and what it has received."""

    reply: Replies
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0  # requests without a reply
    most_running: int = 0
    num_gone: int = 0  # requests whose client left before the reply

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to a connection's one request."""
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            request = await _read(reader)
            self.requests.append(request)
            reply = self.reply(request.body, len(self.requests) - 1)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            is_due = not reply.is_held or await self._is_released(reader)
            self.running -= 1
            if is_due:
                writer.write(_encoded(reply))
                await writer.drain()
            else:
                self.num_gone += 1

    async def _is_released(self, reader: asyncio.StreamReader) -> bool:
        """Wait for `release`; False if the client leaves before it."""
        released = asyncio.ensure_future(self.release.wait())
        # A client sends nothing while it waits: the read ends when the connection does.
        left = asyncio.ensure_future(reader.read(1))
        done, waiting = await asyncio.wait({released, left}, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return released in done


def lengths(body: Any, _: int) -> Reply:
    """The length of each response as its score; that of the response "slow" is held."""
    responses = body["responses"]
    scores = [len(response) for response in responses]
    return Reply({"scores": scores}, is_held=responses == ["slow"])


@asynccontextmanager
async def served(reply: Replies = lengths, port: int = 0) -> AsyncIterator[Endpoint]:
    """A server that listens."""
    endpoint = Endpoint(reply)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", port)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        endpoint.release.set()
        await server.wait_closed()


def _encoded(reply: Reply) -> bytes:
    content = reply.content
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {**reply.headers, "Content-Length": str(len(data)), "Connection": "close"}
    lines = (f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {reply.status} x\r\n{''.join(lines)}\r\n".encode() + data


async def _read(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines if line)
    headers = {name.lower(): value for name, _, value in pairs}
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    return Request(first.split(" ")[1], headers, body)
