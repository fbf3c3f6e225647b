"""Attacks over the wire, each until a time has passed: plain sockets, no client library.

`python -m tests.attacks.wire NAME GRPC_PORT HTTP_PORT SECONDS` runs one, in a process and from
an address of its own, so that it delays the callers that are measured by what it sends alone.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count as counted
from typing import Any

from specrej.client.client import build_request
from specrej.contracts import CacheControl
from specrej.v1 import orchestrator_pb2
from tests import http2 as h2
from tests.gateway.gateways import BODY, CHAT, MODELS, STREAM, request

_PRIORITY, _PING, _WINDOW_UPDATE, _CONTINUATION = 2, 6, 8, 9
_SERVICE = "/specrej.v1.OrchestratorService"
_HEALTH = "/grpc.health.v1.Health"
_BEGIN = h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0, b"")
_SHUT = h2.PREFACE + h2.window(0)  # reads no message


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
_LONG_S = 30.0
FAILING = 666  # the seed at which the toy's step fails


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
    block = h2.headers(f"{_SERVICE}/Describe", "localhost") + entry + b"\xbe" * 12_000
    return h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 2 * number + 1, block)


def _opened(number: int) -> bytes:
    return h2.frame(h2.HEADERS, h2.END_HEADERS, 2 * number + 1, _CALL)


def _reset(number: int) -> bytes:
    stream = 2 * number + 1
    return h2.unary(stream, f"{_SERVICE}/Describe") + h2.frame(h2.RST_STREAM, 0, stream, bytes(4))


def _late(number: int) -> bytes:
    """A call, and more frames of it after its end."""
    stream = 2 * number + 1
    more = h2.frame(h2.DATA, h2.END_STREAM, stream, b"") + h2.frame(
        h2.RST_STREAM, 0, stream, bytes(4)
    )
    again = h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream, _CALL)
    return h2.unary(stream, f"{_SERVICE}/Describe") + more * 2 + again


def _calls(count: int, call: Callable[[int], bytes], leaves_s: float = _LONG_S) -> Attack:
    """So many clients, each of which sends one call after the other: `call` returns the frames of
    one as stream 1, whose number it is given. After `leaves_s` a client resets the stream, and
    begins again on a new connection."""
    numbers = counted(time.time_ns() % 10**9)

    def play(target: Target) -> None:
        with suppress(OSError), _connected(target.grpc) as peer:
            peer.sendall(_BEGIN + h2.window(2**31 - 1))
            peer.sendall(h2.frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30)))
            for stream in range(1, 2**30, 2):
                peer.sendall(_as_stream(call(next(numbers)), stream))
                peer.settimeout(leaves_s)
                try:
                    while not _is_end(peer, stream):
                        pass
                except TimeoutError:
                    peer.sendall(h2.frame(h2.RST_STREAM, 0, stream, struct.pack(">I", 8)))
                    return

    return lambda target: _each(count, target, lambda: play(target))


def _as_stream(frames: bytes, stream: int) -> bytes:
    """Frames of stream 1 as those of another one."""
    made, at = bytearray(frames), 0
    while at < len(made):
        made[at + 5 : at + 9] = struct.pack(">I", stream)
        at += 9 + int.from_bytes(made[at : at + 3])
    return bytes(made)


def _is_end(peer: socket.socket, stream: int) -> bool:
    """Read a frame; whether it is the last one of the stream. Raises ConnectionError."""
    head = _exactly(peer, 9)
    _exactly(peer, int.from_bytes(head[:3]))
    is_last = head[3] == h2.RST_STREAM or bool(
        head[3] in (h2.DATA, h2.HEADERS) and head[4] & h2.END_STREAM
    )
    return is_last and int.from_bytes(head[5:]) == stream


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := peer.recv(size - len(data))):
            raise ConnectionError
        data += part
    return data


def _generate(number: int, sent: dict[str, str] | None = None, **options: Any) -> bytes:
    """A request, unlike all others."""
    options = {"seed": number, "ignore_eos": True, "cache": CacheControl.BYPASS, **options}
    message = build_request(options.pop("prompt", "Why?"), **options)
    return h2.unary(1, f"{_SERVICE}/Generate", message.SerializeToString(), **(sent or {}))


def _nested(number: int) -> bytes:
    """A message of groups in groups, of a field that the schema does not have."""
    data = b"\xa3\x06" * 4_000 + os.urandom(number % 8)
    return h2.unary(2 * number + 1, f"{_SERVICE}/Generate", data)


def _many_turns(number: int) -> bytes:
    """A conversation of a million empty turns, which are two bytes each."""
    request = build_request("Why?", seed=number).SerializeToString() + _TURNS
    head = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, _CALL)
    body = struct.pack(">BI", 0, len(request)) + request
    parts = [body[at : at + 2**14] for at in range(0, len(body), 2**14)]
    flags = [0] * (len(parts) - 1) + [h2.END_STREAM]
    return head + b"".join(map(h2.frame, [h2.DATA] * len(parts), flags, [1] * len(parts), parts))


def _unread(number: int) -> bytes:
    """A stream of many events whose window is closed."""
    if number > 64:
        time.sleep(0.2)
        return b""
    options = {"n": 64, "max_tokens": 2000, "ignore_eos": True, "seed": number}
    whole = orchestrator_pb2.GenerateStreamRequest(request=build_request("Why?", **options))
    return h2.unary(2 * number + 1, f"{_SERVICE}/GenerateStream", whole.SerializeToString())


_CALL = h2.headers(f"{_SERVICE}/Generate", "localhost")
_TURNS = b"\x12\x80\x89\x7a" + b"\x0a\x00" * 1_000_000
_BLOCK = b"\0\x01x\x7f\x80\x7d" + b"y" * 16_000
_OPEN = _BEGIN + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, _CALL)
_ENDLESS = _BEGIN + h2.frame(h2.HEADERS, 0, 1, _CALL)
_LONG = request(CHAT, {**BODY, "user": "x" * 9_000})
_SMUGGLED = request(CHAT, b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n", **{"transfer-encoding": "chunked"})
_TWICE = b"authorization: Bearer %d\r\nauthorization: Bearer %d\r\n\r\n"
_BEHIND = b"x-forwarded-for: 10.%d.%d.1\r\n\r\n"
_CHUNKS = request(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
_LARGE = request(CHAT, {**BODY, "user": "x" * (2**23 + 2**17)})

ATTACKS: dict[str, Attack] = {
    # Of HTTP/2
    "h2/continuation": _grpc(_ENDLESS, lambda n: h2.frame(_CONTINUATION, 0, 1, _BLOCK)),
    "h2/empty-continuation": _grpc(_ENDLESS, lambda n: h2.frame(_CONTINUATION, 0, 1, b"") * 500),
    "h2/hpack-bomb": _grpc(_BEGIN, _hpack_bomb, True),
    "h2/rapid-reset": _grpc(_BEGIN, _reset, True),
    "h2/ping": _grpc(_BEGIN, lambda n: h2.frame(_PING, 0, 0, bytes(8)) * 500),
    "h2/settings": _grpc(_BEGIN, lambda n: h2.frame(h2.SETTINGS, 0, 0, b"") * 500),
    "h2/priority": _grpc(_BEGIN, lambda n: h2.frame(_PRIORITY, 0, 1, bytes(5)) * 500),
    "h2/window-update": _grpc(_OPEN, lambda n: h2.frame(_WINDOW_UPDATE, 0, 1, b"\0\0\0\x01") * 500),
    "h2/empty-data": _grpc(_OPEN, lambda n: h2.frame(h2.DATA, 0, 1, b"") * 500),
    "h2/garbage": _grpc(h2.PREFACE, lambda n: os.urandom(4096)),
    "h2/streams": _grpc(_BEGIN, _opened, True),
    # Holding
    "hold/silent-grpc": _held(True, 900, b""),
    "hold/silent-http": _held(False, 900, b""),
    "hold/preface": _held(True, 900, _BEGIN),
    "hold/slow-headers": _held(False, 900, MODELS, b"x: y\r\n"),
    "hold/slow-body": _held(False, 300, _LONG[:-9_000], b"x"),
    "hold/no-message": _held(True, 300, _OPEN),
    "hold/unread-stream": _grpc(_SHUT, _unread, count=2),
    "hold/unread-health": _grpc(_SHUT, lambda n: h2.unary(2 * n + 1, f"{_HEALTH}/Watch")),
    "hold/unread-http": _held(False, 200, request(CHAT, {**STREAM, "max_tokens": 2000, "n": 1})),
    # Work
    "flood/requests": _http(b"", lambda n: MODELS + b"\r\n", True),
    "flood/health": _grpc(_BEGIN, lambda n: h2.unary(2 * n + 1, f"{_HEALTH}/Check"), True),
    "flood/describe": _grpc(_BEGIN, lambda n: h2.unary(2 * n + 1, f"{_SERVICE}/Describe"), True),
    "flood/connections": lambda target: _each(6, target, lambda: _once(target.http, b"")),
    "flood/large-bodies": lambda target: _each(4, target, lambda: _once(target.http, _LARGE)),
    "flood/headers": lambda target: _each(
        6, target, lambda: _once(target.http, MODELS + b"x: " + b"y" * 2**20)
    ),
    "flood/small-chunks": _http(_CHUNKS, lambda n: b"1\r\n \r\n" * 500),
    "flood/pipelined": _http(b"", lambda n: (MODELS + b"\r\n") * 100),
    # Of the callers' own tenant, or of many
    "fairness/one-queue": _calls(90, lambda n: _generate(n, n=2, max_tokens=60)),
    "fairness/new-tenants": _calls(
        60, lambda n: _generate(n, {"specrej_tenant": f"new-{n}"}, n=2, max_tokens=60)
    ),
    "fairness/long": _calls(12, lambda n: _generate(n, n=2, max_tokens=1900)),
    "amplify/many-turns": _calls(4, _many_turns),
    # Order and time
    "order/late-frames": _grpc(_BEGIN, _late, True),
    "order/leaving": _calls(24, lambda n: _generate(n, n=64, max_tokens=400), leaves_s=0.05),
    "order/deadlines": _calls(
        24, lambda n: _generate(n, {"grpc_timeout": f"{10 + n % 90}m"}, n=8, max_tokens=400)
    ),
    # What several requests share
    "shared/failing-step": _calls(12, lambda n: _generate(n, n=4, max_tokens=20, seed=FAILING)),
    "shared/slow-reward": _calls(12, lambda n: _generate(n, n=4, max_tokens=20, rewards="slow")),
    "shared/bad-reward": _calls(12, lambda n: _generate(n, n=4, max_tokens=20, rewards="nan")),
    # Trust
    "trust/nested": _grpc(_BEGIN, _nested, True),
    "trust/two-identities": _http(b"", lambda n: MODELS + _TWICE % (n, n + 1), True),
    "trust/forwarded-for": _http(b"", lambda n: MODELS + _BEHIND % (n >> 8 & 255, n & 255), True),
    # What an operator sees
    "observation/methods": _calls(
        6, lambda n: h2.unary(1, f"{_SERVICE}/{n}", authorization=f"Bearer {n}")
    ),
    "observation/names": _calls(
        6, lambda n: _generate(n, model=f"{n}\n" * 20, rewards=f"\x1b[2J{n}")
    ),
    "observation/traces": _calls(
        6, lambda n: _generate(n, {"traceparent": f"00-{n + 1:032x}-{n + 1:016x}-01"}, n=1)
    ),
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
