"""Run the commands of the documents as they are printed, on services of toys.

Addresses and placeholders are replaced. Programs that start services (`make up`, `specrej up`,
`python -m SERVICE`) check their settings instead.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from tests.documents.blocks import BLOCKS, ROOT, UNMARKED, Block
from tests.programs import run

pytestmark = pytest.mark.asyncio(loop_scope="session")

BIN = Path(sys.executable).parent
_CHECK = f"exec {sys.executable} -m tests.documents.configured"
# By name, what the shell runs in place of a program.
_PROGRAMS = {
    "make": f'[ "$*" = up ] && {_CHECK}; echo "make $*: not run here" >&2; exit 1',
    "specrej": f'[ "$1" = up ] && {_CHECK}; exec {BIN}/specrej "$@"',
    "python": 'if [ "$1" = -m ] && [[ "$2" =~ ^(orchestrator|gateway|.*_service)$ ]]; then '
    f'shift; {_CHECK} "$@"; fi; exec {sys.executable} "$@"',
    "grpcurl": f'exec {BIN}/grpcurl "$@"',
}
# Those of other documents take a minute.
_PRINTED = [
    pytest.param(
        block, id=block.place, marks=() if block.place.startswith("README") else pytest.mark.long
    )
    for block in UNMARKED
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the commands run: services, a request of the past, and an empty directory."""

    stack: Stack
    replacements: dict[str, str]
    directory: Path

    async def run(self, block: Block) -> None:
        """Run a block; an AssertionError with its output if it fails."""
        code = block.code
        for printed, own in self.replacements.items():
            code = code.replace(printed, own)
        program = (sys.executable, "-c") if block.language == "python" else ("bash", "-euc")
        await run(
            *(*program, code),
            folder=self.directory,
            PATH=f"{self.directory / '.venv/bin'}:{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            SPECREJ_ADDRESS=self.stack.orchestrator_address,
            SPECREJ_ORCHESTRATOR_REDIS_URL=self.stack.redis_url,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(toys: Stack, tmp_path_factory: pytest.TempPathFactory) -> Place:
    directory = tmp_path_factory.mktemp("commands")
    programs = directory / ".venv/bin"
    programs.mkdir(parents=True)
    for name, script in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(stat.S_IRWXU)
    replacements = {
        "127.0.0.1:50050": toys.orchestrator_address,
        "127.0.0.1:50052": toys.reward_address,
    }
    return Place(toys, replacements, directory)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.mark], ids=lambda block: block.place)
async def test_a_mark_names_a_test_or_a_reason(block: Block) -> None:
    """Guards against blocks that no test runs, without a reason."""
    kind, _, rest = block.mark.partition(": ")
    assert kind in {"run", "not run"} and rest
    if kind == "run":
        path, _, test = rest.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


async def test_named_targets_exist() -> None:
    """Guards against `make` targets that were renamed or removed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]+)", texts, re.MULTILINE))
    assert named and named - targets == set()


@pytest.mark.parametrize("block", _PRINTED)
async def test_a_printed_block_runs(place: Place, block: Block) -> None:
    """Guards against commands and programs that fail as they are printed."""
    await place.run(block)
