"""An HTTP server on loopback that replies as a test defines, and counts clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers are in lower case, and `body` is None without one."""

    path: str
    headers: dict[str, str]
    body: Any


HOLD = None  # in a stream: it waits for `release`


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; `content` is bytes, or a value for JSON. `is_held`: it waits for `release`.

    `stream`: the parts of a body, in place of `content`. `is_cut`: the connection closes before the
    end of that body. `keeps`: the connection may have another request. Status 0: it closes without
    a reply.
    """

    content: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_held: bool = False
    stream: Iterable[bytes | None] | None = None
    is_cut: bool = False
    keeps: bool = False


# The reply to a body, given how many requests came before.
Replies = Callable[[Any, int], Reply]


@dataclass
class Endpoint:
    """How a server replies, and what it has received."""

    reply: Replies
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0  # requests without the end of a reply
    most_running: int = 0
    num_gone: int = 0  # requests whose client left before that
    num_connections: int = 0
    open: dict[asyncio.Task[Any], asyncio.StreamWriter] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to a connection's requests."""
        task = asyncio.current_task()
        assert task
        self.num_connections += 1
        self.open[task] = writer
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            while await self._answer(await _read(reader), reader, writer):
                pass
        del self.open[task]

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection may have another request."""
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        is_left = True
        try:
            reply = self.reply(request.body, len(self.requests) - 1)
            for part in _parts(reply):
                if part is not HOLD:
                    writer.write(part)
                    await writer.drain()
                elif not await self._is_released(reader):
                    return False
            is_left = False
            return reply.keeps
        finally:
            self.running -= 1
            self.num_gone += is_left

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
    """A server that listens; at the end its connections break."""
    endpoint = Endpoint(reply)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", port)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()
        for writer in endpoint.open.values():
            writer.transport.abort()
        endpoint.release.set()
        await asyncio.wait([*endpoint.open, asyncio.ensure_future(server.wait_closed())])


def _parts(reply: Reply) -> Iterator[bytes | None]:
    if reply.is_held:
        yield HOLD
    if not reply.status:
        return
    content, headers = reply.content, {**reply.headers}
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    is_whole = reply.stream is None
    name, value = (
        ("Content-Length", f"{len(data)}") if is_whole else ("Transfer-Encoding", "chunked")
    )
    headers |= {name: value, "Connection": "keep-alive" if reply.keeps else "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    yield f"HTTP/1.1 {reply.status} x\r\n{lines}\r\n".encode()
    if reply.stream is None:
        yield data
        return
    for part in reply.stream:
        yield part and b"%x\r\n%s\r\n" % (len(part), part)
    if not reply.is_cut:
        yield b"0\r\n\r\n"


async def _read(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines if line)
    headers = {name.lower(): value for name, _, value in pairs}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first.split(" ")[1], headers, json.loads(data) if data else None)
