"""Runs the images, as their user on a read-only root, until they answer a request.

`make images` builds them, `make images-run` runs these tests. No network or Redis is needed.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.local.stack import Ports
from specrej.client import Client
from tests.deploy.containers import Container, ContainerSpec, container, missing

REASON = missing("models", "generator", "reward", "orchestrator")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

_NO_VLLM = missing("generator-vllm")

# Half a gigabyte to read, and kernels to compile, on a busy machine.
_READY_S = 600.0
SERVICES = ("generator", "reward", "orchestrator")

Running = Mapping[str, Container]


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports.free()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the models from their image to a volume, as the init container does."""
    volume = tmp_path_factory.mktemp("models")
    volume.chmod(0o777)
    with container(ContainerSpec("models", mounts={"/target": volume}, may_write=True)) as copying:
        assert copying.process.wait(300) == 0, copying.log.read_text()
    return volume


@pytest.fixture(scope="module")
def running(models: Path, ports: Ports) -> Iterator[Running]:
    with ExitStack() as undo:
        yield _start(undo, models, ports)


def _start(undo: ExitStack, models: Path, ports: Ports, generator: str = "generator") -> Running:
    """All services, healthy, with this image of the generator."""
    targets = {name: generator if name == "generator" else name for name in SERVICES}
    started = {
        name: undo.enter_context(container(_spec(name, models, ports, target)))
        for name, target in targets.items()
    }
    for name, service in started.items():
        _until_healthy(service, f"127.0.0.1:{getattr(ports, name)}")
    return started


def _spec(name: str, models: Path, ports: Ports, target: str) -> ContainerSpec:
    settings = {"PORT": str(getattr(ports, name))}
    if target == "generator-vllm":
        settings |= {"KV_SLOTS": "4096", "MAX_CANDIDATES": "16"}
    if name == "orchestrator":
        settings["GENERATOR_ADDRESS"] = f"127.0.0.1:{ports.generator}"
        settings["REWARD_ADDRESS"] = f"127.0.0.1:{ports.reward}"
    environment = {f"SPECREJ_{name}_{key}".upper(): value for key, value in settings.items()}
    mounts = {} if name == "orchestrator" else {"/models": models}
    return ContainerSpec(target, environment=environment, mounts=mounts)


def _until_healthy(service: Container, address: str) -> None:
    """Wait for the same command that compose.yaml and the TLS component use as a probe."""
    began = time.monotonic()
    while service.run("specrej", "health", address).returncode:
        assert service.process.poll() is None, service.log.read_text()
        assert time.monotonic() - began < _READY_S, service.log.read_text()
        time.sleep(0.5)


def test_a_request_is_answered(running: Running, ports: Ports) -> None:
    """Guards against an image that lacks a package, a file or a directory to write to."""

    asyncio.run(_ask(ports))


async def _ask(ports: Ports) -> None:
    async with Client(f"127.0.0.1:{ports.orchestrator}", timeout_s=300) as client:
        answer = await client.generate("Why is the sky blue?", n=4, max_tokens=24, seed=1)
    assert answer.best.text and not answer.degraded


@pytest.mark.skipif(bool(_NO_VLLM), reason=_NO_VLLM)
def test_a_request_is_answered_by_vllm(models: Path) -> None:
    """Guards against a package that only the image lacks, and against a need for a compiler."""
    ports = Ports.free()
    with ExitStack() as undo:
        _start(undo, models, ports, "generator-vllm")
        asyncio.run(_ask(ports))


@pytest.mark.parametrize("name", SERVICES)
def test_only_tmp_is_writable(running: Running, name: str) -> None:
    """Guards against tests that run with more privileges than the manifests grant."""
    write = "touch $directory/x && echo $directory"
    script = f"for directory in / /app /opt/venv /opt/app /models /tmp; do {write}; done"
    ended = running[name].run("sh", "-c", f"id -u; {script}")
    assert ended.stdout.split() == ["10001", "/tmp"]
    status = running[name].run("cat", "/proc/1/status").stdout.split()
    assert status[status.index("NoNewPrivs:") + 1] == "1"
    for kind in ("CapEff:", "CapPrm:", "CapBnd:"):
        assert int(status[status.index(kind) + 1], 16) == 0


@pytest.mark.parametrize("name", SERVICES)
def test_images_have_no_build_tools(running: Running, name: str) -> None:
    """Guards against a compiler, an installer or a test tool in a runtime image."""
    for program in ("cc", "gcc"):
        assert running[name].run("sh", "-c", f"command -v {program}").returncode
    for module in ("pip", "locust", "pytest"):
        assert running[name].run("python", "-c", f"import {module}").returncode, module
    has_torch = running[name].run("python", "-c", "import torch").returncode == 0
    assert has_torch == (name != "orchestrator")


def test_container_ends_with_its_context() -> None:
    """Guards against services that outlive the test that started them."""
    port = Ports.free().orchestrator
    environment = {"SPECREJ_ORCHESTRATOR_PORT": str(port)}
    with container(ContainerSpec("orchestrator", environment=environment)) as service:
        began = time.monotonic()
        while not service.has_begun("orchestrator"):
            assert time.monotonic() - began < _READY_S, service.log.read_text()
            time.sleep(0.05)
        process = os.pidfd_open(service.first())
    try:
        assert select.select([process], [], [], 30)[0]  # readable once it has ended
    finally:
        os.close(process)


def test_services_end_on_sigterm(running: Running) -> None:
    """Guards against a service that ignores SIGTERM because it is process 1. Runs last."""
    for name in reversed(SERVICES):
        os.kill(running[name].first(), signal.SIGTERM)
        assert running[name].process.wait(60) == 0, running[name].log.read_text()
