"""Figures in the documents are those of the results in the repository."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.answer_points import Answer, Difference, differences
from experiments.branching import compare
from experiments.json_lines import read_lines
from experiments.studies.statistics import Estimate, quotient
from tests.documents.blocks import ROOT

_STUDIES = ROOT / "experiments/results/128/studies-128-tokens-relevance.md"


def _rows(text: str, columns: int) -> list[list[str]]:
    """The rows of all tables with so many columns whose first cell is a number."""
    tables = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    rows = (row for row in tables if len(row) == columns)
    return [row for row in rows if re.fullmatch(r"[\d.]+", row[0])]


def _studies(header: str, file: Path = _STUDIES) -> dict[str, list[str]]:
    """The rows of the table that follows a header in the studies, by their first cells."""
    part = file.read_text(encoding="utf-8").partition(header)[2].partition("\n\n**")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    key = 1 if header.startswith(("**Compute", "**Speculative")) else 0
    return {row[key]: row for row in rows[2:]}


def _paired(result: dict[str, Any]) -> dict[tuple[str, int], Difference]:
    """The differences from vLLM's last point, by system and N."""
    answers = [Answer(**answer) for answer in result["answers"]]
    return {(d.system, d.n): d for d in differences(answers)}


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


def _row(file: Path, *marks: str) -> list[str]:
    """The cells of the first line that has all these texts."""
    lines = file.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if all(mark in line for mark in marks))
    return line.strip("| ").split(" | ")


def test_choosing_quotes_the_rewards_of_100_prompts() -> None:
    results = ROOT / "experiments/results/100_prompts"
    for name in ("relevance", "likelihood", "harmless"):
        studies = results / f"studies-128-tokens-{name}.md"
        tau = _studies("**The first decision token from which rejection pays", studies)["16"][1]
        saved = _row(results / "summary.md", f"| {name} |")[6]
        advice = _row(results / "recommended.md", f"| {name} |", "| reward alone |")
        marks = (f"| {name} ", tau.partition(" ")[0])
        shown = _row(ROOT / "docs/choosing.md", *marks)
        assert shown[1:] == [tau, saved, *advice[-2:]]


@pytest.mark.parametrize(
    ("tokens", "results"), [("128", "100"), ("512", "16"), ("1,024", "16")], ids=str
)
def test_the_readme_quotes_the_summaries(tokens: str, results: str) -> None:
    summary = ROOT / f"experiments/results/{results}_prompts/summary.md"
    plain = tokens.replace(",", "")
    rewards = ("relevance", "likelihood", "harmless")
    saved = [_row(summary, f"| {plain} tokens |", f"| {name} |")[6] for name in rewards]
    shown = _row(ROOT / "README.md", f"| up to {tokens} tokens |")
    assert shown[1:] == [results, *saved]


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


def test_only_4_bits_exceed_the_bound_of_the_products() -> None:
    page = " ".join((ROOT / "benchmarks/README.md").read_text(encoding="utf-8").split())
    result = json.loads((ROOT / "benchmarks/results/peers_tiles.json").read_text())
    bounds = result["gemm_bound_tokens_per_s"]
    above = [row for row in result["results"] if row["tokens_per_s"] > bounds[str(row["n"])]]
    assert [(row["engine"], row["n"]) for row in above] == [("llamacpp", 1)]
    figures = (
        f"{above[0]['tokens_per_s']:.0f} tokens per second where the bound is {bounds['1']:.0f}"
    )
    assert figures in page


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
    runs = read_lines(ROOT / f"experiments/results/branching_{max_tokens}.jsonl")
    runs.sort(key=lambda run: str(run["prompt_id"]))
    _, systems = compare(runs, reward)
    rows = {str(row[0]): row for row in systems.rows}
    quoted = rf"^\| {max_tokens} \| {reward}.*\| {system}:"
    for name in (f"branching {system}", "N = 64", "N = 128"):
        tokens, score = (cell.value for cell in rows[name][1:3] if isinstance(cell, Estimate))
        quoted += rf" {score:.3f} with {tokens:,.0f}\b.*\|"
    ratio, below, beyond = rows[f"branching {system}"][4:7]
    assert isinstance(ratio, Estimate) and isinstance(beyond, float) and below == 0
    assert math.isinf(ratio.high)  # all of them are "at least"
    # Beyond N = 128, its tokens are a lower bound.
    most, own = (
        np.array([r["tokens"] for r in runs if (r["reward"], r["system"]) == (reward, name)], float)
        for name in ("N = 128", f"branching {system}")
    )
    bound = quotient(most, own)
    value = f"at least {bound.value:.2f}" if math.isinf(ratio.value) else f"{ratio.value:.2f}"
    low = bound.low if math.isinf(ratio.low) else ratio.low
    quoted += rf" {value} \(at least {low:.2f}\) \| {100 * beyond:.0f} % \|$"
    assert re.search(quoted, page, re.MULTILINE), quoted


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
    paired = _paired(result)
    assert len(paired) == 13 and {d.base for d in paired.values()} == {"vllm n=64"}
    own, forked = (paired[system, 64] for system in ("specrej", "specrej-branching"))
    text = " ".join(page.split())
    assert (
        f"{own.reward:.3f} above that of vLLM at N = 64"
        f" (95 %: {own.reward_low:.3f} to {own.reward_high:.3f}),"
        f" in {own.seconds_ratio:.2f} of the seconds and {own.tokens_ratio:.2f} of the tokens"
    ) in text
    assert (
        f"with branching {forked.reward:.3f} ({forked.reward_low:.3f} to {forked.reward_high:.3f})"
        f" in {forked.seconds_ratio:.2f} of the seconds"
    ) in text
    judged = [
        f"{d.second_judge:.2f} ({d.second_judge_low:.2f} to {d.second_judge_high:.2f})"
        for d in (own, forked)
    ]
    assert " and ".join(judged) in text


def _quoted_run(name: str, page: str) -> dict[str, Any]:
    """A kept run of `make bench-answer`, all of whose points the page has."""
    run: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    for p in run["points"]:
        interval = f"{p['reward']:.3f} ({p['reward_low']:.3f} to {p['reward_high']:.3f})"
        cells = (p["system"], p["n"], f"{p['seconds']:.2f}", f"{p['tokens']:.0f}", interval)
        assert f"| {' | '.join(map(str, cells))} | {p['second_judge']:.3f} |" in page
    return run


def test_comparison_and_readme_quote_the_answers() -> None:
    page, readme = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("docs/comparison.md", "README.md")
    )
    long = _quoted_run("answer_512", page)
    assert (long["prompts"], long["max_tokens"]) == (14, 512)
    d = _paired(long)["specrej-branching", 24]
    interval = f"{d.reward:.3f}, 95 %: {d.reward_low:.3f} to {d.reward_high:.3f}"
    shares = f"in {d.seconds_ratio:.2f} of the seconds and {d.tokens_ratio:.2f} of the tokens"
    assert f"(paired difference {interval}) {shares}" in page
    run = _quoted_run("answer_100", page)
    assert (run["prompts"], run["max_tokens"]) == (100, 128)
    paired = _paired(run)
    for case, shown in (
        (("specrej-branching", 24), "the difference is {}, in {} of the seconds"),
        (("specrej-branching", 32), "it is {} above, in {} of the seconds"),
        (("specrej", 64), "at N = 64 is {} from it, in {} of the seconds"),
    ):
        d = paired[case]
        interval = f"{d.reward:.3f} ({d.reward_low:.3f} to {d.reward_high:.3f})"
        shown = shown.format(interval, f"{d.seconds_ratio:.2f}")
        assert shown in page.replace("95 %: ", "")
    d = paired["specrej-branching", 24]
    share = f"of 24 candidates it reaches vLLM's reward of 64 in {d.seconds_ratio:.2f} of the"
    assert f"{share} seconds" in readme
    assert f"in {d.seconds_ratio:.2f} of the seconds and {d.tokens_ratio:.2f} of the tokens" in page
    interval = f"{d.second_judge:.2f} ({d.second_judge_low:.2f} to {d.second_judge_high:.2f})"
    assert f"By `harmless` the answers differ by {interval}" in page
    assert d.reward_low is not None and d.reward_high is not None
    assert d.reward_low < 0 < d.reward_high


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


def test_benchmarks_quote_the_mix_of_tenants() -> None:
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    with_spare, without = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["light_p95_ratio"]
        for name in ("overload", "overload_spare_0")
    )
    assert f"take {without:.2f} times as long as alone" in page
    assert f"instead of {with_spare:.2f} |" in page


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
