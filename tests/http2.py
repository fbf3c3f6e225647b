"""HTTP/2 frames of gRPC calls, for clients that behave as no gRPC library does."""

from __future__ import annotations

import asyncio
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def window(num_bytes: int) -> bytes:
    """The settings frame of a client that lets so many bytes be sent per stream."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, num_bytes))


def headers(method: str, authority: str, **more: str) -> bytes:
    """The headers of a call, as HPACK's plain literals without indexing; `more` with _ for -."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return b"".join(header(name, value) for name, value in pairs.items())


def header(name: str, value: str) -> bytes:
    """One header, as a literal without indexing."""
    return b"\0" + _text(name) + _text(value)


def unary(stream: int, method: str, data: bytes = b"", more: bytes = b"", **pairs: str) -> bytes:
    """A whole call: headers, one message, which is compressed if there is a grpc-encoding, and the
    half-close; `more`: encoded headers."""
    message = struct.pack(">BI", "grpc_encoding" in pairs, len(data)) + data
    parts = [message[at : at + 2**14] for at in range(0, len(message), 2**14)]
    head = frame(HEADERS, END_HEADERS, stream, headers(method, "localhost", **pairs) + more)
    body = [frame(DATA, 0, stream, part) for part in parts[:-1]]
    return b"".join([head, *body, frame(DATA, END_STREAM, stream, parts[-1])])


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """Kind, flags and stream of the next frame. Raises IncompleteReadError: none follows."""
    head = await reader.readexactly(9)
    await reader.readexactly(int.from_bytes(head[:3]))
    return head[3], head[4], int.from_bytes(head[5:])


def _text(value: str) -> bytes:
    """A string of HPACK, of at most 16,510 bytes (RFC 7541, section 5)."""
    rest = len(value) - 127
    length = [127, rest % 128 + 128, rest // 128] if rest >= 0 else [len(value)]
    return bytes(length) + value.encode()
