"""Images and compose: static checks, and one request to the images if they were built.

`make images` builds them, `make images-run` runs them with podman (as root, beside buildah) or
docker, as Kubernetes does: on a read-only root, without capabilities and new privileges.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.images import build
from deploy.local.stack import Ports
from specrej import SyncClient
from tests.deploy.manifests import DEPLOY, MARGIN_S, SERVICES, accepted
from tests.programs import run

COMPOSE = DEPLOY / "compose.yaml"
COMPOSED = yaml.safe_load(COMPOSE.read_text())
ENGINE = next(filter(shutil.which, ("podman", "docker")), "")
RESTRICTED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
_READY_S = 600.0  # kernels are compiled at the first start


async def test_hadolint_reports_no_problem() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    dockerfile = DEPLOY / "images" / "Dockerfile"
    assert await run(hadolint, dockerfile) == ""


@pytest.mark.parametrize("name", SERVICES)
def test_compose_settings_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a variable without a setting, and a value that stops the service."""
    service = COMPOSED["services"][name]
    settings = accepted(name, service["environment"], monkeypatch)
    assert service["healthcheck"]["test"][-1] == f"127.0.0.1:{settings.port}"
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.drain_seconds + settings.grace_s + MARGIN_S


def _run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ENGINE, *arguments], capture_output=True, text=True, check=check)


def _is_built(target: str) -> bool:
    return (
        bool(ENGINE) and not _run("image", "inspect", build.name_of(target), check=False).returncode
    )


@contextmanager
def _service(name: str, ports: Ports, models: Path) -> Iterator[str]:
    """Run an image until the context is left; yields the container's name."""
    settings = {"PORT": str(getattr(ports, name))}
    if name == "orchestrator":
        settings["GENERATOR_ADDRESS"] = f"127.0.0.1:{ports.generator}"
        settings["REWARD_ADDRESS"] = f"127.0.0.1:{ports.reward}"
    variables = [f"--env=SPECREJ_{name.upper()}_{key}={value}" for key, value in settings.items()]
    container = f"specrej-test-{name}"
    writable = ("--tmpfs=/tmp:mode=1777", "--tmpfs=/cache:mode=1777,exec")
    places = (*writable, f"--volume={models}:/models:ro", "--network=host")
    _run("run", "--detach", f"--name={container}", *RESTRICTED, *places, *variables,
         build.name_of(name))  # fmt: skip
    try:
        yield container
    finally:
        _run("rm", "--force", container)


@pytest.mark.long
def test_the_images_answer_a_request(tmp_path: Path) -> None:
    """Guards against an image that lacks a package or a place to write, or ignores SIGTERM."""
    names = ("generator", "reward", "orchestrator")
    if missing := [name for name in (*names, "models") if not _is_built(name)]:
        pytest.skip(f"no images {missing}: make images builds them; needs podman or docker")
    tmp_path.chmod(0o777)
    _run("run", "--rm", f"--volume={tmp_path}:/target", build.name_of("models"))
    ports = Ports.free()
    with ExitStack() as undo:
        containers = [undo.enter_context(_service(name, ports, tmp_path)) for name in names]
        deadline = time.monotonic() + _READY_S
        for name, container in zip(names, containers, strict=True):
            probe = ("exec", container, "specrej", "health", f"127.0.0.1:{getattr(ports, name)}")
            while _run(*probe, check=False).returncode:
                assert time.monotonic() < deadline, _run("logs", container).stdout
                time.sleep(0.5)
            assert _run("exec", container, "id", "-u").stdout.strip() == "10001"
        with SyncClient(f"127.0.0.1:{ports.orchestrator}", timeout_s=300) as client:
            answer = client.generate("Why is the sky blue?", n=4, max_tokens=24, seed=1)
        assert answer.best.text and not answer.degraded
        for container in reversed(containers):
            _run("stop", "--time=60", container)
            code = _run("inspect", "--format={{.State.ExitCode}}", container).stdout.strip()
            assert code == "0", _run("logs", container).stdout
