"""Seeded bugs, one at a time: `make mutants`, or `python -m tests.mutants --only loop cache-ttl`.

Each mutant of `mutants.toml` is applied to a copy of the tree. Test files that import its module
run first, then those that do so through a helper, then all tests of its package. A test that fails
kills the mutant; a module that cannot be imported, a fixture that fails and a test that hangs do
not, and are reported as `ERROR`. The exit code is 1 if a mutant survives, or is stale: its old text
is not in its file exactly once, or its tests do not exist. The last line on stdout is one JSON
object.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
_MOST_FILES = 12  # of a group of tests
# pyproject.toml ends the process of a test that takes longer. Failures are not made smaller.
_OPTIONS = ("-o", "faulthandler_timeout=120", "--hypothesis-profile", "mutants")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` in `file` becomes `new`. `seen`: what a user notices; `tests` run before all others."""

    id: str
    file: str
    old: str
    new: str
    seen: str
    tests: tuple[str, ...] = ()

    @property
    def is_stale(self) -> bool:
        path, *named = (ROOT / name.partition("::")[0] for name in (self.file, *self.tests))
        if not path.is_file() or not all(test.exists() for test in named):
            return True
        return path.read_text("utf-8").count(self.old) != 1


def _imported(path: Path) -> set[str]:
    """The modules, and names in modules, that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return names


class Selection:
    """Which tests reach a module, by the imports of test files, their helpers and packages."""

    def __init__(self) -> None:
        paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
        paths += [path.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/__init__.py")]
        self._own = {path: _imported(ROOT / path) for path in paths}
        known = {
            ".".join(path.with_suffix("").parts).removesuffix(".__init__"): names
            for path, names in self._own.items()
        }
        self._tests = [path for path in paths if path.name.startswith("test_")]
        self._through: dict[Path, set[str]] = {}
        for path in self._tests:
            fixtures = [self._own.get(folder / "conftest.py", set()) for folder in path.parents[:2]]
            helpers = [known[name] for name in self._own[path] if name in known]
            self._through[path] = set().union(*helpers, *fixtures)

    def groups(self, mutant: Mutant) -> Iterator[list[str]]:
        """Files or folders to run, one group after the other; the closest names first."""
        place = Path(mutant.file)
        module, stem = ".".join(place.with_suffix("").parts), place.stem.removesuffix("s")
        direct = {path for path in self._tests if module in self._own[path]}
        indirect = {path for path in self._tests if module in self._through[path]} - direct
        for chosen in (direct, indirect):
            ranked = sorted((stem not in path.stem, str(path)) for path in chosen)
            yield [path for _, path in ranked[:_MOST_FILES]]
        yield [f"tests/{place.parts[0]}"]


def outcome_of(mutant: Mutant, tree: Path, groups: Iterator[list[str]]) -> str:
    """What happens to the mutant in a copy of the tree: `FAILED` and the test that kills it,
    `ERROR` if a run ends badly without a failed test, or `SURVIVED`."""
    path = tree / mutant.file
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    pytest = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", *_OPTIONS)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    outcome = f"SURVIVED: {mutant.seen}"
    try:
        for group in filter(None, (list(mutant.tests), *groups)):
            command = (*pytest, "-m", "not long", *group)
            run = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=False
            )
            lines = run.stdout.splitlines()
            if killer := next((line for line in lines if line.startswith("FAILED")), ""):
                return killer
            if run.returncode not in (0, 5):  # 5: no test was selected
                error = next((line for line in lines if line.startswith("ERROR")), "")
                outcome = error or f"ERROR: exit code {run.returncode}: {run.stderr.strip()[-100:]}"
    finally:
        path.write_text(text, "utf-8")
    return outcome


@contextmanager
def _copies(number: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the tree; environments and models are links."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "node_modules", "build", "dist")
    trees: SimpleQueue[Path] = SimpleQueue()
    with TemporaryDirectory(prefix="specrej-mutants-") as folder:
        for tree in (Path(folder, str(index)) for index in range(number)):
            shutil.copytree(ROOT, tree, ignore=ignored)
            for name in (".venv", ".models", ".tools"):
                (tree / name).symlink_to(ROOT / name)
            trees.put(tree)
        yield trees


def main() -> None:
    """Run the chosen mutants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of ids")
    parser.add_argument("--processes", type=int, default=2, help="test runs at the same time")
    parser.add_argument("--stale", action="store_true", help="only list stale mutants")
    given = parser.parse_args()
    rows = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text("utf-8"))["mutant"]
    chosen = [Mutant(**row) for row in rows if row["id"].startswith(tuple(given.only))]
    stale = [mutant.id for mutant in chosen if mutant.is_stale]
    fresh = [mutant for mutant in chosen if mutant.id not in stale and not given.stale]
    selection, survivors = Selection(), list[str]()
    with _copies(given.processes) as trees, ThreadPoolExecutor(given.processes) as pool:

        def run(mutant: Mutant) -> None:
            tree = trees.get()
            outcome = outcome_of(mutant, tree, selection.groups(mutant))
            trees.put(tree)
            print(f"{mutant.id}: {outcome}", flush=True)
            if not outcome.startswith("FAILED"):
                survivors.append(mutant.id)

        list(pool.map(run, fresh))
    share = round(1 - len(survivors) / len(fresh), 3) if fresh else None
    result = {"mutants": len(chosen), "killed": share, "survivors": survivors, "stale": stale}
    print(json.dumps(result))
    sys.exit(bool(survivors or stale))


if __name__ == "__main__":
    main()
