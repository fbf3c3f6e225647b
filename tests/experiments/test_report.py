"""The report: its files, its words, and its page looked at by a real browser."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
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
from experiments.studies.statistics import Estimate
from experiments.studies.tables import shown
from experiments.sweep import sweep
from experiments.trajectories import PrefixScores, Trajectories
from specrej.contracts import Schedule
from tests.experiments.synthetic import COMPUTE, WALK, collection
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
    notes = {"collected": "2026-01-01", "machine": "an <abacus>", "command": "not to be told"}
    written = report.write(
        [(NAME, PROMPTS), ("32", short)],
        folder,
        live(),
        notes=notes,
        compute=lambda reward: COMPUTE,
        alphas=ALPHAS,
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
        *("report.html", "summary.md", "summary.csv", "best_settings.md", "best_settings.csv"),
        *(f"studies-{slug}.md" for slug in slugs),
    }


def test_what_is_kept_says_who_measured_it(out: Path) -> None:
    """Guards against committed figures of no machine, versions, date or seeds."""
    line = (
        "Measured: collected 2026-01-01; machine an <abacus>; machine of the timed runs an abacus; "
        "9 prompts, N = 64, at most 64 tokens, seeds 0 to 8000"
    )
    for kept in ("summary.md", "studies-64-tokens-walk.md", "tables/64-tokens-walk-sweep.md"):
        assert line in (out / kept).read_text("utf-8"), kept
    assert _results(out, "32-walk")["notes"]["machine"] == "an <abacus>"
    assert "at most 32 tokens" in (out / "summary.md").read_text("utf-8")


def test_every_study_is_kept_in_few_rows(out: Path) -> None:
    """Of settings, the default's N and schedule; what somebody commits must stay small."""
    text = (out / "studies-64-tokens-likelihood.md").read_text("utf-8")
    assert len(text) < 16_000
    tables = _analysis(PROMPTS, "likelihood").tables()
    assert len(tables) >= 9
    assert all(f"**{each.caption}" in text for each in tables if each.rows)
    of_sweep = text[text.index("**Speculative Rejection by") :].split("\n\n")[1].splitlines()[2:]
    assert len(of_sweep) == len(ALPHAS)
    assert all("| 64 |" in row and "| from 16, x2 |" in row for row in of_sweep)


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
    compared = {"reward": WALK, "n": 32, "max_tokens": 64, "prompts": 9, "rows": rows}
    made = choices({WALK: sweep(PROMPTS, settings)}, {WALK: compared})
    (table,) = made.recommended
    assert str(table.rows[0][1]).startswith("N=64, alpha 0")
    assert table.rows[-1][1] in {"none", "N=64, alpha 0.6, geometric:8,2"}
    (policies,) = made.policies
    assert [row[0] for row in policies.rows] == ["risk", "price"]
    assert "N = 32, at most 64 tokens, 9 prompts" in policies.caption
    assert "geometric:8,2" in policies.caption
    page = report.write([("few", PROMPTS[:4])], tmp_path, alphas=(0.5,), choices=made)
    text = page.read_text("utf-8")
    assert f"<b>By {WALK}.</b>" in text
    assert 'id="recommended-walk"' in text
    assert (tmp_path / "policies-walk.csv").exists()
    assert not re.search(r"\b(nan|inf|None)\b", _read(text))


@pytest.mark.parametrize(
    ("shift", "told", "shows"),
    [
        (0.0, "No gain shown over the best fixed alphas; gains of up to 0.05, the", "no"),
        (0.1, "risk 0.2 with geometric:8,2 is better", "yes"),
    ],
)
def test_the_verdict_is_of_the_best_knob_and_its_interval(
    shift: float, told: str, shows: str
) -> None:
    """Guards against "does not help", where it could not be seen whether it does."""
    rows = [
        {
            **{"policy": "risk", "schedule": "geometric:8,2", "knob": knob, "cost": 0.3},
            **{"regret": 0.1, "fixed_regret": 0.1 + gain, "gain": gain + shift},
            **{"gain_low": gain - 0.03 + shift, "gain_high": gain + 0.03 + shift},
            **{"best": gain > 0, "wins": gain - 0.03 + shift > 0},
        }
        for knob, gain in ((0.2, 0.02), (0.4, -0.5))
    ]
    compared = {"reward": WALK, "n": 64, "max_tokens": 128, "prompts": 20, "rows": rows}
    made = choices({}, {WALK: compared})
    assert told in made.verdicts[0]
    (row,) = made.policies[0].rows
    assert (row[2], row[7]) == (0.2, shows)
    assert shown(row[6]) == shown(Estimate(0.02 + shift, -0.01 + shift, 0.05 + shift))


def test_flops_are_told_with_whose_they_are_or_not_at_all(out: Path, tmp_path: Path) -> None:
    """Guards against those of the embedded models, whatever wrote the answers."""
    page = _read((out / "report.html").read_text("utf-8"))
    assert "FLOPs are those of a model of 2 layers." in page
    unknown = report.write([("few", PROMPTS[:4])], tmp_path, alphas=(0.5,)).read_text("utf-8")
    assert "FLOPs are left out" in _read(unknown)
    assert "relative FLOPs" not in unknown
    assert "FLOPs, ratio" not in unknown
    assert not list((tmp_path / "figures").glob("*flops*"))
    assert "FLOPs" not in (tmp_path / "summary.md").read_text("utf-8")


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
    assert f"saves {usual.expected:.3g} times" in words.reason(found)
    assert "settled" not in words.reason(found)
    assert "3.2 at 128, 9.14 at 512, 16 at 1,024, 28.4 at 2,048" in words.reasons()[0]
    assert math.isfinite(found.matched.crossed)


def test_a_reward_that_reads_a_part_is_found_out_by_its_scores() -> None:
    """Guards against praising rejection for what a reward cannot see: from token 16 on, nothing
    changes; at 64 tokens that is a quarter of what the longest answers cost."""
    reads = 16
    prompts = []
    for each in PROMPTS:
        kept = each.rewards[WALK]
        column = list(each.positions).index(reads)
        partial, final = kept.partial.copy(), kept.final.copy()
        reached = each.num_tokens >= reads
        final[reached] = partial[reached, column]
        for later in range(column, len(each.positions)):
            alive = each.num_tokens >= each.positions[later]
            partial[alive, later] = final[alive]
        prompts.append(replace(each, rewards={WALK: PrefixScores(partial, final)}))
    assert "Scores are settled by token 16 " in words.reason(_analysis(prompts))


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


def _analysis(prompts: list[Trajectories], reward: str = WALK) -> Analysis:
    return analyse(NAME, prompts, reward, alphas=ALPHAS)


def _read(page: str) -> str:
    """What a reader sees, pictures left out but for their texts."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
