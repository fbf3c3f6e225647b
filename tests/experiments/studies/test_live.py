"""Timed live runs, read from JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.studies.live import read

RUN = {
    "prompt_id": "p0",
    "reward": "walk",
    "max_tokens": 64,
    "algorithm": "best-of-n",
    "n": 8,
    "seconds": 2.5,
    "score": 0.5,
}


def test_runs_are_read_and_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    fast = {"algorithm": "speculative-rejection", "alpha": 0.5, "tokens": 7, "as_replayed": False}
    runs = [RUN, RUN | fast]
    path.write_text(json.dumps({"machine": "an abacus", "runs": runs}), "utf-8")
    live = read(path)
    first, second = live.of("walk", 64)
    assert (first.is_best_of_n, second.is_best_of_n) == (True, False)
    assert (first.as_replayed, second.as_replayed) == (True, False)
    assert first.key != second.key
    assert live.of("walk", 128) == live.of("other", 64) == ()
    assert live.machine == "an abacus"


@pytest.mark.parametrize("text", ["[]", "{}", '{"runs": [{"n": 1}]}', "torn"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "live.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"."):
        read(path)
