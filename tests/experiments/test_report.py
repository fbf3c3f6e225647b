"""The report: its files, its words, and its page looked at by a real browser."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import report
from experiments.adaptive import as_table, compare
from experiments.replay import Setting
from experiments.report import words
from experiments.report.choices import choices
from experiments.studies.analysis import Analysis, analyse
from experiments.studies.live import Live, LiveRun
from experiments.studies.shortened import shortened
from experiments.sweep import sweep
from experiments.trajectories import Trajectories
from specrej.contracts import Schedule
from tests.experiments.synthetic import WALK, collection
from tests.loadtest.browser import CHROMIUM, DRIVER, Page, browser

PROMPTS = collection(9, 64, stop_share=0.4)
NAME = "64 <tokens>"
WIDTHS = (400, 768, 1280)
ALPHAS = (0.3, 0.5, 0.8)


def live() -> Live:
    runs = [
        LiveRun("p0", WALK, 64, algorithm, n, seconds, 10.0)
        for algorithm, n, seconds in (("best-of-n", 8, 4.0), ("speculative-rejection", 64, 2.0))
    ]
    return Live("an abacus", tuple(runs))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two lengths, both rewards."""
    folder = tmp_path_factory.mktemp("report")
    short = [shortened(each, 32) for each in PROMPTS]
    notes = {"machine": "an <abacus>"}
    written = report.write(
        [(NAME, PROMPTS), ("32", short)], folder, live(), notes=notes, alphas=ALPHAS
    )
    assert written == folder / "report.html"
    return folder


def test_files_are_where_they_are_said_to_be(out: Path) -> None:
    slugs = {"64-tokens-walk", "64-tokens-likelihood", "32-walk", "32-likelihood"}
    assert {path.stem for path in (out / "results").iterdir()} == slugs
    for folder, suffixes in (("figures", {".svg", ".png"}), ("tables", {".md", ".csv"})):
        stems: dict[str, set[str]] = {}
        for path in (out / folder).iterdir():
            stems.setdefault(path.stem, set()).add(path.suffix)
        assert len(stems) >= 4 * 9
        assert all(found == suffixes for found in stems.values())
    assert {path.name for path in out.iterdir() if path.is_file()} == {
        *("report.html", "summary.md", "summary.csv", "best_settings.md", "best_settings.csv")
    }


def test_the_summary_is_what_was_studied(out: Path) -> None:
    with (out / "summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["answers"], row["reward"]) for row in rows] == [
        *((NAME, WALK), (NAME, "likelihood"), ("32", WALK), ("32", "likelihood"))
    ]
    for row, slug in zip(rows, ("64-tokens-walk", "64-tokens-likelihood"), strict=False):
        matches = _results(out, slug)["matched"]["matches"]
        usual = next(
            each
            for each in matches
            if (each["n"], each["alpha"], each["schedule"]) == (64, 0.5, "from 16, x2")
        )
        assert float(row["tokens, ratio (95 %)"]) == usual["ratio"]["value"]
        assert float(row["tokens, ratio (95 %), low"]) == usual["ratio"]["low"]


def test_results_are_enough_to_draw_everything_again(out: Path) -> None:
    kept = _results(out, "64-tokens-walk")
    assert kept["facts"]["num_prompts"] == 9
    assert len(kept["sweep"]["points"]) == kept["facts"]["num_plans"]
    assert len(kept["correlation"]["decision_tokens"][0]["partial"]) == 250
    assert kept["perplexity"] is None
    assert _results(out, "64-tokens-likelihood")["perplexity"]["rows"]


def test_live_runs_are_in_their_study_alone(out: Path) -> None:
    assert len(_results(out, "64-tokens-walk")["improvement"]["timed"]) == 2
    assert _results(out, "32-walk")["improvement"]["timed"] == []
    assert (out / "figures" / "64-tokens-walk-improvement-seconds.svg").exists()
    assert not (out / "figures" / "32-walk-improvement-seconds.svg").exists()


def test_nothing_to_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none has no prompts"):
        report.write([("none", [])], tmp_path)


def test_choices_are_told_when_they_are_known(tmp_path: Path) -> None:
    settings = [Setting(64, alpha, Schedule(first=8), WALK) for alpha in (0.0, 0.3, 0.6)]
    rows = as_table(compare(PROMPTS, WALK, [Schedule(first=8)], 32))
    made = choices({WALK: sweep(PROMPTS, settings)}, {WALK: rows})
    (table,) = made.recommended
    assert str(table.rows[0][1]).startswith("N=64, alpha 0")
    assert table.rows[-1][1] in {"none", "N=64, alpha 0.6, geometric:8,2"}
    assert [row[0] for row in made.policies[0].rows] == ["risk", "price"]
    page = report.write([("few", PROMPTS[:4])], tmp_path, alphas=(0.5,), choices=made)
    text = page.read_text("utf-8")
    assert f"<b>By {WALK}.</b>" in text
    assert 'id="recommended-walk"' in text
    assert (tmp_path / "policies-walk.csv").exists()
    assert not re.search(r"\b(nan|inf|None)\b", _read(text))


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_few_prompts_make_a_page_too(tmp_path: Path, num_prompts: int) -> None:
    """Guards against intervals that are not there: NaN must never be read by anybody."""
    page = report.write([("few", PROMPTS[:num_prompts])], tmp_path, alphas=(0.5,)).read_text(
        "utf-8"
    )
    assert not re.search(r"\b(nan|inf|None)\b", _read(page))


def test_one_answer_to_a_prompt_makes_a_page_too(tmp_path: Path) -> None:
    lonely = [each.take([0, 1]) for each in PROMPTS]
    page = report.write([("two answers", lonely)], tmp_path, alphas=(0.5,)).read_text("utf-8")
    assert not re.search(r"\b(nan|inf|None)\b", _read(page))


def test_words_tell_the_figures(out: Path) -> None:
    found = _analysis(PROMPTS)
    usual = found.matched.default
    (said,) = words.claims([found])
    assert f"{usual.ratio.value:.3g} times" in said
    assert f"{found.matched.best.ratio.value:.3g} times" in said
    assert f"{found.facts.complete_share:.0%} of the answers end before" in words.reason(found)
    assert "3.2 at 128, 9.14 at 512, 16 at 1,024, 28.4 at 2,048" in words.reasons()[0]
    assert math.isfinite(found.matched.crossed)


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")
async def test_the_report_reads_well(out: Path, tmp_path: Path) -> None:
    """Guards against a page that errs, asks the network, runs over, or shows empty figures."""
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
        # Names that look like markup are shown, not obeyed.
        assert NAME in await page.evaluate("return document.querySelector('.claim').textContent")


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_report_can_be_read_in_light_and_dark(
    out: Path, tmp_path: Path, scheme: str
) -> None:
    """WCAG 2.2's least contrast of texts, in pictures too, is 4.5."""
    async with browser(tmp_path / "profile") as page:
        await page.prefer(scheme)
        await page.open(out / "report.html", 1280)
        dark = await page.evaluate(
            _LUMINANCE + "return luminance(getComputedStyle(document.body).backgroundColor) < 0.2"
        )
        assert dark is (scheme == "dark")
        assert await page.evaluate(_LUMINANCE + _LEAST_CONTRAST) >= 4.5


_REQUESTED = (
    "return performance.getEntriesByType('resource').map(e => e.name)"
    ".filter(name => !name.startsWith('data:'))"
)
# Of every plot: its size, the smallest letters as they are shown, and whether all of it is inside.
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
    assert len(plots) == 15 + 15 + 14 + 15
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
    assert len(shown) == len(matches) == 3 * 5 * len(ALPHAS)
    for row, match in zip(shown, matches, strict=True):
        assert (int(row[0]), float(row[1]), row[2]) == (
            *(match["n"], match["alpha"], match["schedule"]),
        )
        assert float(row[6].split(" ")[0]) == pytest.approx(match["ratio"]["value"], rel=0.006)


def _results(out: Path, slug: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((out / "results" / f"{slug}.json").read_text("utf-8"))
    return kept


def _analysis(prompts: list[Trajectories]) -> Analysis:
    return analyse(NAME, prompts, WALK, alphas=ALPHAS)


def _read(page: str) -> str:
    """What a reader sees, pictures left out but for their texts."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
