"""A network switch in user space that loses, delays and cuts on command.

A thread carries Ethernet frames between the interfaces of one network namespace. It is here since
not every kernel has netem; it knows no protocol above Ethernet, so TCP meets what it meets on a bad
network: frames that are late or never come.
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
from itertools import combinations, count
from pathlib import Path

_ALL_PROTOCOLS = 3
_CLONE_NEWNET = 0x40000000
_FRAME_BYTES = 65536
_OUTGOING = 4  # PACKET_OUTGOING: what we sent ourselves
_GROUP = 1  # in the first byte of the address of more than one


@dataclass(frozen=True, slots=True)
class Line:
    """What happens to frames, each way, on the line of one port."""

    delay_s: float = 0.0
    loss: float = 0.0


class Switch:
    """Carries frames while the context lasts.

    `namespace` is a file that names one, `ports` maps the names of those who are connected to
    interfaces in it.
    """

    def __init__(self, namespace: Path, ports: Mapping[str, str], seed: int = 0) -> None:
        self._namespace = namespace
        self._interfaces = dict(ports)
        self._random = random.Random(seed)
        # Replaced as a whole by one thread, read by another.
        self._lines: Mapping[str, Line] = {}
        self._cut: frozenset[frozenset[str]] = frozenset()
        self._names: dict[bytes, str] = {}  # by Ethernet address, as learned
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
        for each in (*self._sockets.values(), self._woken):
            each.close()
        self._selector.close()

    def spoil(self, **lines: Line) -> None:
        """Delay and lose what crosses these ports' lines, and nobody else's."""
        self._lines = lines

    def isolate(self, *names: str) -> None:
        """Cut these off from everybody, and nobody else."""
        pairs = combinations(self._interfaces, 2)
        self._cut = frozenset(frozenset(pair) for pair in pairs if set(pair) & set(names))

    def part(self, *pairs: tuple[str, str]) -> None:
        """Cut the two of each pair off from each other, and nobody else."""
        self._cut = frozenset(frozenset(pair) for pair in pairs)

    def heal(self) -> None:
        """As at first. What is late still comes late."""
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
        """In the namespace, which sockets keep: this thread alone moves there."""
        enter(self._namespace)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for name, interface in self._interfaces.items():
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
            self._sockets[name] = port
            port.bind((interface, _ALL_PROTOCOLS))
            port.setblocking(False)
            self._selector.register(port, selectors.EVENT_READ, name)

    def _take(self, source: str) -> None:
        """All that has come from one port."""
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
        for each in (target,) if target else self._interfaces:
            if each != source and frozenset((source, each)) not in self._cut:
                self._pass(source, each, frame)

    def _pass(self, source: str, target: str, frame: bytes) -> None:
        lines = [self._lines.get(each, Line()) for each in (source, target)]
        if any(self._random.random() < line.loss for line in lines):
            return
        if delay_s := sum(line.delay_s for line in lines):
            due = time.monotonic() + delay_s
            heapq.heappush(self._late, (due, next(self._order), target, frame))
        else:
            self._send(target, frame)

    def _send(self, target: str, frame: bytes) -> None:
        # A full queue, or nobody at the other end: lost, as on any network.
        with suppress(OSError):
            self._sockets[target].send(frame)

    def _patience_s(self) -> float | None:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else None

    def _send_late(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(self._late)
            self._send(target, frame)


def enter(namespace: Path) -> None:
    """Moves the calling thread to a network namespace; os.setns is not there before Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", str(namespace))
    finally:
        os.close(handle)
