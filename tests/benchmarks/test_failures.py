"""A late failure of one case: the benchmarks report it beside the finished measurements."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import engine, vllm_verbs
from benchmarks.engines import WorkerError


@pytest.fixture(params=["engine", "vllm_verbs"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """A benchmark whose last case fails: its module, options, failed case and exit code."""
    prepare = {"engine": _engine, "vllm_verbs": _vllm_verbs}
    return prepare[request.param](monkeypatch)


def _fails(*_: Any) -> dict[str, float]:
    raise WorkerError("ended by SIGKILL: out of memory")


def _engine(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    monkeypatch.setattr("benchmarks.engine.CausalLM.load", lambda *_: None)
    figures = {figure: 1.0 for figure, _ in engine._FIGURES.values()}
    for name in engine._FIGURES:
        monkeypatch.setattr(engine, f"_{name}", lambda *_: figures)
    monkeypatch.setattr(engine, "_memory_in_own_process", _fails)
    return engine, "", "memory", 1


def _vllm_verbs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    def measure(workers: Any, n: int, *_: Any) -> dict[str, Any]:
        if n == 256:
            _fails()
        return {"n": n, **dict.fromkeys(("bare", "whole", "bare_cut", "cut"), 1.0), "rounds": {}}

    worker = SimpleNamespace(ready=dict, stop=lambda: None)
    monkeypatch.setattr(vllm_verbs, "_workers", lambda _: [("bare", worker)])
    monkeypatch.setattr(vllm_verbs, "_measure", measure)
    return vllm_verbs, "--n 16 256 --without-own", "n=256", 1


def test_the_report_has_the_failure_and_the_other_cases(
    failing: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options, case, code = failing
    monkeypatch.setattr("sys.argv", ["bench", *options.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == code
    lines = capsys.readouterr().out.splitlines()
    reason = "WorkerError: ended by SIGKILL: out of memory"
    assert lines[-2] == f"{case} failed: {reason}"
    result = json.loads(lines[-1])
    assert result["failed"] == {case: reason}
    finished = {
        "engine": len(result.get("results", [])) == 5,
        "vllm_verbs": [one["n"] for one in result.get("cases", [])] == [16],
    }
    assert finished[module.__name__.rpartition(".")[2]]
