"""Tables of figures in the documents: `make tables`; `--check` fails if one is stale.

Each is between `<!-- table: NAME -->` and `<!-- end of table -->` in README.md, docs/*.md or
benchmarks/README.md, and is written from a file of experiments/results or benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.answer import differences

ROOT = Path(__file__).parents[1]
_STUDIES, _MEASURED = ROOT / "experiments/results", ROOT / "benchmarks/results"
_REWARDS = ("relevance", "likelihood", "harmless")
_MARK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
Rows = Iterable[Sequence[object]]


def main() -> None:
    """Write or check all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    stale = []
    for path in (
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/*.md")),
        ROOT / "benchmarks/README.md",
    ):
        text = path.read_text("utf-8")
        fresh = _MARK.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)
        if fresh != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(fresh, "utf-8")
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}: run make tables")


def markdown(headings: Sequence[str], rows: Rows) -> str:
    """Lines of a table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def studied(path: str, caption: str) -> pd.DataFrame:
    """The table below a caption in a file of experiments/results; its cells are texts."""
    text = (_STUDIES / path).read_text("utf-8").partition(f"**{caption}")[2]
    text = text.partition("\n\n**")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    headings, _, *rows = lines
    return pd.DataFrame(rows, columns=headings)


def measured(name: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((_MEASURED / f"{name}.json").read_text("utf-8"))


def _saved() -> str:
    """Rows of the default N, then of N = 64."""
    runs = (
        ("n16_100_prompts", 16, 128),
        ("n16_20_prompts", 16, 512),
        ("100_prompts", 64, 128),
        ("16_prompts", 64, 512),
        ("16_prompts", 64, 1024),
    )
    rows = []
    for folder, n, limit in runs:
        found = studied(f"{folder}/summary.md", "Best-of-N over")
        found = found[found.answers.eq(f"{limit} tokens") & found.N.eq(str(n))]
        ratios = found.set_index("reward")["tokens, ratio (95 %)"]
        prompts = found.prompts.iloc[0]
        rows.append((n, f"up to {limit:,} tokens", prompts, *(ratios[name] for name in _REWARDS)))
    return markdown(("N", "answers", "prompts", *(f"by {name}" for name in _REWARDS)), rows)


def _judged() -> str:
    """What other rewards say of the default's answers of at most 128 tokens."""
    rows = []
    for name in _REWARDS:
        study = studied(f"n16_100_prompts/studies-128-tokens-{name}.md", "Answers chosen by")
        rows += [(name, *row) for row in study.drop(columns=study.columns[3]).to_numpy()]
    gains = ("gain over one answer", "Best-of-N's gain with equal tokens", "difference")
    return markdown(("chosen by", "judged by", *gains), rows)


def _pays() -> str:
    summary = studied("100_prompts/summary.md", "Best-of-N over").set_index("reward")
    advice = studied("100_prompts/recommended.md", "Recommended")
    if "objective" in advice:  # earlier reports had two
        advice = advice[advice.objective == "reward alone"]
    advice = advice.set_index("reward")
    rows = []
    for name in _REWARDS:
        first = studied(f"100_prompts/studies-128-tokens-{name}.md", "The first decision token")
        tau = first.set_index("first decision token").loc["16", "Kendall tau there (95 %)"]
        ratio = summary.loc[name, "tokens, ratio (95 %)"]
        rows.append((name, tau, ratio, *advice.loc[name].iloc[-2:]))
    headings = ("reward", "Kendall's tau at 16", "Best-of-N's tokens for equal reward")
    pays = ("reward ahead of Best-of-N at equal tokens", "rejection pays from token")
    return markdown((*headings, *pays), rows)


def _columns(caption: str, headings: dict[str, str], keys: Sequence[str]) -> Callable[[], str]:
    """Columns of a study of 20 prompts with 512 answers; `keys` are of the first column."""

    def table() -> str:
        study = studied("128/studies-128-tokens-relevance.md", caption)
        rows = study[study[next(iter(headings))].isin(keys)][[*headings]]
        return markdown([*headings.values()], rows.to_numpy())

    return table


def _throughput() -> str:
    result, engines = measured("peers"), ("specrej", "vllm", "transformers")
    speeds = {(row["engine"], row["n"]): row["tokens_per_s"] for row in result["results"]}
    rows = [
        (n, *(f"{speeds[engine, n]:.0f}" for engine in engines), f"{bound:.0f}")
        for n, bound in ((int(n), b) for n, b in result["gemm_bound_tokens_per_s"].items())
    ]
    return markdown(("N", *engines, "products alone"), rows)


def _answers(name: str) -> Callable[[], str]:
    def table() -> str:
        result = measured(name)
        rows = [
            (
                *(p["system"], p["n"], f"{p['seconds']:.2f}", f"{p['tokens']:.0f}"),
                f"{p['reward']:.3f} ({p['reward_low']:.3f} to {p['reward_high']:.3f})",
                *(f"{p['second_judge']:.3f}", f"{p['words']:.0f}"),
            )
            for p in result["points"]
            if p["prompts"] == result["prompts"]
        ]
        quality = ("reward (95 %)", "second judge", "words")
        return markdown(("system", "N", "seconds", "tokens", *quality), rows)

    return table


def _paired(name: str) -> Callable[[], str]:
    def table() -> str:
        rows = [
            (
                *(d["system"], d["n"]),
                *(
                    f"{d[judge]:.3f} ({d[f'{judge}_low']:.3f} to {d[f'{judge}_high']:.3f})"
                    for judge in ("reward", "second_judge")
                ),
                *(f"{d[f'{cost}_ratio']:.2f}" for cost in ("seconds", "tokens")),
            )
            for d in differences(pd.DataFrame(measured(name)["answers"])).to_dict("records")
            if not math.isnan(d["reward_low"])
        ]
        judged = ("reward (95 %)", "second judge (95 %)")
        return markdown(("system", "N", *judged, "of the seconds", "of the tokens"), rows)

    return table


def _gpu() -> str:
    rows = [
        (
            *(f"{one['n']:,}", f"{one['tokens_per_s']:,.0f}"),
            *(f"{one['of_bound']:.0%}", f"{one['prune_ms']:.1f}"),
        )
        for one in measured("gpu_check_h200")["speed"]
    ]
    return markdown(("N", "tokens/s", "of the bound", "prune of half, ms"), rows)


def _right(name: str) -> Callable[[], str]:
    def table() -> str:
        def estimate(values: Sequence[float]) -> str:
            value, low, high = values
            return f"{value:.3f} ({low:.3f} to {high:.3f})"

        rows = [
            (
                one["policy"],
                *(estimate(one[key]) for key in ("right", "less the base's")),
                f"{one['tokens']:.0f}",
                estimate(one["of the base's tokens"]),
            )
            for one in measured(name)["policies"]
        ]
        base = measured(name)["policies"][0]["policy"]
        return markdown(("policy", "right", f"less {base}", "tokens", f"of {base}'s"), rows)

    return table


_RATIO = "Best-of-N's tokens for equal reward"
TABLES: dict[str, Callable[[], str]] = {
    "saved": _saved,
    "judged": _judged,
    "pays": _pays,
    "best-of-n": _columns(
        "Best-of-N by relevance",
        {
            "N": "N",
            "mean reward of the best (95 %)": "mean reward of the best, by relevance",
            "tokens": "tokens",
        },
        ("1", "8", "64", "512"),
    ),
    "alphas": _columns(
        "Compute for equal relevance",
        {
            "alpha": "alpha",
            "tokens saved at equal N": "tokens saved",
            "tokens, ratio (95 %)": _RATIO,
        },
        ("0.3", "0.5", "0.7", "0.9"),
    ),
    "decision-tokens": _columns(
        "Partial against final relevance",
        {
            "decision token": "decision token",
            "Kendall tau (95 %)": "Kendall's tau, relevance",
            "best survives alpha 0.5 (95 %)": "the best answer survives alpha 0.5",
        },
        ("8", "16", "32", "64"),
    ),
    "throughput": _throughput,
    "answers-10": _answers("answer"),
    "paired-10": _paired("answer"),
    "answers-100": _answers("answer_100"),
    "paired-100": _paired("answer_100"),
    "answers-512": _answers("answer_512"),
    "paired-512": _paired("answer_512"),
    "answers-endpoint": _answers("answer_endpoint"),
    "right-checks": _right("right_checks"),
    "gpu": _gpu,
}


if __name__ == "__main__":
    main()
