"""The images, run: as their user, on a root that is read-only, until they answer a request.

`make images` builds them, `make images-run` runs this. Nothing of it needs a network or a Redis.
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

from specrej.client import Client
from specrej.stack import Ports
from tests.deploy.containers import Asked, Container, container, missing

REASON = missing("models", "generator", "reward", "orchestrator")
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.xdist_group("images"),  # started once
]

# Half a gigabyte to read, and kernels to compile, on a machine that has other things to do.
_READY_S = 600.0
SERVICES = ("generator", "reward", "orchestrator")

Running = Mapping[str, Container]


@pytest.fixture(scope="module")
def ports() -> Ports:
    return Ports.free()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image of the models copies to a volume, as an init container does."""
    volume = tmp_path_factory.mktemp("models")
    volume.chmod(0o777)
    with container(Asked("models", mounts={"/target": volume}, may_write=True)) as copying:
        assert copying.process.wait(300) == 0, copying.log.read_text()
    return volume


@pytest.fixture(scope="module")
def running(models: Path, ports: Ports) -> Iterator[Running]:
    with ExitStack() as undo:
        started = {
            name: undo.enter_context(container(_asked(name, models, ports))) for name in SERVICES
        }
        for name, each in started.items():
            _until_healthy(each, f"127.0.0.1:{getattr(ports, name)}")
        yield started


def _asked(name: str, models: Path, ports: Ports) -> Asked:
    settings = {"PORT": str(getattr(ports, name))}
    if name == "orchestrator":
        settings["GENERATOR_ADDRESS"] = f"127.0.0.1:{ports.generator}"
        settings["REWARD_ADDRESS"] = f"127.0.0.1:{ports.reward}"
    environment = {f"SPECREJ_{name}_{key}".upper(): value for key, value in settings.items()}
    mounts = {} if name == "orchestrator" else {"/models": models}
    return Asked(name, environment=environment, mounts=mounts)


def _until_healthy(each: Container, address: str) -> None:
    """As the probes of compose.yaml and of the TLS component ask."""
    began = time.monotonic()
    while each.run("specrej", "health", address).returncode:
        assert each.process.poll() is None, each.log.read_text()
        assert time.monotonic() - began < _READY_S, each.log.read_text()
        time.sleep(0.5)


def test_a_request_is_answered(running: Running, ports: Ports) -> None:
    """Guards against an image that lacks a package, a file or a directory to write to."""

    async def ask() -> None:
        async with Client(f"127.0.0.1:{ports.orchestrator}", timeout_s=300) as client:
            answer = await client.generate("Why is the sky blue?", n=4, max_tokens=24, seed=1)
        assert answer.best.text and not answer.degraded

    asyncio.run(ask())


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_can_be_written_to(running: Running, name: str) -> None:
    """Guards against a container that is not what the manifests make of it."""
    script = (
        "id -u; for each in / /app /opt/venv /opt/app /models; do touch $each/x && echo $each; done"
    )
    ended = running[name].run("sh", "-c", f"{script}; touch /tmp/x && echo /tmp")
    assert ended.stdout.split() == ["10001", "/tmp"]
    status = running[name].run("cat", "/proc/1/status").stdout.split()
    assert status[status.index("NoNewPrivs:") + 1] == "1"
    for kind in ("CapEff:", "CapPrm:", "CapBnd:"):
        assert int(status[status.index(kind) + 1], 16) == 0


@pytest.mark.parametrize("name", SERVICES)
def test_what_builds_is_not_there(running: Running, name: str) -> None:
    """Guards against a compiler, an installer, or a cache of one, in what runs."""
    for program in ("cc", "gcc"):
        assert running[name].run("sh", "-c", f"command -v {program}").returncode
    for module in ("pip", "locust", "pytest"):
        assert running[name].run("python", "-c", f"import {module}").returncode, module
    wanted = running[name].run("python", "-c", "import torch").returncode == 0
    assert wanted == (name != "orchestrator")


def test_none_is_left_behind() -> None:
    """Guards against services that run on after whoever started them gave up."""
    port = Ports.free().orchestrator
    environment = {"SPECREJ_ORCHESTRATOR_PORT": str(port)}
    with container(Asked("orchestrator", environment=environment)) as each:
        began = time.monotonic()
        while not each.has_begun("orchestrator"):
            assert time.monotonic() - began < _READY_S, each.log.read_text()
            time.sleep(0.05)
        service = os.pidfd_open(each.first())
    try:
        assert select.select([service], [], [], 30)[0]  # readable once it has ended
    finally:
        os.close(service)


def test_they_end_when_they_are_told(running: Running) -> None:
    """Guards against a service that ignores SIGTERM since it is process 1. The last test."""
    for name in reversed(SERVICES):
        running[name].signal(signal.SIGTERM)
        assert running[name].process.wait(60) == 0, running[name].log.read_text()
