"""Nodes as network namespaces, and the network between them and this machine.

Each node, and this machine, has an address and one veth link to a switch. Requires root. Contexts
remove what they create.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.multihost.switch import Switch, enter

US = "us"  # the switch's name for this machine
_OUR_HOST = 254
_NAMED = Path("/var/run/netns")
_HOSTS = Path("/etc/netns")
# From linux/sockios.h and linux/ethtool.h. The sender must compute checksums and segments, because
# the switch forwards frames unchanged.
_SIOCETHTOOL = 0x8946
_TURNED_OFF = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO


@dataclass(frozen=True, slots=True)
class Node:
    """A machine."""

    name: str
    namespace: str
    address: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command that executes a program on the node; it keeps its process id."""
        return (_ip(), "netns", "exec", self.namespace, *arguments)

    def set_names(self, names: Mapping[str, Sequence[str]]) -> None:
        """Set the addresses that host names resolve to on the node."""
        hosts = {"localhost": ["127.0.0.1"], **names}
        lines = [f"{address} {name}" for name, addresses in hosts.items() for address in addresses]
        # Written in place, because the file is bind-mounted.
        (_HOSTS / self.namespace / "hosts").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes by name, and the switch between them."""

    nodes: Mapping[str, Node]
    switch: Switch


def missing() -> str:
    """Return why this machine cannot have nodes; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if not shutil.which("ip"):
        return "needs the program ip"
    name = f"specrej-{os.getpid()}"
    if subprocess.run([_ip(), "netns", "add", name], capture_output=True, check=False).returncode:
        return "needs network namespaces"
    _run("netns", "del", name)
    return ""


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Create nodes that reach each other and this machine, for the length of the context."""
    with ExitStack() as undo:
        prefix = f"specrej-{os.getpid()}"
        middle = _namespace(undo, f"{prefix}-switch")
        nodes = [
            Node(name, _namespace(undo, f"{prefix}-{name}"), _address(number))
            for number, name in enumerate(names, 1)
        ]
        ports = {}
        for number, node in enumerate(nodes, 1):
            ports[node.name] = _connect(undo, middle, number, node.namespace, node.address)
            _run("-n", node.namespace, "link", "set", "lo", "up")
        own = (len(nodes) + 1, str(os.getpid()), _address(_OUR_HOST))
        ports[US] = _connect(undo, middle, *own)
        switch = undo.enter_context(Switch(_NAMED / middle, ports))
        yield Network({node.name: node for node in nodes}, switch)


def _namespace(undo: ExitStack, name: str) -> str:
    _run("netns", "add", name)
    undo.callback(_run, "netns", "del", name)
    hosts = _HOSTS / name
    hosts.mkdir(parents=True)
    undo.callback(shutil.rmtree, hosts)
    (hosts / "hosts").touch()
    return name


def _connect(undo: ExitStack, middle: str, number: int, target: str, address: str) -> str:
    """Link the switch to a namespace, given by name or process id; return the switch's port."""
    ours, theirs = f"port{number}", f"sr{os.getpid() % 1_000_000}n{number}"
    _run("-n", middle, "link", "add", ours, "type", "veth", "peer", "name", theirs)
    undo.callback(_run, "-n", middle, "link", "del", ours)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_send_whole_frames, _NAMED / middle, theirs).result()
    _run("-n", middle, "link", "set", ours, "up")
    _run("-n", middle, "link", "set", theirs, "netns", target)
    namespace = () if target.isdigit() else ("-n", target)
    _run(*namespace, "address", "add", f"{address}/24", "dev", theirs)
    _run(*namespace, "link", "set", theirs, "up")
    return ours


def _address(host: int) -> str:
    """Return an address of the range for network tests (RFC 2544)."""
    return f"198.18.{os.getpid() % 256}.{host}"


def _send_whole_frames(namespace: Path, interface: str) -> None:
    enter(namespace)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for command in _TURNED_OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(handle, _SIOCETHTOOL, request)


def _ip() -> str:
    return shutil.which("ip") or "ip"


def _run(*arguments: str) -> None:
    result = subprocess.run([_ip(), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
