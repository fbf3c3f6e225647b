"""Runs images as Kubernetes does: their own user, a read-only root, no capabilities, no new
privileges, some directories in memory. The network is the host's.

Requires root, buildah and util-linux. Contexts remove what they create.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.images.build import name_of
from tests.deploy import confine

_PROGRAMS = ("buildah", "unshare", "nsenter")
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts")


def missing(*targets: str) -> str:
    """Return why these images cannot run on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in _PROGRAMS:
        if not shutil.which(program):
            return f"needs {program}"
    for target in targets:
        if subprocess.run(_inspect(target), capture_output=True, check=False).returncode:
            return f"no image {target}: make images builds it"
    return ""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """How to run an image. `mounts`: host directories by their paths in the container."""

    target: str
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    may_write: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """A running container: `process` is its parent, `log` the file of its output."""

    process: subprocess.Popen[bytes]
    log: Path
    environment: Mapping[str, str]
    user: tuple[int, int]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the same container, like an exec probe."""
        uid, gid = self.user
        inside = (*_NAMESPACES, "--root", "--wd", f"--setuid={uid}", f"--setgid={gid}")
        entering = ["nsenter", f"--target={self.first()}", *inside, "--", *command]
        return subprocess.run(
            entering, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def has_begun(self, program: str) -> bool:
        """Return whether the container executes this program yet."""
        running = (Path(f"/proc/{pid}/cmdline") for pid in _children(self.process))
        return any(program in path.read_text() for path in running)

    def first(self) -> int:
        """Return the host's process id of the container's process 1."""
        return _children(self.process)[0]


@contextmanager
def container(spec: ContainerSpec) -> Iterator[Container]:
    """Run a container for the length of the context, unless it ends earlier."""
    image = json.loads(subprocess.check_output(_inspect(spec.target)))["OCIv1"]["config"]
    with tempfile.TemporaryDirectory(prefix="specrej-container-") as scratch, _root(spec) as root:
        path, log = Path(scratch) / "specification.json", Path(scratch) / "log"
        specification = _specification(spec, image, root)
        path.write_text(json.dumps(specification))
        confined = [sys.executable, "-I", confine.__file__, str(path)]
        with log.open("wb") as written:
            process = subprocess.Popen(
                ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--", *confined],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        try:
            user = (specification["uid"], specification["gid"])
            yield Container(process, log, specification["environment"], user)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children: the kernel does not kill children with another user."""
    with suppress(OSError):  # it has ended
        for child in _children(process):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait(30)


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


@contextmanager
def _root(spec: ContainerSpec) -> Iterator[Path]:
    """Mount the image's files."""
    working = _buildah("from", "--pull-never", name_of(spec.target))
    try:
        yield Path(_buildah("mount", working))
    finally:
        _buildah("umount", working)
        _buildah("rm", working)


def _specification(spec: ContainerSpec, image: Mapping[str, Any], root: Path) -> dict[str, Any]:
    uid, gid = map(int, image["User"].split(":"))
    own = dict(variable.split("=", 1) for variable in image["Env"])
    access = 0 if spec.may_write else confine.READ_ONLY
    mounts = [(at.lstrip("/"), str(source), access) for at, source in spec.mounts.items()]
    return {
        "root": str(root),
        "uid": uid,
        "gid": gid,
        "environment": {**own, **spec.environment},
        "directory": image.get("WorkingDir") or "/",
        "command": [*image["Entrypoint"], *(image.get("Cmd") or ())],
        "mounts": mounts,
        "in_memory": ["tmp", *(["cache"] if (root / "cache").exists() else [])],
    }


def _inspect(target: str) -> list[str]:
    return ["buildah", "inspect", "--type", "image", name_of(target)]


def _buildah(*arguments: str) -> str:
    return subprocess.check_output(["buildah", *arguments], text=True).strip()
