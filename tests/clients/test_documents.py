"""The samples of docs/clients.md are parts of programs that other tests run, or run here."""

from __future__ import annotations

import re
import sys

import pytest

from deploy.local.stack import Stack
from tests.programs import ROOT, run

TYPESCRIPT = ROOT / "clients/typescript/examples/generate.ts"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAMPLES = dict(BLOCK.findall((ROOT / "docs/clients.md").read_text()))


def _lines(text: str) -> str:
    """Without indentation."""
    return "\n".join(line.strip() for line in text.splitlines())


def test_a_sample_is_part_of_a_program() -> None:
    assert _lines(SAMPLES["typescript"]) in _lines(TYPESCRIPT.read_text())


@pytest.mark.asyncio(loop_scope="session")
async def test_the_sample_of_python(toys: Stack) -> None:
    code = SAMPLES["python"].replace("127.0.0.1:50050", toys.orchestrator_address)
    assert await run(sys.executable, "-c", code)
