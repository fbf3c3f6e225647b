"""The GPU benchmark on a CPU, on a tiny shape: that it runs to its end, not how fast."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARGUMENTS = (
    "--device cpu --layers 2 --hidden 32 --intermediate 48 --heads 2 --kv-heads 1 --vocabulary 200 "
    "--n 1 3 --check-n 5 --prompt 5 --begin 2 --steps 1 --max-tokens 6 --slots 16"
)
# A GPU box has none of these.
RUN = """
import sys
sys.modules.update(dict.fromkeys(("grpc", "opentelemetry", "pydantic", "pydantic_settings")))
from tests.generator_service import interpreter
interpreter.choose()
from benchmarks import gpu
sys.exit(gpu.main())
"""


def test_every_mode_runs_and_agrees_with_plain_transformers() -> None:
    """Where there is a GPU nobody should have to debug the script first."""
    process = subprocess.run(
        [sys.executable, "-c", RUN, *ARGUMENTS.split()], capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    assert [line["kind"] for line in lines[:-1]] == [
        "ceilings",
        *["check"] * 3,
        *["decode"] * 6,
        *["run"] * 3,
    ]
    result = lines[-1]
    for check in result["checks"]:
        assert check["rows"] == check["argmax_agrees"] == 2
        assert check["max_abs_difference"] < 1e-4
    assert {(case["mode"], case["n"]) for case in result["decode"]} == {
        (mode, n) for mode in ("torch", "triton", "graphs") for n in (1, 3)
    }
    for case in result["decode"]:
        assert case["step_ms"] >= case["forward_ms"] > 0
    for run in result["runs"]:
        # 5 slots hold the prompt: 3 candidates get to 4 tokens, the two that are kept to 6.
        assert [each["ended_by"] for each in run["rounds"]] == ["slots_full", "all_finished"]
        assert run["tokens"] == 3 * 4 + 2 * 2
