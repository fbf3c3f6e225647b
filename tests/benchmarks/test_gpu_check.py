"""The check of a GPU: what it makes of its suite."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check


@pytest.mark.parametrize(
    ("output", "summary"),
    [
        (
            "== 5 passed, 1 skipped in 3 s ==\nnanobind: leaked 2 types!\n",
            "5 passed, 1 skipped in 3 s",
        ),
        ("1 failed, 4 passed in 3 s", "1 failed, 4 passed in 3 s"),
        ("5 threads\nSegmentation fault", "pytest did not reach its end"),
    ],
)
def test_the_summary_is_pytests(output: str, summary: str) -> None:
    """Guards against what a library prints at the end of the process."""
    assert gpu_check.summary_of(output)["summary"] == summary


@pytest.mark.parametrize(
    ("output", "failed"),
    [("ERROR tests/x.py::a[vllm]\n1 error in 2 s\n", ["tests/x.py::a[vllm]"]), ("", [])],
)
def test_a_suite_that_did_not_start_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, failed: list[str]
) -> None:
    """Guards against a machine that looks clean because nothing ran on it."""

    def run(suite: Any, stdout: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        stdout.write(output)
        return subprocess.CompletedProcess(suite, 1)

    monkeypatch.setattr(subprocess, "run", run)
    result = gpu_check._conformance(tmp_path)
    assert (result["failed"], result["exit_code"]) == (failed, 1)
