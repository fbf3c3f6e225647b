"""Executes a program in a container: `unshare ... python -I confine.py SPECIFICATION`, as root.

The specification is a JSON file written by containers.py; unshare creates the namespaces. It does
what container runtimes do for Kubernetes' restricted profile. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT = 1, 2, 4, 32
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_NO_NEW_PRIVILEGES, _DROP_CAPABILITY, _LAST_CAPABILITY = 38, 24, 63
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(specification: Path) -> None:
    """Mount the root, chroot into it, drop privileges, execute the program."""
    container: dict[str, Any] = json.loads(specification.read_text())
    root = Path(container["root"])
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE)
    _mount(str(root), root, "", _BIND)
    for place, source, flags in container["mounts"]:
        _mount(source, root / place, "", _BIND)
        _mount(source, root / place, "", _BIND | _REMOUNT | flags)
    _mount("", root, "", _BIND | _REMOUNT | READ_ONLY)
    _mount("proc", root / "proc", "proc", _NO_SUID | _NO_DEV)
    _mount("/sys", root / "sys", "", _BIND | _RECURSIVE)
    _mount("", root / "sys", "", _BIND | _REMOUNT | READ_ONLY)
    for place in container["in_memory"]:
        _mount("tmpfs", root / place, "tmpfs", _NO_SUID | _NO_DEV, "mode=1777,size=1g")
    _make_devices(root / "dev")
    os.chroot(root)
    os.chdir(container["directory"])
    _drop(container["uid"], container["gid"])
    os.execvpe(container["command"][0], container["command"], container["environment"])


def _make_devices(where: Path) -> None:
    _mount("tmpfs", where, "tmpfs", _NO_SUID, "mode=755,size=64k")
    for name in _DEVICES:
        (where / name).touch()
        _mount(f"/dev/{name}", where / name, "", _BIND)
    (where / "shm").mkdir()
    _mount("shm", where / "shm", "tmpfs", _NO_SUID | _NO_DEV, "mode=1777,size=64m")


def _drop(uid: int, gid: int) -> None:
    """Drop all capabilities permanently, and change user and group."""
    for capability in range(_LAST_CAPABILITY + 1):
        _LIBC.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    _checked(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    names = (name.encode() for name in (source, str(target), kind))
    _checked(_LIBC.mount(*names, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
