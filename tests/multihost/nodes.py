"""Nodes as network namespaces, and the bridge between them and this machine.

Each node, and this machine, has an address and one veth link to a bridge in a namespace of its own.
Requires root, and for delay and loss a kernel with netem. Contexts remove what they create.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_OUR_HOST = 254
_HOSTS = Path("/etc/netns")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine; `port` is the bridge's end of its link."""

    name: str
    namespace: str
    address: str
    port: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command that executes a program on the node; it keeps its process id."""
        return (shutil.which("ip") or "ip", "netns", "exec", self.namespace, *arguments)

    def set_names(self, names: Mapping[str, Sequence[str]]) -> None:
        """Set the addresses that host names resolve to on the node."""
        hosts = {"localhost": ["127.0.0.1"], **names}
        lines = [f"{address} {name}" for name, addresses in hosts.items() for address in addresses]
        # Written in place, because the file is bind-mounted.
        (_HOSTS / self.namespace / "hosts").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes by name, and the namespace of the bridge between them."""

    nodes: Mapping[str, Node]
    middle: str

    def cut(self, *names: str) -> None:
        """Drop all frames from and to these nodes, without a sign to either side."""
        for name in names:
            _ip("-n", self.middle, "link", "set", self.nodes[name].port, "down")

    def part(self, *names: str) -> None:
        """Drop all frames between these nodes; others still reach them."""
        self._set_isolated(names, "on")

    def spoil(self, delay_ms: int, loss_percent: int) -> bool:
        """Delay and lose frames to every node; returns False if the kernel has no netem."""
        line = ("netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%")
        for node in self.nodes.values():
            change = ("tc", "-n", self.middle, "qdisc", "replace", "dev", node.port, "root", *line)
            if subprocess.run(change, capture_output=True, check=False).returncode:
                return False
        return True

    def heal(self) -> None:
        """Restore all links."""
        self._set_isolated(self.nodes, "off")
        for node in self.nodes.values():
            _ip("-n", self.middle, "link", "set", node.port, "up")
            whole = ("tc", "-n", self.middle, "qdisc", "del", "dev", node.port, "root")
            subprocess.run(whole, capture_output=True, check=False)  # there may be none

    def _set_isolated(self, names: Iterable[str], state: str) -> None:
        for name in names:
            port = self.nodes[name].port
            _ip("-n", self.middle, "link", "set", port, "type", "bridge_slave", "isolated", state)


def missing() -> str:
    """Return why this machine cannot have nodes; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs ip and tc"
    name = f"specrej-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except OSError:
        return "needs network namespaces"
    _ip("netns", "del", name)
    return ""


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Create nodes that reach each other and this machine, for the length of the context."""
    with ExitStack() as undo:
        prefix = f"specrej-{os.getpid()}"
        middle = _namespace(undo, f"{prefix}-bridge")
        _ip("-n", middle, "link", "add", "bridge", "type", "bridge")
        _ip("-n", middle, "link", "set", "bridge", "up")
        nodes = {}
        for number, name in enumerate(names, 1):
            namespace = _namespace(undo, f"{prefix}-{name}")
            address = _address(number)
            port = _connect(undo, middle, number, namespace, address)
            nodes[name] = Node(name, namespace, address, port)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _connect(undo, middle, len(names) + 1, str(os.getpid()), _address(_OUR_HOST))
        yield Network(nodes, middle)


def _namespace(undo: ExitStack, name: str) -> str:
    _ip("netns", "add", name)
    undo.callback(_ip, "netns", "del", name)
    hosts = _HOSTS / name
    hosts.mkdir(parents=True)
    undo.callback(shutil.rmtree, hosts)
    (hosts / "hosts").touch()
    return name


def _connect(undo: ExitStack, middle: str, number: int, target: str, address: str) -> str:
    """Link the bridge to a namespace, given by name or process id; return the bridge's port."""
    ours, theirs = f"port{number}", f"sr{os.getpid() % 1_000_000}n{number}"
    _ip("-n", middle, "link", "add", ours, "type", "veth", "peer", "name", theirs)
    undo.callback(_ip, "-n", middle, "link", "del", ours)
    _ip("-n", middle, "link", "set", ours, "master", "bridge", "up")
    _ip("-n", middle, "link", "set", theirs, "netns", target)
    namespace = () if target.isdigit() else ("-n", target)
    _ip(*namespace, "address", "add", f"{address}/24", "dev", theirs)
    _ip(*namespace, "link", "set", theirs, "up")
    return ours


def _address(host: int) -> str:
    """Return an address of the range for network tests (RFC 2544)."""
    return f"198.18.{os.getpid() % 256}.{host}"


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
