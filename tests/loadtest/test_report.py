"""The page of a sweep, looked at by a real browser."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.sweep.page import write_page
from loadtest.sweep.results import Results, to_json
from tests.loadtest.browser import CHROMIUM, DRIVER, Page, browser
from tests.loadtest.sweeps import made_up

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
WIDTHS = (400, 768, 1280)


@pytest.fixture
def results() -> Results:
    return made_up()


async def test_the_report_reads_well(results: Results, tmp_path: Path) -> None:
    """Guards against a page that errs, asks the network, runs over, or shows empty figures."""
    report = tmp_path / "report.html"
    write_page(results, report)
    async with browser(tmp_path / "profile") as page:
        for width in WIDTHS:
            await page.open(report, width)
            assert await page.evaluate("return document.documentElement.scrollWidth") <= width
            assert await page.evaluate("return document.compatMode") == "CSS1Compat"
            await _figures_are_drawn(page)
            assert await page.log() == []
            assert await page.evaluate(_REQUESTED) == []
        assert await page.evaluate("return document.querySelectorAll('figure').length") == 10
        await _tables_are_those_of_the_json(page, results)


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
    width: box.width, height: box.height,
    letters: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize) * scale)),
    outside: texts.filter(t => !inside(t)).map(t => t.textContent),
    lines: [...plot.querySelectorAll('polyline')].filter(
      l => l.getBoundingClientRect().width > 0 || l.getBoundingClientRect().height > 0).length,
    odd: /NaN|Infinity|undefined/.test(plot.outerHTML.replace(/<title>.*?<\\/title>/g, '')),
  };
});
"""


async def _figures_are_drawn(page: Page) -> None:
    for plot in await page.evaluate(_PLOTS):
        assert plot["width"] > 250, plot
        assert plot["height"] > 180, plot
        assert plot["letters"] > 9, plot
        assert plot["lines"] >= 2, plot
        assert plot["outside"] == [], plot
        assert not plot["odd"], plot


async def _tables_are_those_of_the_json(page: Page, results: Results) -> None:
    cells: list[Any] = json.loads(json.dumps(to_json(results)))["cells"]
    rows = {
        condition: await page.evaluate(
            f"return [...document.querySelectorAll('#{condition} tbody tr')]"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )
        for condition in ("alone", "steady", "saturated")
    }
    shown = [row for condition in rows.values() for row in condition]
    assert len(shown) == len(cells)
    for row, cell in zip(shown, cells, strict=True):
        assert (int(row[1]), int(row[2].split()[0])) == (cell["n"], cell["num_requests"])
        for column, name in ((3, "p50"), (5, "p95"), (9, "tokens"), (10, "reward")):
            _same(row[column], cell[name]["value"])


def _same(shown: str, value: float | None) -> None:
    """As much of it as is shown."""
    first = shown.split(" ")[0].replace(",", "")
    if value is None:
        assert first in ("", "never")
    else:
        assert math.isclose(float(first), value, rel_tol=0.006, abs_tol=0.5 if value > 1e3 else 0)
