"""Environments with a wheel and exactly the packages that it requires, without a download.

Packages are links to those of this environment. A package that the wheel does not declare is
missing, as it would be after `pip install`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from email.parser import Parser
from importlib.metadata import Distribution, EntryPoints, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class Environment:
    """A virtual environment with wheels of ours and links to what they require."""

    def __init__(self, directory: Path) -> None:
        command = (sys.executable, "-m", "venv", "--without-pip", str(directory))
        subprocess.run(command, check=True)
        self.python = directory / "bin" / "python"
        (self.packages,) = directory.glob("lib/*/site-packages")
        self._scripts = directory / "bin"

    def install(self, *wheels: Path, extras: Iterable[str] = ()) -> set[str]:
        """Install wheels, the first with extras; returns the names of all other packages."""
        first, *others = (_unpacked(wheel, self.packages) for wheel in wheels)
        ours: dict[str, list[Requirement]] = {
            canonicalize_name(name): requires for name, requires in (first, *others)
        }
        for entry in self._console_scripts():
            self._write_script(entry.name, entry.value)
        names = closure(
            canonicalize_name(first[0]), extras, lambda name: ours.get(name) or _requires(name)
        )
        names -= ours.keys()
        for name in names:
            self._link(distribution(name))
        return names

    def run(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the environment, or its Python."""
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        script, *rest = arguments
        return subprocess.run(
            [str(self._scripts / script), *rest],
            cwd=cwd,
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def _console_scripts(self) -> EntryPoints:
        made = (Distribution.at(path) for path in self.packages.glob("specrej*.dist-info"))
        entries = [entry for one in made for entry in one.entry_points]
        return EntryPoints(entries).select(group="console_scripts")

    def _write_script(self, name: str, target: str) -> None:
        module, _, function = target.partition(":")
        script = self._scripts / name
        script.write_text(f"#!{self.python}\nfrom {module} import {function}\n{function}()\n")
        script.chmod(0o755)

    def _link(self, package: Distribution) -> None:
        """Link a package's directories, with the compiled modules in them, and its other files.

        Files in directories without an `__init__.py` are linked one by one: several packages share
        those.
        """
        files = [PurePosixPath(file) for file in package.files or ()]
        whole = {file.parent for file in files if file.name == "__init__.py"}
        for file in files:
            outermost = next((path for path in reversed(file.parents) if path in whole), file)
            target = self.packages / outermost
            if outermost.parts[0] != ".." and not target.is_symlink():  # not a script
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(package.locate_file(outermost))))


def _unpacked(wheel: Path, target: Path) -> tuple[str, list[Requirement]]:
    """Unpack a wheel; returns its name and requirements."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(target)
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(files.read(name).decode())
    return metadata["Name"], [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def closure(
    first: str, extras: Iterable[str], requires: Callable[[str], Iterable[Requirement]]
) -> set[str]:
    """Names of a package with extras and of all that it needs; `requires` has a package's own."""
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [(first, frozenset(extras))]
    while pending:
        name, wanted = pending.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for requirement in requires(name):
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in {"", *wanted}
            )
            if applies:
                needed = canonicalize_name(requirement.name)
                pending.append((needed, frozenset(requirement.extras)))
    return {name for name, _ in seen}


def _requires(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in distribution(name).requires or ()]
    except PackageNotFoundError:
        raise AssertionError(f"{name} is required and not installed here") from None
