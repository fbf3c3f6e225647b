"""The command of each example."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.local.stack import Stack
from examples.__main__ import PROGRAMS
from tests.programs import ROOT, outcome_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARGUMENTS = {"coding": ("--n", "2"), "vote": ("--n", "4"), "extraction": ("--n", "2", "--no-judge")}
OUTPUT = {
    "coding": "0% of the hidden tests pass",
    "vote": "no answer has a number",
    "extraction": "score 0.00",
}


@pytest.mark.parametrize("name", OUTPUT)
async def test_the_command(name: str, toys: Stack, tmp_path: Path) -> None:
    """Guards against a command that finds no file or reward, and never ends."""
    text = await _printed(
        (str(PROGRAMS[name]), *ARGUMENTS[name]),
        tmp_path,
        codes=(1,),  # a toy writes words only
        SPECREJ_ADDRESS=toys.orchestrator_address,
    )
    assert OUTPUT[name] in text, text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "printed"),
    [("vote", "candidates began"), ("rubric", "the judge's grade: "), ("extraction", "of 2")],
)
async def test_right_answers_by_the_embedded_models(
    name: str, printed: str, tmp_path: Path
) -> None:
    """Guards the judge, which is the embedded generator, and rewards of several stages."""
    (tmp_path / ".models").symlink_to(ROOT / ".models")
    text = await _printed(("-m", "examples", name, "--n", "4"), tmp_path, codes=(0, 1))
    assert printed in text, text


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".svg").exists(), reason="no .svg: make .svg/.installed")
async def test_the_drawing_by_the_embedded_model(tmp_path: Path) -> None:
    """More candidates are more like the target; all are drawings."""
    (tmp_path / ".models").symlink_to(ROOT / ".models")
    likenesses = []
    for n in ("1", "32"):
        command = ("-m", "examples", "svg", "--n", n)
        text = await _printed(command, tmp_path, path=ROOT / ".svg")
        likenesses.append(float(text.partition("likeness ")[2].partition(";")[0].split(",")[0]))
        assert (tmp_path / "build/examples/drawing.svg").read_text().endswith("</svg>")
    assert 0 <= likenesses[0] < likenesses[1]


@pytest.mark.long
async def test_the_command_with_services(tmp_path: Path) -> None:
    """Guards against services without the settings of the example."""
    command = ("-m", "examples", "coding", *ARGUMENTS["coding"])
    text = await _printed(command, tmp_path, codes=(1,), SPECREJ_GENERATOR_MODEL="toy:")
    assert OUTPUT["coding"] in text and "everything is stopped" in text, text


async def _printed(
    command: Sequence[str],
    folder: Path,
    *,
    codes: Sequence[int] = (0,),
    path: Path = ROOT,
    **environment: str,
) -> str:
    """What the command prints in a folder of its own, so that its output is not the checkout's."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment["PYTHONPATH"] = f"{ROOT}:{path}"
    outcome = await outcome_of(sys.executable, *command, folder=folder, bound_s=300, **environment)
    text = outcome.stdout + outcome.stderr
    assert outcome.returncode in codes, text
    return text
