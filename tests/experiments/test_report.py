"""The report: its files, its text, its charts, and its page in a real browser."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from experiments import report
from experiments.figures import plotting
from experiments.studies.analysis import Analysis, analyse
from experiments.studies.frontier import ALONE, COMPLETE
from experiments.studies.improvement import Live, LiveRun
from experiments.studies.statistics import Estimate
from experiments.studies.tables import shown
from experiments.trajectories import PrefixScores, Trajectories
from tests.browser import CHROMIUM, DRIVER, Page, browser
from tests.experiments.synthetic import COMPUTE, WALK, collection, noise
from tests.serving import need

PROMPTS = collection(9, 64, stop_share=0.4)
NAME = "64 <tokens>"
WIDTHS = (400, 768, 1280)
ALPHAS = (0.3, 0.5, 0.8)
NUM_PICTURES = 15 + 15 + 15  # of each length and reward


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two lengths, the first under both rewards."""
    folder = tmp_path_factory.mktemp("report")
    short = [replace(prompt.shortened(32), rewards={}) for prompt in PROMPTS]
    notes = {"collected": "2026-01-01", "machine": "an <abacus>", "command": "not in tables"}
    runs = [
        LiveRun("p0", WALK, 64, algorithm, n, seconds, 10.0)
        for algorithm, n, seconds in (("best-of-n", 8, 4.0), ("speculative-rejection", 64, 2.0))
    ]
    written = report.write(
        [(NAME, PROMPTS), ("32", short)],
        folder,
        Live("an abacus", tuple(runs)),
        notes=notes,
        compute=lambda reward: COMPUTE,
        alphas=ALPHAS,
    )
    assert written == folder / "report.html"
    return folder


def test_report_has_all_files(out: Path) -> None:
    slugs = {"64-tokens-walk", "64-tokens-likelihood", "32-likelihood"}
    assert {path.stem for path in (out / "results").iterdir()} == slugs
    for folder, suffixes in (("figures", {".svg"}), ("tables", {".md", ".csv"})):
        stems: dict[str, set[str]] = {}
        for path in (out / folder).iterdir():
            stems.setdefault(path.stem, set()).add(path.suffix)
        assert len(stems) >= 3 * 9
        assert all(endings == suffixes for endings in stems.values())
    assert {path.name for path in out.iterdir() if path.is_file()} == {
        *("report.html", "summary.md", "summary.csv", "recommended.md", "recommended.csv"),
        *(f"studies-{slug}.md" for slug in slugs),
    }


def test_figures_are_valid_and_small(out: Path) -> None:
    """Perplexity is a study of the likelihood only."""
    pictures = sorted((out / "figures").glob("*.svg"))
    assert len(pictures) == NUM_PICTURES
    perplexity = {path.stem for path in pictures if "perplexity" in path.name}
    assert perplexity == {"64-tokens-likelihood-perplexity", "32-likelihood-perplexity"}
    for path in pictures:
        svg = path.read_text("utf-8")
        assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"\b(nan|inf)\b", svg.lower()), path
        assert len(svg) < 60_000, path


def test_ids_are_unique_in_the_page(out: Path) -> None:
    """Guards against a picture that refers to a clip path or marker of another one."""
    page = (out / "report.html").read_text("utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    plots = re.findall(r'<svg[^>]*class="plot".*?</svg>', page, re.DOTALL)
    assert len(plots) == NUM_PICTURES
    for plot in plots:
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', plot)
        assert {a or b for a, b in used} <= set(re.findall(r'\bid="([^"]+)"', plot))


def test_tables_state_machine_date_and_seeds(out: Path) -> None:
    """Guards against committed figures without machine, versions, date or seeds."""
    line = (
        "Measured: collected 2026-01-01; machine an <abacus>; machine of the timed runs an abacus; "
        "9 prompts, N = 64, at most 64 tokens, seeds 0 to 8000"
    )
    for name in (
        "summary.md",
        "studies-64-tokens-walk.md",
        "tables/64-tokens-walk-frontier_alone.md",
    ):
        assert line in (out / name).read_text("utf-8"), name
    assert _results(out, "32-likelihood")["notes"]["machine"] == "an <abacus>"
    assert "at most 32 tokens" in (out / "summary.md").read_text("utf-8")


def test_compact_tables_have_the_default_only(out: Path) -> None:
    """Of tables by setting, the default's N and schedule: committed files stay small."""
    text = (out / "studies-64-tokens-likelihood.md").read_text("utf-8")
    assert len(text) < 16_000
    tables = _analysis(PROMPTS, "likelihood").tables()
    assert len(tables) >= 9
    assert all(f"**{table.caption}" in text for table in tables if table.rows)
    for objective in (COMPLETE, ALONE):
        start = text.index(f"**All settings: likelihood, {objective}")
        rows = text[start:].split("\n\n")[1].splitlines()[2:]
        of_settings = [row for row in rows if "| no cuts |" not in row]
        assert len(of_settings) == len(ALPHAS)
        assert all("| 64 |" in row and "| geometric:16,2 |" in row for row in of_settings)


def test_summary_equals_the_results(out: Path) -> None:
    with (out / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["answers"], row["reward"]) for row in rows] == [
        *((NAME, WALK), (NAME, "likelihood"), ("32", "likelihood"))
    ]
    for row, slug in zip(rows, ("64-tokens-walk", "64-tokens-likelihood"), strict=False):
        matches = _results(out, slug)["matched"]["matches"]
        usual = next(
            match
            for match in matches
            if (match["n"], match["alpha"], match["schedule"]) == (64, 0.5, "geometric:16,2")
        )
        assert float(row["tokens, ratio (95 %)"]) == usual["ratio"]["value"]
        assert float(row["tokens, ratio (95 %), low"]) == usual["ratio"]["low"]


def test_results_hold_all_studies(out: Path) -> None:
    results = _results(out, "64-tokens-walk")
    assert results["facts"]["num_prompts"] == 9
    for side in results["frontier"]["sides"]:
        assert len(side["points"]) == results["facts"]["num_plans"]
    assert len(results["correlation"]["decision_tokens"][0]["partial"]) == 250
    assert results["perplexity"] is None
    assert _results(out, "64-tokens-likelihood")["perplexity"]["rows"]
    # Live runs belong to the collection of their limit.
    assert len(results["improvement"]["timed"]) == 2
    assert _results(out, "32-likelihood")["improvement"]["timed"] == []
    assert (out / "figures" / "64-tokens-walk-improvement-seconds.svg").exists()
    assert not (out / "figures" / "32-likelihood-improvement-seconds.svg").exists()


@pytest.mark.long
def test_report_of_few_prompts_or_answers(tmp_path: Path) -> None:
    """One prompt has no intervals; two answers leave little to reject. FLOPs of unknown models are
    left out."""
    sets = [("one", PROMPTS[:1]), ("two", [settled(prompt) for prompt in collection(9, 2)])]
    text = report.write(sets, tmp_path, alphas=(0.5,)).read_text("utf-8")
    assert not re.search(r"\b(nan|inf|None)\b", _read(text))
    assert "FLOPs are left out" in _read(text)
    assert "relative FLOPs" not in text and "FLOPs, ratio" not in text
    assert not list((tmp_path / "figures").glob("*flops*"))
    assert "FLOPs" not in (tmp_path / "summary.md").read_text("utf-8")
    assert "Best-of-N (fewer than 8 prompts show nothing else)" in " ".join(_read(text).split())
    assert "Scores are settled by token 16:" in text
    with pytest.raises(ValueError, match="none has no prompts"):
        report.write([("none", [])], tmp_path)


def settled(made: Trajectories, reads: int = 16) -> Trajectories:
    """With a reward that reads `reads` tokens: rejection of longer answers is cheap."""
    scores = made.rewards[WALK]
    column = list(made.positions).index(reads)
    partial, final = scores.partial.copy(), scores.final.copy()
    reached = made.num_tokens >= reads
    final[reached] = partial[reached, column]
    for later in range(column, len(made.positions)):
        alive = made.num_tokens >= made.positions[later]
        partial[alive, later] = final[alive]
    return replace(made, rewards={WALK: PrefixScores(partial, final)})


def test_page_states_the_results(out: Path) -> None:
    analysis = _analysis(PROMPTS)
    text = " ".join(_read((out / "report.html").read_text("utf-8")).split())
    default, facts = analysis.matched.default, analysis.facts
    assert f"{shown(default.ratio.value)} times" in text
    assert f"{facts.complete_share:.0%} of the answers end before the limit of 64 tokens" in text
    assert f"saves {shown(default.expected)} times" in text
    assert "3.2 at 128, 9.14 at 512, 16 at 1,024, 28.4 at 2,048 tokens" in text
    assert "settled by token" not in text
    assert "FLOPs are those of a model of 2 layers." in text
    for side in analysis.frontier.sides:
        lead = f"is {shown(side.default.ahead)} ahead of Best-of-N with as many tokens."
        assert f"{shown(side.default.reward)}, and {lead}" in text
        assert f"Recommended for these: {side.recommended}; {side.reason}." in text
    assert "specrej_shadow_correlation" in text


def test_page_states_plainly_where_rejection_does_not_pay(undrawn: None, tmp_path: Path) -> None:
    """Prefixes of noise: Best-of-N is recommended."""
    page = report.write([("noise", noise())], tmp_path, alphas=ALPHAS)
    text = " ".join(_read(page.read_text("utf-8")).split())
    assert f"No first decision token shows that rejection by {WALK} pays here" in text
    assert "Prefix scores predict little" in text
    assert "Recommended for these: Best-of-N; no setting is ahead of it at equal tokens" in text
    rows = list(csv.DictReader((tmp_path / "recommended.csv").read_text("utf-8").splitlines()))
    of_walk = [row for row in rows if row["reward"] == WALK]
    assert [row["rejection pays from token"] for row in of_walk] == ["none", "none"]


def test_equal_charts_are_equal_files() -> None:
    """Guards against dates and random names, which would change committed files."""

    def draw(axes: Axes) -> None:  # a band without an interval is a line
        plotting.band(axes, [1, 2], [Estimate(1.0), Estimate(2.0)], "few prompts", plotting.BLUE)
        plotting.log2_axis(axes, "x", [1, 2])
        plotting.log_axis_up(axes, "y")

    first, second = (plotting.picture("name", "heading", "title", draw) for _ in range(2))
    assert "few prompts" in first.svg
    # A picture in a page has the page's size and color.
    assert "currentColor" in first.inline and "currentColor" not in first.svg
    assert "width=" not in first.inline.split(">")[0]
    assert first.svg == second.svg


def test_tiny_differences_do_not_fill_the_chart() -> None:
    """Guards against an axis with an offset, 1e-6 + 98.9, that magnifies the last digits."""
    drawn: list[Axes] = []

    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [98.9357, 98.935709])
        plotting.least_span_up(axes, 10)
        drawn.append(axes)

    svg = plotting.picture("name", "heading", "title", draw).svg
    (axes,) = drawn
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(10)
    assert low < 98.9357 < 98.935709 < high
    assert ">98<" in svg
    assert axes.yaxis.get_major_formatter().get_offset() == ""


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (16, "16"), (2048, "2048"), (16384, "16.4k"), (3e6, "3M")]
)
def test_axis_numbers_are_short(value: float, text: str) -> None:
    assert plotting.short(value) == text


async def test_page_has_no_errors_requests_or_overflow(out: Path, tmp_path: Path) -> None:
    """At three widths; all figures are drawn."""
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    async with browser(tmp_path / "profile") as page:
        for width in WIDTHS:
            await page.open(out / "report.html", width)
            assert await page.evaluate("return document.documentElement.scrollWidth") <= width
            assert await page.evaluate("return document.compatMode") == "CSS1Compat"
            await _figures_are_drawn(page)
            assert await page.log() == []
            assert await page.evaluate(_REQUESTED) == []
        await _tables_are_those_of_the_results(page, out)
        assert await page.evaluate("return document.querySelectorAll('h2').length") == 11
        # Names that look like markup are escaped.
        assert NAME in await page.evaluate("return document.querySelector('.claim').textContent")


async def test_contrast_in_light_and_dark(out: Path, tmp_path: Path) -> None:
    """The minimum contrast of text by WCAG 2.2 is 4.5, in pictures too."""
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    async with browser(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            await page.prefer(scheme)
            await page.open(out / "report.html", 1280)
            background = "luminance(getComputedStyle(document.body).backgroundColor)"
            dark = await page.evaluate(f"{_LUMINANCE} return {background} < 0.2")
            assert dark is (scheme == "dark")
            assert await page.evaluate(_LUMINANCE + _LEAST_CONTRAST) >= 4.5, scheme


_REQUESTED = (
    "return performance.getEntriesByType('resource').map(e => e.name)"
    ".filter(name => !name.startsWith('data:'))"
)
# Of every plot: its size, its smallest letters on screen, and the texts that are cut off.
_PLOTS = """
return [...document.querySelectorAll('svg.plot')].map(plot => {
  const box = plot.getBoundingClientRect();
  const scale = box.width / plot.viewBox.baseVal.width;
  const texts = [...plot.querySelectorAll('text')];
  const inside = e => {
    const b = e.getBoundingClientRect();
    return b.left >= box.left - 1 && b.right <= box.right + 1
      && b.top >= box.top - 1 && b.bottom <= box.bottom + 1;
  };
  return {
    name: plot.getAttribute('aria-label'), width: box.width, height: box.height,
    letters: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize) * scale)),
    outside: texts.filter(t => !inside(t)).map(t => t.textContent),
    marks: plot.querySelectorAll('use, path, image').length,
  };
});
"""
_LUMINANCE = """
const luminance = color => {
  const [r, g, b] = color.match(/[0-9.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
"""
_LEAST_CONTRAST = """
const page = luminance(getComputedStyle(document.body).backgroundColor);
const contrast = color => {
  const [low, high] = [page, luminance(color)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const texts = [...document.querySelectorAll('svg.plot text')].map(e => getComputedStyle(e).fill);
const others = [...document.querySelectorAll('p, li, td, th, h2, summary, figcaption, small')]
  .map(e => getComputedStyle(e).color);
return Math.min(...texts.concat(others).map(contrast));
"""


async def _figures_are_drawn(page: Page) -> None:
    plots = await page.evaluate(_PLOTS)
    assert len(plots) == NUM_PICTURES
    for plot in plots:
        assert plot["width"] > 250, plot
        assert plot["height"] > 180, plot
        assert plot["letters"] > 9, plot
        assert plot["outside"] == [], plot
        assert plot["marks"] > 10, plot


async def _tables_are_those_of_the_results(page: Page, out: Path) -> None:
    shown = await page.evaluate(
        "return [...document.querySelectorAll('#\\\\36 4-tokens-walk-matched tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    matches = _results(out, "64-tokens-walk")["matched"]["matches"]
    assert len(shown) == len(matches) == 3 * 6 * len(ALPHAS)
    for row, match in zip(shown, matches, strict=True):
        assert (int(row[0]), float(row[1]), row[2]) == (
            *(match["n"], match["alpha"], match["schedule"]),
        )
        assert float(row[6].split(" ")[0]) == pytest.approx(match["ratio"]["value"], rel=0.006)


def _results(out: Path, slug: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / "results" / f"{slug}.json").read_text("utf-8"))
    return results


def _analysis(prompts: list[Trajectories], reward: str = WALK) -> Analysis:
    return analyse(NAME, prompts, reward, alphas=ALPHAS)


def _read(page: str) -> str:
    """The text of the page, that of pictures included."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
