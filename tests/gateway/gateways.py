"""Gateways in this process, and requests to them by plain sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.__main__ import Server
from gateway.app import Gateway
from gateway.settings import GatewaySettings
from specrej.client import Client, Retries
from tests.certificates import Authority, Pair, token_line
from tests.faults.proxy import reset

BODY: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "why?"}]}
STREAM = {**BODY, "stream": True}
CHAT = "/v1/chat/completions"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


@asynccontextmanager
async def gateway_at(address: str, **settings: Any) -> AsyncIterator[Server]:
    """A gateway on a free port of an orchestrator at `address`; it tries each call once."""
    chosen = GatewaySettings(port=0, orchestrator_address=address, **settings)
    async with Client(address, retries=Retries(1), **chosen.orchestrator_credentials) as client:
        server = Server(chosen, client, Gateway(chosen, client))
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)


def tokens_file(folder: Path, *tokens: str) -> str:
    """The path of an orchestrator's tokens file, in which each token is its tenant's name."""
    (folder / "tokens").write_text("\n".join(token_line(token, token) for token in tokens))
    return str(folder / "tokens")


def context(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    """A client that trusts the authority, with a certificate of its own."""
    made = ssl.create_default_context(cafile=authority.path)
    if pair:
        made.load_cert_chain(pair.cert, pair.key)
    return made


def request(path: str, body: Mapping[str, Any] | bytes, **headers: str) -> bytes:
    """A POST of JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(data)),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**named, **headers}.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Connection:
    """A connection that ends in one of two ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(
        cls, port: int, data: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> Connection:
        name = "localhost" if tls else None
        opened = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
        connection = cls(*opened)
        connection.writer.write(data)
        await connection.writer.drain()
        return connection

    async def read_until(self, text: bytes) -> bytes:
        """Everything up to `text`."""
        async with asyncio.timeout(20):
            return await self.reader.readuntil(text)

    async def read_all(self) -> bytes:
        """Everything until the server closes the connection."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""
            finally:
                self.leave()

    async def response(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of one response with a length."""
        head = (await self.read_until(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        is_json = "json" in headers.get("content-type", "")
        return int(head[0].split()[1]), headers, json.loads(body) if is_json else body

    def leave(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Leave with a reset instead of an end."""
        reset(self.writer)


async def get(port: int, path: str, *headers: str) -> Any:
    """Status, headers and body of the answer to one request; `headers` are lines."""
    lines = [f"GET {path} HTTP/1.1", "host: localhost", *headers]
    return await response_to(port, "\r\n".join(lines).encode() + b"\r\n\r\n")


async def post(port: int, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> Any:
    """Status, headers and JSON of the answer to one request."""
    return await response_to(port, request(path, body, **headers))


async def response_to(port: int, data: bytes, tls: ssl.SSLContext | None = None) -> Any:
    """The response to these bytes, on a connection of their own."""
    connection = await Connection.open(port, data, tls)
    try:
        return await connection.response()
    finally:
        connection.leave()


async def whole_reply(port: int, path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    """Head and body of the answer to the last request of a connection, such as a stream."""
    connection = await Connection.open(port, request(path, body, connection="close", **headers))
    return await connection.read_all()
