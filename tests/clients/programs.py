"""Stubs of other languages, and what their programs leave behind."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.local.stack import Stack
from tests.programs import ROOT, run
from tests.serving import until_slots_are_free

CLIENTS = ROOT / "clients"


async def wait_for_free_slots(stack: Stack) -> None:
    """Less time than a request of the tests takes that no client cancels."""
    await until_slots_are_free(stack.generator_address, bound_s=10)


async def generate(language: str, output: Path) -> None:
    """Generate the stubs of a language with the plugins that are installed."""
    template = CLIENTS / language / "buf.gen.yaml"
    buf = Path(sys.executable).with_name("buf")
    await run(buf, "generate", "--template", template, "--output", output)
