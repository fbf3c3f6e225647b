"""An endpoint with OpenAI's API on loopback whose replies tests choose; it notes lost callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; `hangs`: none, until the caller closes the connection."""

    content: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False


@dataclass
class Endpoint:
    """What it received, and how it replies to a body, given how many came before."""

    reply: Callable[[Body, int], Reply]
    url: str = ""
    requests: list[tuple[str, Mapping[str, str], Body]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lost: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection."""
        with closing(writer):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (h.split(": ", 1) for h in head[1:] if h)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((head[0].split()[1], headers, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            reply = self.reply(body, len(self.requests) - 1)
            if reply.hangs:
                assert await reader.read() == b""
                self.lost += 1
                return
            await asyncio.sleep(0)  # the others of a round are received meanwhile
            content = json.dumps(reply.content).encode()
            own = {**reply.headers, "content-length": str(len(content)), "connection": "close"}
            lines = [f"HTTP/1.1 {reply.status} X", *(f"{k}: {v}" for k, v in own.items()), "", ""]
            writer.write("\r\n".join(lines).encode() + content)
            await writer.drain()
        finally:
            self.running -= 1


def answered(text: str, tokens: int = 3, *, finish: str = "stop", prompt: int = 7) -> Reply:
    """A complete answer to a conversation, of `tokens` tokens of log-probability -0.5."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish,
        "logprobs": {"content": [{"token": "t", "logprob": -0.5}] * tokens},
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return Reply({"choices": [choice], "usage": usage})


@asynccontextmanager
async def listening(reply: Callable[[Body, int], Reply]) -> AsyncIterator[Endpoint]:
    """An endpoint that listens."""
    endpoint = Endpoint(reply)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield endpoint
