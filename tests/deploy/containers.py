"""Images run as Kubernetes runs them: their own user, a root that nothing can be written to, no
capabilities, no new privileges, some directories in memory. The network is this machine's.

Needs root, buildah and util-linux. What is made is taken away again when a context is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.images.build import name_of
from tests.deploy import confine

_PROGRAMS = ("buildah", "unshare", "nsenter")
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts")


def missing(*targets: str) -> str:
    """Why these images cannot be run here; empty: they can."""
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
class Asked:
    """How an image is to be run. `mounts`: directories of this machine, by where they go."""

    target: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    may_write: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """What runs of an image: `process` is its parent, `log` what it writes."""

    process: subprocess.Popen[bytes]
    log: Path
    environment: Mapping[str, str]
    user: tuple[int, int]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in the same container, as an exec probe is."""
        uid, gid = self.user
        inside = (*_NAMESPACES, "--root", "--wd", f"--setuid={uid}", f"--setgid={gid}")
        entering = ["nsenter", f"--target={self.first()}", *inside, "--", *command]
        return subprocess.run(
            entering, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )

    def signal(self, number: int) -> None:
        """Send one to the service itself."""
        os.kill(self.first(), number)

    def has_begun(self, program: str) -> bool:
        """Whether that is what runs in there yet."""
        running = (Path(f"/proc/{each}/cmdline") for each in _children(self.process))
        return any(program in each.read_text() for each in running)

    def first(self) -> int:
        """The process that is number 1 in there, by its id out here."""
        return _children(self.process)[0]


@contextmanager
def container(asked: Asked) -> Iterator[Container]:
    """It runs while the context lasts, if it does not end by itself."""
    image = json.loads(subprocess.check_output(_inspect(asked.target)))["OCIv1"]["config"]
    with tempfile.TemporaryDirectory(prefix="specrej-container-") as scratch, _root(asked) as root:
        told, log = Path(scratch) / "specification.json", Path(scratch) / "log"
        specification = _specification(asked, image, root)
        told.write_text(json.dumps(specification))
        confined = [sys.executable, "-I", confine.__file__, str(told)]
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
    """Its children too: the kernel forgets to end them with it once they have another user."""
    with suppress(OSError):  # it has ended
        for child in _children(process):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait(30)


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    told = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(each) for each in told.read_text().split()]


@contextmanager
def _root(asked: Asked) -> Iterator[Path]:
    """The image's files, and what is written over them: nothing."""
    working = _buildah("from", "--pull-never", name_of(asked.target))
    try:
        yield Path(_buildah("mount", working))
    finally:
        _buildah("umount", working)
        _buildah("rm", working)


def _specification(asked: Asked, image: Mapping[str, Any], root: Path) -> dict[str, Any]:
    uid, gid = map(int, image["User"].split(":"))
    own = dict(each.split("=", 1) for each in image["Env"])
    arguments = asked.arguments or image.get("Cmd") or ()
    access = 0 if asked.may_write else confine.READ_ONLY
    mounts = [(at.lstrip("/"), str(source), access) for at, source in asked.mounts.items()]
    return {
        "root": str(root),
        "uid": uid,
        "gid": gid,
        "environment": {**own, **asked.environment},
        "directory": image.get("WorkingDir") or "/",
        "command": [*image["Entrypoint"], *arguments],
        "mounts": mounts,
        "in_memory": ["tmp", *(["cache"] if (root / "cache").exists() else [])],
    }


def _inspect(target: str) -> list[str]:
    return ["buildah", "inspect", "--type", "image", name_of(target)]


def _buildah(*arguments: str) -> str:
    return subprocess.check_output(["buildah", *arguments], text=True).strip()
