"""Tables and a picture of figures in the documents: `make tables`; `--check` fails if one is stale.

Each is between `<!-- table: NAME -->` and `<!-- end of table -->` in README.md, docs/*.md or
benchmarks/README.md, and is written from a file of benchmarks/results. Tables of programs that
were removed have no marks: their files no longer change.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.answer import differences
from experiments.pictures import draw
from experiments.statistics import Estimate

ROOT = Path(__file__).parents[1]
_MEASURED = ROOT / "benchmarks/results"
_MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
Rows = Iterable[Sequence[object]]


def main() -> None:
    """Write or check all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    stale = []
    pages = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/README.md")
    for path in pages:
        text = path.read_text("utf-8")
        fresh = _MARK.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)
        if fresh != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(fresh, "utf-8")
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}: run make tables")
    if not check:
        draw(ROOT / "docs/right.svg", "Right answers", "right answers", _studies())


def markdown(headings: Sequence[str], rows: Rows) -> str:
    """Lines of a table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def measured(name: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((_MEASURED / f"{name}.json").read_text("utf-8"))


def _estimate(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _answers(name: str) -> str:
    result = measured(name)
    rows = [
        (
            *(p["system"], p["n"], f"{p['seconds']:.2f}", f"{p['tokens']:.0f}"),
            _estimate(p["reward"], p["reward_low"], p["reward_high"]),
            *(f"{p['second_judge']:.3f}", f"{p['words']:.0f}"),
        )
        for p in result["points"]
        if p["prompts"] == result["prompts"]
    ]
    quality = ("reward (95 %)", "second judge", "words")
    return markdown(("system", "N", "seconds", "tokens", *quality), rows)


def _paired(name: str) -> str:
    rows = [
        (
            *(d["system"], d["n"]),
            *(
                _estimate(d[judge], d[f"{judge}_low"], d[f"{judge}_high"])
                for judge in ("reward", "second_judge")
            ),
            *(f"{d[f'{cost}_ratio']:.2f}" for cost in ("seconds", "tokens")),
        )
        for d in differences(pd.DataFrame(measured(name)["answers"])).to_dict("records")
        if not math.isnan(d["reward_low"])
    ]
    judged = ("reward (95 %)", "second judge (95 %)")
    return markdown(("system", "N", *judged, "of the seconds", "of the tokens"), rows)


def _callers() -> str:
    load = measured("answer_callers")["load"]
    of_vllm = {one["callers"]: one["answers_per_s"] for one in load if one["system"] == "vllm"}
    rows = [
        (
            *(one["callers"], one["system"], one["n"], f"{one['reward']:.3f}"),
            *(
                f"{one['answers_per_s']:.3f}",
                f"{one['answers_per_s'] / of_vllm[one['callers']]:.1f}",
            ),
            *(f"{one['p50_s']:.0f}", f"{one['p95_s']:.0f}"),
        )
        for one in load
    ]
    speed = ("answers per second", "times vLLM's", "median s", "95 % s")
    return markdown(("callers", "system", "N", "reward", *speed), rows)


def _gpu() -> str:
    rows = [
        (
            *(f"{one['n']:,}", f"{one['tokens_per_s']:,.0f}"),
            *(f"{one['step_ms']:.1f}", f"{one['prune_ms']:.1f}"),
        )
        for one in measured("gpu_check_h200")["speed"]
    ]
    return markdown(("N", "tokens/s", "step, ms", "prune of half, ms"), rows)


def _studies() -> dict[str, dict[str, list[tuple[str, float, Estimate]]]]:
    """The points of all studies of right answers."""
    studies = {}
    for name in ("checks", "humaneval", "reasoning", "calls"):
        study = measured(f"right_{name}")
        studies[f"{name}, N = {study['n']}: tokens"] = {
            one["policy"]: [("", one["tokens"], Estimate(*one["right"]))]
            for one in study["policies"]
        }
    return studies


def _right(name: str) -> str:
    rows = [
        (
            one["policy"],
            *(_estimate(*one[key]) for key in ("right", "less the base's")),
            f"{one['tokens']:.0f}",
            _estimate(*one["of the base's tokens"]),
        )
        for one in measured(name)["policies"]
    ]
    base = measured(name)["policies"][0]["policy"]
    return markdown(("policy", "right", f"less {base}", "tokens", f"of {base}'s"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "answers-100": partial(_answers, "answer_100"),
    "paired-100": partial(_paired, "answer_100"),
    "answers-512": partial(_answers, "answer_512"),
    "answers-endpoint": partial(_answers, "answer_endpoint"),
    "paired-endpoint": partial(_paired, "answer_endpoint"),
    "callers": _callers,
    "right-checks": partial(_right, "right_checks"),
    "right-reasoning": partial(_right, "right_reasoning"),
    "right-humaneval": partial(_right, "right_humaneval"),
    "right-calls": partial(_right, "right_calls"),
    "gpu": _gpu,
}


if __name__ == "__main__":
    main()
