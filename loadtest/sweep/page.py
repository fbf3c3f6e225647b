"""The report: one HTML file that needs no network, for somebody who has not read the paper."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from loadtest.sweep import plots, words
from loadtest.sweep.figures import Cell, Estimate
from loadtest.sweep.plan import Condition
from loadtest.sweep.plots import NAMES, Drawn
from loadtest.sweep.results import Comparison, Results

_STYLE = Path(__file__).with_name("page.css")
_HEADINGS = {
    Condition.ALONE: "One request at a time",
    Condition.STEADY: "At a fixed rate",
    Condition.SATURATED: "At saturation",
}


def write_page(results: Results, path: Path) -> None:
    """Write the report."""
    path.write_text(page(results), "utf-8")


def page(results: Results) -> str:
    """The whole document."""
    sections = [
        _head(results),
        _section("How long an answer takes", words.latency(results), _latencies(results)),
        _section("Twice the candidates, sooner", words.comparison(results), []),
        _comparison_table(results),
        _section("What more candidates buy", words.reward(results), _rewards(results)),
        _section("Where the saving comes from", words.saving(results), _savings(results)),
        _section("Under load", words.load(results), _loads(results)),
        "<h2>All figures</h2>",
        *(_cells_table(results, condition) for condition in Condition),
        "<h2>How it was measured</h2>",
        _paragraphs(words.method(results)),
        _facts(words.facts(results)),
    ]
    return _document("\n".join(sections))


def _document(body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers would ask a server for an icon otherwise.
        '<link rel="icon" href="data:,">\n'
        f"<title>Latency against N</title>\n<style>\n{_STYLE.read_text('utf-8')}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(results: Results) -> str:
    partial = "" if results.is_whole else "<p class='warning'>Unfinished: blocks are missing.</p>"
    claim = f'<p class="claim">{words.claim(results)}</p>'
    return f"<h1>Latency against N</h1>{partial}{_paragraphs(words.introduction(results))}{claim}"


def _section(heading: str, text: Iterable[str], drawn: Iterable[Drawn]) -> str:
    figures = "\n".join(_figure(each) for each in drawn)
    grid = f'<div class="figures">{figures}</div>' if figures else ""
    return f"<h2>{heading}</h2>{_paragraphs(text)}{grid}"


def _figure(drawn: Drawn) -> str:
    heading = html.escape(drawn.heading)
    return f"<figure><figcaption>{heading}</figcaption>{drawn.legend}{drawn.picture}</figure>"


def _paragraphs(text: Iterable[str]) -> str:
    return "\n".join(f"<p>{paragraph}</p>" for paragraph in text)


def _latencies(results: Results) -> list[Drawn]:
    return [plots.latency(results, condition, heading) for condition, heading in _HEADINGS.items()]


def _rewards(results: Results) -> list[Drawn]:
    return [plots.reward(results), plots.reward_by_latency(results)]


def _savings(results: Results) -> list[Drawn]:
    slots = plots.slots(results)
    return [plots.tokens(results), plots.first_round(results), *([slots] if slots else [])]


def _loads(results: Results) -> list[Drawn]:
    return [plots.goodput(results), plots.good_share(results)]


def _comparison_table(results: Results) -> str:
    by_pair = {
        (each.n, each.best_of_n): each
        for each in results.comparisons
        if each.condition == Condition.ALONE.value
    }
    rows = [
        (str(n), *_compared(by_pair.get((n, n))), *_compared(by_pair.get((2 * n, n))))
        for n in results.settings.ns
    ]
    headings = (
        "Best-of-N's N",
        *("same N: latency, ratio (95 %)", "verdict", "tokens, ratio", "reward, difference"),
        *("twice the N: latency, ratio (95 %)", "verdict", "tokens, ratio", "reward, difference"),
    )
    caption = "Speculative Rejection against Best-of-N, one request at a time"
    return _table("comparison", caption, headings, rows)


def _compared(found: Comparison | None) -> tuple[str, ...]:
    if found is None:
        return ("", "", "", "")
    # Not "-0.000".
    reward = f"{round(found.reward, 3) + 0.0:+.3f}" if math.isfinite(found.reward) else ""
    return (_interval(found.latency), found.verdict, _number(found.tokens), reward)


def _cells_table(results: Results, condition: Condition) -> str:
    cells = [cell for cell in results.cells if cell.condition == condition.value]
    headings = (
        *("algorithm", "N", "requests", "p50 s (95 %)", "p90 s", "p95 s (95 %)", "p99 s"),
        *("first round s", "between rounds s", "tokens", "reward (95 %)", "complete"),
        *("scoring", "answers/s", "good/s", "in time", "unanswered"),
    )
    return _table(condition.value, _HEADINGS[condition], headings, map(_row, cells))


def _row(cell: Cell) -> tuple[str, ...]:
    unanswered = {code: count for code, count in cell.codes.items() if code != "OK"}
    return (
        NAMES[cell.algorithm],
        str(cell.n),
        str(cell.num_requests) + (f" ({cell.users} users)" if cell.users > 1 else ""),
        _interval(cell.p50),
        _number(cell.p90),
        _interval(cell.p95),
        _number(cell.p99),
        _number(cell.first_round.value),
        _number(cell.between_rounds.value),
        _number(cell.tokens.value),
        _interval(cell.reward),
        _percent(cell.complete_share),
        _percent(cell.score_share),
        _number(cell.answers_per_s),
        _number(cell.goodput_per_s),
        _percent(cell.good_share.value),
        ", ".join(f"{count} {code}" for code, count in unanswered.items()),
    )


def _table(name: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table" tabindex="0"><table id="{name}"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts
    )
    return f"<dl>{rows}</dl>"


def _interval(value: Estimate) -> str:
    if math.isnan(value.value):
        return ""
    if math.isinf(value.low) or math.isnan(value.low):
        return _number(value.value)
    return f"{_number(value.value)} ({_number(value.low)} to {_number(value.high)})"


def _number(value: float) -> str:
    """Three digits."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "never"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"
