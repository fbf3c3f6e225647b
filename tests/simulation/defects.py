"""Seeded defects of defects.toml, each in a copy of the orchestrator, and the seeds that find them.

As a program, it prints the first of the seeds in its arguments that finds a violation, and the
violation.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simulation.loop import Violation
from tests.simulation.run import Simulation

_ROOT = Path(__file__).parents[2]
_SEEDS, _REQUESTS, _LIMIT_S = range(60), 100, 900.0
NOT_FOUND = -1
# An invariant, not a mutation that cannot be called.
_FOUND_BY = (
    r"(?s)seed \d+: (?!.*(?:TypeError|AttributeError|NameError))(?:Violation\()*(.*?)\)*; faults"
)


def listed() -> dict[str, tuple[str, str, str]]:
    """All defects, by what goes wrong: a file, its old text and the new one."""
    files = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {name: (file, *texts) for file, rows in files.items() for name, texts in rows.items()}


def first_found(file: str, old: str, new: str, seeds: Iterable[int] = _SEEDS) -> tuple[int, str]:
    """The first of the seeds that finds a defect, or `NOT_FOUND`, and the violation.

    Raises ValueError: the defect is stale.
    """
    with changed(file, old, new) as path:
        command = (sys.executable, "-m", __name__, *map(str, seeds))
        environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        try:
            printed = subprocess.check_output(command, env=environment, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return NOT_FOUND, f"no end within {_LIMIT_S:g} s"
    seed, violation = json.loads(printed)
    return seed, violation


@contextmanager
def changed(file: str, old: str, new: str) -> Iterator[str]:
    """The path for imports of a tree in which a file has other text.

    Raises ValueError: it does not have the old text exactly once.
    """
    with TemporaryDirectory(prefix="specrej-changed-") as folder:
        # A copy of its package precedes the tree, from which the others are imported.
        package = Path(file).parts[0]
        shutil.copytree(_ROOT / package, Path(folder, package))
        path = Path(folder, file)
        if (text := path.read_text("utf-8")).count(old) != 1:
            raise ValueError(f"not exactly once in {file}: {old}")
        path.write_text(text.replace(old, new), "utf-8")
        yield f"{folder}:{_ROOT}"


def print_table(part: str) -> int:
    """Search for the defects whose names have `part`; returns how many were not found."""
    seeds = []
    for name, defect in listed().items():
        if part in name:
            seed, violation = first_found(*defect)
            seeds.append(seed)
            where = "not found" if seed == NOT_FOUND else seed
            print(f"{name:86} {where:>9}  {violation[:100]}", flush=True)
    print(json.dumps({"defects": len(seeds), "found": len(seeds) - seeds.count(NOT_FOUND)}))
    return seeds.count(NOT_FOUND)


def _search(seeds: Iterable[int]) -> tuple[int, str]:
    for seed in seeds:
        try:
            Simulation(seed, _REQUESTS).run()
        except Violation as violation:
            if found := re.match(_FOUND_BY, str(violation)):
                return seed, found[1]
    return NOT_FOUND, ""


if __name__ == "__main__":
    print(json.dumps(_search(map(int, sys.argv[1:]))))
