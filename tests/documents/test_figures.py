"""Figures in the documents are those of the results in the repository."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from experiments.branching import compare
from experiments.studies.statistics import Estimate, mean
from experiments.trajectories import FloatArray
from tests.documents.blocks import ROOT

_OURS = ("specrej", "specrej-branching")
_STUDIES = ROOT / "experiments/results/128/studies-128-tokens-relevance.md"


def _rows(text: str, columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns whose first cell is a number."""
    tables = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    rows = (row for row in tables if len(row) == columns)
    return [row for row in rows if re.fullmatch(r"[\d.]+", row[0])]


def _studies(header: str) -> dict[str, list[str]]:
    """The rows of the table that follows a header in the studies, by their first cells."""
    part = _STUDIES.read_text(encoding="utf-8").partition(header)[2].partition("\n\n**")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    key = 1 if header.startswith(("**Compute", "**Speculative")) else 0
    return {row[key]: row for row in rows[2:]}


def test_choosing_quotes_the_studies() -> None:
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    best_of_n = _studies("**Best-of-N by relevance**")
    rewards = _studies("**Speculative Rejection by relevance")
    ratios = _studies("**Compute for equal relevance")
    prefixes = _studies("**Partial against final relevance**")
    three, four = _rows(page, 3), _rows(page, 4)
    assert (len(three), len(four)) == (8, 4)
    for n, reward, tokens in three[:4]:
        assert [reward, tokens] == [best_of_n[n][1], best_of_n[n][3]]
    for token, tau, survives in three[4:]:
        assert [tau, survives] == [prefixes[token][3], prefixes[token][4]]
    for alpha, reward, tokens, ratio in four:
        assert [reward, tokens] == [rewards[alpha][3], rewards[alpha][6]]
        assert ratio == ratios[alpha][6]


def test_telemetry_quotes_its_cost() -> None:
    page = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/telemetry.json").read_text())
    low, high = result["ratio_interval"]
    assert f"{result['ratio']:.3f}\n({low:.3f} to {high:.3f}) times" in page


def test_comparison_quotes_the_benchmark() -> None:
    page = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/peers_tiles.json").read_text())
    speeds = {(row["engine"], str(row["n"])): row["tokens_per_s"] for row in result["results"]}
    rows = _rows(page, 5)
    assert len(rows) == 4
    for n, *figures in rows:
        engines = ("specrej", "vllm", "llamacpp", "transformers")
        for engine, figure in zip(engines, figures, strict=True):
            assert abs(speeds[engine, n] - float(figure)) < 0.6


def test_vllm_quotes_the_check() -> None:
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/gpu_check_small_cpu.json").read_text())
    rounds = [
        [
            f"{one['tokens']}",
            f"{one['started']}, {one['live']}",
            f"{one['slots']:,}",
            f"{one['freed']:,}",
        ]
        for one in result["memory_run"]["rounds"]
    ]
    assert [[row[0], *row[2:]] for row in _rows(page, 5) if "," in row[2]] == rounds


def test_vllm_quotes_the_check_of_a_gpu() -> None:
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/gpu_check_h200.json").read_text())
    assert len(result["speed"]) == 4
    for one in result["speed"]:
        speed, share = f"{one['tokens_per_s']:,.0f}", f"{one['of_bound']:.0%}"
        row = f"| {one['n']:,} | {speed} | {share} | {one['prune_ms']:.1f} |"
        assert row in page, row


@pytest.mark.parametrize(
    ("max_tokens", "reward", "system"),
    [
        (128, "relevance", "32/16,4"),
        (128, "harmless", "32/16,4"),
        (512, "relevance", "24/24,2,1"),
        (512, "harmless", "32/8,2"),
    ],
)
def test_branching_quotes_its_runs(max_tokens: int, reward: str, system: str) -> None:
    page = (ROOT / "docs/branching.md").read_text(encoding="utf-8")
    path = ROOT / f"experiments/results/branching_{max_tokens}.jsonl"
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    _, systems = compare(runs, reward)
    rows = {str(row[0]): row for row in systems.rows}
    quoted = rf"^\| {max_tokens} \| {reward}.*\| {system}:"
    for name in (f"branching {system}", "N = 64", "N = 128"):
        tokens, score = (cell.value for cell in rows[name][1:3] if isinstance(cell, Estimate))
        quoted += rf" {score:.3f} with {tokens:,.0f}\b.*\|"
    ratio = rows[f"branching {system}"][5]
    assert isinstance(ratio, Estimate)
    interval = rf"{ratio.value:.2f} \({ratio.low:.2f} to {ratio.high:.2f}\)"
    assert re.search(rf"{quoted}[a-z ]*{interval} \|$", page, re.MULTILINE)


def test_comparison_quotes_the_answers() -> None:
    page = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/answer.json").read_text())
    compared = [point for point in result["points"] if point["prompts"] == result["prompts"]]
    assert len(compared) == 12
    for p in compared:
        interval = f"{p['reward_low']:.3f} to {p['reward_high']:.3f}"
        cells = (p["system"], p["n"], f"{p['seconds']:.2f}", f"{p['tokens']:.0f}")
        quality = (
            f"{p['reward']:.3f} ({interval})",
            f"{p['second_judge']:.3f}",
            f"{p['words']:.0f}",
        )
        assert f"| {' | '.join(map(str, (*cells, *quality)))} |" in page
    paired = {(a["system"], a["n"], a["prompt_id"]): a for a in result["answers"]}
    prompts = [prompt for system, n, prompt in paired if (system, n) == ("vllm", 64)]

    def of(system: str, figure: str) -> FloatArray:
        return np.array([paired[system, 64, prompt][figure] for prompt in prompts])

    def share(system: str, figure: str) -> str:
        return f"in {of(system, figure).sum() / of('vllm', figure).sum():.2f} of the"

    def above(system: str, figure: str, digits: int) -> tuple[str, str]:
        found = mean(of(system, figure) - of("vllm", figure))
        edges = f"{found.low:.{digits}f} to {found.high:.{digits}f}"
        return f"{found.value:.{digits}f}", edges

    text = " ".join(page.split())
    (own, edges), (forked, forked_edges) = (above(s, "reward", 3) for s in _OURS)
    assert (
        f"{own} above that of vLLM at N = 64 (95 %: {edges}), {share(_OURS[0], 'seconds')}" in text
    )
    assert f"seconds and {share(_OURS[0], 'tokens').removeprefix('in ')} tokens" in text
    assert f"with branching {forked} ({forked_edges}) {share(_OURS[1], 'seconds')} seconds" in text
    judged = [f"{value} ({edges})" for value, edges in (above(s, "second_judge", 2) for s in _OURS)]
    assert " and ".join(judged) in text


def test_comparison_and_readme_quote_the_answers_to_100_prompts() -> None:
    page, readme = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("docs/comparison.md", "README.md")
    )
    run = json.loads((ROOT / "benchmarks/results/answer_100.json").read_text())
    assert run["prompts"] == 100
    for p in run["points"]:
        interval = f"{p['reward']:.3f} ({p['reward_low']:.3f} to {p['reward_high']:.3f})"
        cells = (p["system"], p["n"], f"{p['seconds']:.2f}", f"{p['tokens']:.0f}", interval)
        assert f"| {' | '.join(map(str, cells))} | {p['second_judge']:.3f} |" in page
    answers = {(a["system"], a["n"], a["prompt_id"]): a for a in run["answers"]}
    prompts = [prompt for system, n, prompt in answers if (system, n) == ("vllm", 64)]

    def of(system: str, n: int, figure: str) -> FloatArray:
        return np.array([answers[system, n, prompt][figure] for prompt in prompts])

    for (system, n), shown in (
        (("specrej-branching", 24), "the difference is {}, in {} of the seconds"),
        (("specrej-branching", 32), "it is {} above, in {} of the seconds"),
        (("specrej", 64), "at N = 64 is {} from it, in {} of the seconds"),
    ):
        d = mean(of(system, n, "reward") - of("vllm", 64, "reward"))
        share = of(system, n, "seconds").sum() / of("vllm", 64, "seconds").sum()
        interval = f"{d.value:.3f} ({d.low:.3f} to {d.high:.3f})"
        assert shown.format(interval, f"{share:.2f}") in page.replace("95 %: ", "")
        if n == 24:
            text = f"of 24 candidates it reaches vLLM's reward of 64 in {share:.2f} of the seconds"
            assert text in readme and d.low < 0 < d.high


def test_the_readme_quotes_the_answers() -> None:
    result = json.loads((ROOT / "benchmarks/results/answer_100.json").read_text())
    (own,), (peer,) = (
        [p for p in result["points"] if (p["system"], p["n"]) == (system, 64)]
        for system in ("specrej", "vllm")
    )
    quoted = (
        f"64 candidates of {result['max_tokens']} tokens take specrej {own['seconds']:.1f} s and"
        f" vLLM with the same reward {peer['seconds']:.1f} s, for rewards of {own['reward']:.3f}"
        f" and {peer['reward']:.3f} (means of {result['prompts']} prompts"
    )
    assert quoted in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_machines_of_kept_results_are_those_of_their_files() -> None:
    """Guards against a figure that is read as another machine's."""
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    first, others = page.split("Machine of the kept results: ")[1].split("Of\n", 1)
    amd, intel = others.partition("\n\n")[0].split(": 2 cores of ")[:2]
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        found = re.search(r'"processor": "([^"]*)"', path.read_text(encoding="utf-8"))
        if not found or path.stem.startswith("gpu_check"):
            continue
        named = [f"`{path.stem}`" in part for part in (amd, intel)]
        is_amd, is_usual = "AMD EPYC" in found[1], "2.50GHz" in found[1]
        assert named == [is_amd, not is_amd and not is_usual], path.name
    assert "Intel Xeon at 2.50 GHz" in first and "AMD EPYC" in intel
