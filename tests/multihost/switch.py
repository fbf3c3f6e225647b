"""A network switch in user space that loses, delays and cuts on command.

A thread forwards Ethernet frames between the interfaces of one network namespace. It exists
because not every kernel has netem. It parses no protocol above Ethernet, so TCP sees late and lost
frames, as on a bad network.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_ALL_PROTOCOLS = 3
_CLONE_NEWNET = 0x40000000
_FRAME_BYTES = 65536
_OUTGOING = 4  # PACKET_OUTGOING: frames sent by this socket
_GROUP = 1  # bit of the first address byte: broadcast or multicast


@dataclass(frozen=True, slots=True)
class Line:
    """Delay and loss of frames in each direction of one port's line."""

    delay_s: float = 0.0
    loss: float = 0.0


class Switch:
    """Forwards frames for the length of the context.

    `namespace` is the file of a network namespace; `ports` maps node names to its interfaces.
    """

    def __init__(self, namespace: Path, ports: Mapping[str, str], seed: int = 0) -> None:
        self._namespace = namespace
        self._interfaces = dict(ports)
        self._random = random.Random(seed)
        # Replaced as a whole by one thread, read by another.
        self._lines: Mapping[str, Line] = {}
        self._cut: frozenset[frozenset[str]] = frozenset()
        self._names: dict[bytes, str] = {}  # learned: node by Ethernet address
        self._sockets: dict[str, socket.socket] = {}
        self._late: list[tuple[float, int, str, bytes]] = []
        self._order = count()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._is_open = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def __enter__(self) -> Switch:
        self._thread.start()
        self._is_open.wait()
        if self._failure:
            raise self._failure
        return self

    def __exit__(self, *error: object) -> None:
        self._wake.close()
        self._thread.join()
        for handle in (*self._sockets.values(), self._woken):
            handle.close()
        self._selector.close()

    def spoil(self, **lines: Line) -> None:
        """Delay and lose frames on these ports' lines, and on no others."""
        self._lines = lines

    def part(self, *pairs: tuple[str, str]) -> None:
        """Cut the link between the nodes of each pair, and restore all other links."""
        self._cut = frozenset(frozenset(pair) for pair in pairs)

    def heal(self) -> None:
        """Restore all links. Delayed frames still arrive late."""
        self._lines, self._cut = {}, frozenset()

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._is_open.set()
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    return
                self._take(key.data)
            self._send_late()

    def _open(self) -> None:
        """Open sockets in the namespace; only this thread enters it."""
        enter(self._namespace)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for name, interface in self._interfaces.items():
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
            self._sockets[name] = port
            port.bind((interface, _ALL_PROTOCOLS))
            port.setblocking(False)
            self._selector.register(port, selectors.EVENT_READ, name)

    def _take(self, source: str) -> None:
        """Forward all frames that have arrived at one port."""
        while True:
            try:
                frame, (_, _, kind, *_) = self._sockets[source].recvfrom(_FRAME_BYTES)
            except BlockingIOError:
                return
            if kind != _OUTGOING:
                self._carry(source, frame)

    def _carry(self, source: str, frame: bytes) -> None:
        self._names[frame[6:12]] = source
        target = None if frame[0] & _GROUP else self._names.get(frame[:6])
        for port in (target,) if target else self._interfaces:
            if port != source and frozenset((source, port)) not in self._cut:
                self._pass(source, port, frame)

    def _pass(self, source: str, target: str, frame: bytes) -> None:
        lines = [self._lines.get(port, Line()) for port in (source, target)]
        if any(self._random.random() < line.loss for line in lines):
            return
        if delay_s := sum(line.delay_s for line in lines):
            due = time.monotonic() + delay_s
            heapq.heappush(self._late, (due, next(self._order), target, frame))
        else:
            self._send(target, frame)

    def _send(self, target: str, frame: bytes) -> None:
        # A full queue or a missing receiver loses the frame, as on any network.
        with suppress(OSError):
            self._sockets[target].send(frame)

    def _patience_s(self) -> float | None:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else None

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._late)
            self._send(target, frame)


def enter(namespace: Path) -> None:
    """Move the calling thread to a network namespace; os.setns needs Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", str(namespace))
    finally:
        os.close(handle)
