"""Attacks over the wire, each until a time has passed: plain sockets, no client library.

`python -m tests.attacks.wire NAME GRPC_PORT HTTP_PORT SECONDS` runs one, in a process and from
an address of its own, so that it delays the callers that are measured by what it sends alone. It
prints how many of its requests were answered, where it reads.
"""

from __future__ import annotations

import gzip
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count as counted
from typing import Any, BinaryIO

from gateway.errors import MESSAGES
from specrej.client.client import build_request
from specrej.contracts import CacheControl
from specrej.v1 import orchestrator_pb2
from tests import http2 as h2
from tests.gateway.gateways import BODY, CHAT, MODELS, STREAM, request
from tests.images import image_part, picture

_PRIORITY, _PING, _WINDOW_UPDATE, _CONTINUATION = 2, 6, 8, 9
_SERVICE = "/specrej.v1.OrchestratorService"
_HEALTH = "/grpc.health.v1.Health"
_BEGIN = h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0, b"")
_SHUT = h2.PREFACE + h2.window(0)  # reads no message


@dataclass(slots=True)
class Target:
    """The ports, when to stop, and how many requests were answered with HTTP's 200 or a message."""

    grpc: int
    http: int
    end: float
    answers: int = 0


Attack = Callable[[Target], None]
FAILING = 666  # the seed at which the toy's step fails


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 5, source_address=("127.0.0.3", 0))


def _flood(
    port: str,
    begin: bytes,
    more: Callable[[int], bytes] | None = None,
    reads: bool = False,
    count: int = 6,
) -> Attack:
    """So many clients, each of which sends `begin`, and `more` of 0, 1, ..., until the peer ends
    the connection, and then again."""

    def play(target: Target) -> None:
        with suppress(OSError), _connected(getattr(target, port)) as peer:
            peer.sendall(begin)
            number = 0
            while more:
                peer.sendall(more(number))
                number += 1
                if reads:
                    peer.setblocking(False)
                    with suppress(BlockingIOError):
                        while data := peer.recv(2**16):
                            target.answers += data.count(_OK)
                    peer.settimeout(5)
            while data := peer.recv(2**16):
                target.answers += data.count(_OK)

    return lambda target: _each(count, target, play)


_grpc, _http = partial(_flood, "grpc"), partial(_flood, "http")


def _each(count: int, target: Target, play: Attack) -> None:
    """Play again and again in so many threads, which end with the process."""

    def run() -> None:
        while time.monotonic() < target.end:
            play(target)

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    time.sleep(max(0, target.end - time.monotonic()))


def _held(port: str, count: int, data: bytes, drip: bytes = b"") -> Attack:
    """So many connections with this beginning, then a byte or so of each a second; those that are
    closed are opened again."""

    def play(target: Target) -> None:
        peers: list[socket.socket] = []
        while time.monotonic() < target.end:
            with suppress(OSError):
                while len(peers) < count and time.monotonic() < target.end:
                    peers.append(_connected(getattr(target, port)))
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


def _late(number: int) -> bytes:
    """A call, and more frames of it after its end."""
    stream = 2 * number + 1
    again = h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream, _CALL)
    return _describe(number) + (h2.frame(h2.DATA, 1, stream, b"") + _reset(number)) * 2 + again


def _describe(number: int) -> bytes:
    return h2.unary(2 * number + 1, f"{_SERVICE}/Describe")


def _reset(number: int) -> bytes:
    return h2.frame(h2.RST_STREAM, 0, 2 * number + 1, struct.pack(">I", 8))


def _calls(
    count: int, call: Callable[[int], bytes], leaves_s: float = 0, port: str = "grpc"
) -> Attack:
    """So many clients, each of which sends one call after the other: `call` returns the frames of
    one as stream 1, whose number it is given. After `leaves_s` a client resets the stream, and
    begins again on a new connection."""
    numbers = counted(time.time_ns() % 10**9)

    def play(target: Target) -> None:
        with suppress(OSError), _connected(getattr(target, port)) as peer:
            frames = peer.makefile("rb")
            peer.sendall(_BEGIN + h2.window(2**31 - 1))
            peer.sendall(h2.frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30)))
            peer.settimeout(30)
            for stream in range(1, 2**30, 2):
                peer.sendall(_as_stream(call(next(numbers)), stream))
                if leaves_s:  # reading meanwhile would take the processor from those it attacks
                    time.sleep(leaves_s)
                    peer.sendall(_reset(stream // 2))
                    return
                target.answers += h2.DATA in _until_end(frames, stream)

    return lambda target: _each(count, target, play)


def _as_stream(frames: bytes, stream: int) -> bytes:
    """Frames of stream 1 as those of another one."""
    made, at = bytearray(frames), 0
    while at < len(made):
        made[at + 5 : at + 9] = struct.pack(">I", stream)
        at += 9 + int.from_bytes(made[at : at + 3])
    return bytes(made)


def _until_end(frames: BinaryIO, stream: int) -> set[int]:
    """The kinds of the stream's frames. Raises ConnectionError, TimeoutError."""
    kinds: set[int] = set()
    while len(head := frames.read(9)) == 9:
        frames.read(int.from_bytes(head[:3]))
        if int.from_bytes(head[5:]) == stream:
            kinds.add(head[3])
            if head[3] == h2.RST_STREAM or (head[3] < 2 and head[4] & h2.END_STREAM):
                return kinds
    raise ConnectionError


def _generate(number: int, more: bytes = b"", streams: bool = False, **options: Any) -> bytes:
    """A request, unlike all others; `more`: a header."""
    options = {"seed": number, "ignore_eos": True, "cache": CacheControl.BYPASS, **options}
    message = build_request(options.pop("prompt", "Why?"), **options)
    whole = orchestrator_pb2.GenerateStreamRequest(request=message) if streams else message
    method = "GenerateStream" if streams else "Generate"
    return h2.unary(1, f"{_SERVICE}/{method}", whole.SerializeToString(), more)


def _short_deadline(number: int) -> bytes:
    """A request that ends, and then one of the same tenant that cannot end in time."""
    tenant, is_short = _tenant(f"{number // 2 % 97}"), number % 2
    more = tenant + h2.header("grpc-timeout", f"{10 + number % 90}m") * is_short
    return _generate(number, more, n=4, max_tokens=400 if is_short else 1)


def _nested(number: int) -> bytes:
    """A message of groups in groups, of a field that the schema does not have."""
    data = b"\xa3\x06" * 4_000 + os.urandom(number % 8)
    return h2.unary(2 * number + 1, f"{_SERVICE}/Generate", data)


def _many_turns(number: int) -> bytes:
    """A conversation of a million empty turns, which are two bytes each."""
    data = build_request("Why?", seed=number).SerializeToString() + _TURNS
    return h2.unary(1, f"{_SERVICE}/Generate", data)


def _padded(part: str, field: str, number: int = 100_000, count: int = 2) -> Attack:
    """Requests with so many empty messages in a repeated field, which are four bytes each."""
    item = orchestrator_pb2.GenerateRequest()
    getattr(getattr(item, part), field).add()
    data = build_request("Why?").SerializeToString() + item.SerializeToString() * number
    return _calls(count, lambda n: h2.unary(1, f"{_SERVICE}/Generate", data))


def _compressed() -> Attack:
    """Messages of 8 MB in 8 KB."""
    data = gzip.compress(build_request("Why?", model="x" * 8_000_000).SerializeToString())
    call = h2.unary(1, f"{_SERVICE}/Generate", data, grpc_encoding="gzip")
    return _calls(8, lambda n: call)


def _unread(number: int) -> bytes:
    """A stream of many events whose window is closed."""
    if number > 64:
        time.sleep(0.2)
        return b""
    call = _generate(number, streams=True, n=64, max_tokens=2000)
    return _as_stream(call, 2 * number + 1)


def _pictures() -> Attack:
    """Requests with an image of 10 KB that has 64 million pixels."""
    turn = {"role": "user", "content": [image_part(picture(mode="L", size=(8_000, 8_000)))]}
    return _http(request(CHAT, {**BODY, "messages": [turn]}, connection="close"), count=2)


_tenant = partial(h2.header, "specrej-tenant")
_SHORT = {**BODY, "n": 1, "max_tokens": 1}
_ENDS_LATE = {**STREAM, "max_tokens": 2000, "n": 1, "ignore_eos": True}
_OK = b"HTTP/1.1 200"
_CALL = h2.headers(f"{_SERVICE}/Generate", "localhost")
_TURNS = b"\x12\x80\x89\x7a" + b"\x0a\x00" * 1_000_000
_BLOCK = b"\0\x01x\x7f\x80\x7d" + b"y" * 16_000
_OPEN = _BEGIN + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, _CALL)
_ENDLESS = _BEGIN + h2.frame(h2.HEADERS, 0, 1, _CALL)
_LONG = request(CHAT, {**BODY, "user": "x" * 9_000})
_SMUGGLED = request(
    CHAT, b"0\r\n\r\n" + MODELS + b"connection: close\r\n\r\n", **{"transfer-encoding": "chunked"}
)
_TWICE = request(MESSAGES, _SHORT, **{"authorization": "Bearer a", "x-api-key": "b"})
_HEALTHZ = MODELS.replace(b"/v1/models", b"/healthz")  # the cheapest answer
_BEHIND = b"x-forwarded-for: 10.%d.%d.1\r\n\r\n"
_CHUNKS = request(CHAT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
_LARGE = request(CHAT, {**BODY, "user": "x" * (2**23 + 2**17)}, connection="close")
_VALUES = request(CHAT, {**BODY, "stop": [0] * 250_000}, connection="close")

ATTACKS: dict[str, Attack] = {
    # Of HTTP/2
    "h2/continuation": _grpc(_ENDLESS, lambda n: h2.frame(_CONTINUATION, 0, 1, _BLOCK)),
    "h2/empty-continuation": _grpc(_ENDLESS, lambda n: h2.frame(_CONTINUATION, 0, 1, b"") * 500),
    "h2/hpack-bomb": _grpc(_BEGIN, _hpack_bomb, True),
    "h2/rapid-reset": _grpc(_BEGIN, lambda n: _describe(n) + _reset(n), True),
    "h2/ping": _grpc(_BEGIN, lambda n: h2.frame(_PING, 0, 0, bytes(8)) * 500),
    "h2/priority": _grpc(_BEGIN, lambda n: h2.frame(_PRIORITY, 0, 1, bytes(5)) * 500),
    "h2/window-update": _grpc(_OPEN, lambda n: h2.frame(_WINDOW_UPDATE, 0, 1, b"\0\0\0\x01") * 500),
    "h2/empty-data": _grpc(_OPEN, lambda n: h2.frame(h2.DATA, 0, 1, b"") * 500),
    "h2/streams": _grpc(_BEGIN, lambda n: h2.frame(h2.HEADERS, 4, 2 * n + 1, _CALL), True),
    # Holding
    "hold/silent-grpc": _held("grpc", 900, b""),
    "hold/silent-http": _held("http", 900, b""),
    "hold/preface": _held("grpc", 900, _BEGIN),
    "hold/no-message": _held("grpc", 600, _OPEN),
    "hold/watch": _held("grpc", 600, _BEGIN + h2.unary(1, f"{_HEALTH}/Watch")),
    "hold/request-line": _held("http", 900, MODELS[:10]),
    "hold/slow-headers": _held("http", 900, MODELS, b"x: y\r\n"),
    "hold/slow-body": _held("http", 600, _LONG[:-9_000], b"x"),
    "hold/half-chunk": _held("http", 600, _CHUNKS + b"9\r\n{"),
    "hold/keep-alive": _held("http", 900, _HEALTHZ + b"\r\n"),
    "hold/unread-stream": _grpc(_SHUT, _unread, count=2),
    "hold/unread-health": _grpc(_SHUT, lambda n: h2.unary(2 * n + 1, f"{_HEALTH}/Watch")),
    "hold/unread-http": _held("http", 200, request(CHAT, _ENDS_LATE)),
    # Work
    "flood/requests": _http(b"", lambda n: MODELS + b"\r\n", True),
    "flood/health": _grpc(_BEGIN, lambda n: h2.unary(2 * n + 1, f"{_HEALTH}/Check"), True),
    "flood/describe": _grpc(_BEGIN, _describe, True),
    "flood/large-bodies": _http(_LARGE, count=8),
    "flood/many-headers": _http(b"", lambda n: MODELS + b"x: y\r\n" * 9_000 + b"\r\n", True),
    "flood/small-chunks": _http(_CHUNKS, lambda n: b"1\r\n \r\n" * 500),
    "flood/pipelined": _http(b"", lambda n: (MODELS + b"\r\n") * 100),
    # Of the callers' own tenant, or of many
    "fairness/one-queue": _calls(90, lambda n: _generate(n, n=2, max_tokens=60)),
    "fairness/new-tenants": _calls(
        60, lambda n: _generate(n, _tenant(f"new-{n}"), n=2, max_tokens=60)
    ),
    "fairness/long": _calls(12, lambda n: _generate(n, n=2, max_tokens=1900)),
    # Much for few bytes
    "amplify/many-turns": _calls(4, _many_turns),
    "amplify/many-tools": _padded("prompt", "tools"),
    "amplify/many-biases": _padded("sampling", "logit_bias"),
    "amplify/slow-parsing": _padded("prompt", "messages", 150_000, 12),
    "amplify/many-values": _http(_VALUES, count=1),
    "amplify/image": lambda at: _pictures()(at),
    "amplify/compressed": lambda at: _compressed()(at),
    "amplify/schedule": _calls(
        2, lambda n: _generate(n, n=1, max_tokens=20, schedule="geometric:1,1.0000001")
    ),
    # Order and time
    "order/late-frames": _grpc(_BEGIN, _late, True),
    "order/leaving": _calls(24, lambda n: _generate(n, n=64, max_tokens=400), leaves_s=0.05),
    "order/leaving-streams": _calls(
        6, lambda n: _generate(n, _tenant(f"{n % 97}"), True, n=8, max_tokens=80), leaves_s=0.1
    ),
    "order/deadlines": _calls(
        24,
        lambda n: _generate(n, h2.header("grpc-timeout", f"{10 + n % 90}m"), n=8, max_tokens=400),
    ),
    "order/deadlines-of-many": _calls(6, _short_deadline),
    # What several requests share
    "shared/failing-step": _calls(12, lambda n: _generate(n, n=4, max_tokens=20, seed=FAILING)),
    "shared/slow-reward": _calls(12, lambda n: _generate(n, n=4, max_tokens=20, rewards="slow")),
    "shared/exiting-reward": _calls(
        12, lambda n: _generate(n, n=4, max_tokens=20, rewards="exiting")
    ),
    # Trust
    "trust/nested": _grpc(_BEGIN, _nested, True),
    "trust/two-tenants": _calls(
        6, lambda n: _generate(n, _tenant("a") + _tenant("b"), n=1, max_tokens=1)
    ),
    "trust/two-identities": _http(b"", lambda n: _TWICE, True),
    "trust/forwarded-for": _http(b"", lambda n: MODELS + _BEHIND % (n >> 8 & 255, n & 255), True),
    "trust/host": _http(b"", lambda n: MODELS.replace(b"localhost", b"a.example") + b"\r\n", True),
    "trust/other-type": _http(
        b"", lambda n: request(CHAT, _SHORT, **{"content-type": "text/plain"}), True
    ),
    # What an operator sees
    "observation/methods": _calls(
        6, lambda n: h2.unary(1, f"{_SERVICE}/{n}", b"", _tenant("a") + _tenant("b"))
    ),
    "observation/http-methods": _calls(
        6, lambda n: h2.unary(1, "/v1/models", **{":method": f"M{n}"}), port="http"
    ),
    "observation/paths": _http(
        b"", lambda n: MODELS.replace(b"models", b"models/%d" % time.time_ns()) + b"\r\n", True
    ),
    "observation/names": _calls(6, lambda n: _generate(n, _tenant("x" * 12_000), n=-1)),
    "observation/baggage": _calls(
        6, lambda n: _generate(n, h2.header("baggage", "x" * 40 + ",x" * 170), n=-1)
    ),
    # Framing
    "framing/cl-te": _http(_SMUGGLED),
    "framing/underscores": _http(b"", lambda n: MODELS + b"x_y: z\r\n\r\n", True),
    "framing/old": _http(MODELS.replace(b"1.1", b"1.0") + b"\r\n"),
}  # fmt: skip


if __name__ == "__main__":
    name, grpc, http, seconds = sys.argv[1:]
    target = Target(int(grpc), int(http), time.monotonic() + float(seconds))
    print("begins", flush=True)
    ATTACKS[name](target)
    print(target.answers, flush=True)
    os._exit(0)  # threads may be inside a call
