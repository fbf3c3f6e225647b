"""A few HTTP/2 frames by hand: what no gRPC client can be made to send."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_HEAD_BYTES = 9


async def data_after_the_end(host: str, port: int, path: str, message: bytes) -> str:
    """What a server says to a message on a stream whose client has already half-closed.

    "RST_STREAM" or "GOAWAY"; "OK" if it answers by the stream's orderly end.
    """
    reader, writer = await asyncio.open_connection(host, port)
    body = b"\0" + struct.pack(">I", len(message)) + message
    writer.write(
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, _header_block(f"{host}:{port}", path))
        + _frame(_DATA, _END_STREAM, 1, body)
        + _frame(_DATA, 0, 1, body)
    )
    try:
        return await _end_of_stream(reader)
    finally:
        writer.transport.abort()


async def _end_of_stream(reader: asyncio.StreamReader) -> str:
    with suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(_HEAD_BYTES)
            kind, flags = head[3], head[4]
            await reader.readexactly(int.from_bytes(head[:3]))
            if kind == _RST_STREAM:
                return "RST_STREAM"
            if kind == _GOAWAY:
                return "GOAWAY"
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                return "OK"
    return "GOAWAY"  # the whole connection was closed


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header_block(authority: str, path: str) -> bytes:
    """HPACK: every header a literal that is not indexed, none compressed."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()
