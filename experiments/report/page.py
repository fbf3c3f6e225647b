"""The report: one HTML file that needs no network, for somebody who has not read the paper."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.figures.gallery import Gallery
from experiments.figures.plotting import Picture
from experiments.report import words
from experiments.report.choices import Choices
from experiments.report.summary import summary
from experiments.studies.analysis import Analysis
from experiments.studies.tables import Result, Table, known, shown

_STYLE = Path(__file__).with_name("page.css")
_TITLE = "Speculative Rejection, measured"
_WIDE = 3  # pictures that fill a row of their own


@dataclass(frozen=True, slots=True)
class _Study:
    """A section: its text, and where its pictures, its result and its findings are."""

    heading: str
    text: Sequence[str]
    pictures: Callable[[Gallery], Sequence[Picture]]
    result: Callable[[Analysis], Result | None]
    found: Callable[[Analysis], str] = lambda analysis: ""


def page(
    analyses: Sequence[Analysis],
    galleries: Sequence[Gallery],
    notes: Mapping[str, str],
    choices: Choices | None = None,
) -> str:
    """The whole document."""
    each = list(zip(analyses, galleries, strict=True))
    body = "\n".join(
        [
            _head(analyses),
            *(_section(study, each) for study in _studies(analyses[0])),
            *(_choices(choices) if choices else ()),
            _heading("How it was measured", "method"),
            _paragraphs(words.method()),
            _facts(notes),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Browsers would ask a server for an icon otherwise.
        '<link rel="icon" href="data:,">\n'
        f"<title>{_TITLE}</title>\n<style>\n{_STYLE.read_text('utf-8')}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _choices(choices: Choices) -> list[str]:
    """What to take, and whether to let alpha be found."""
    return [
        _heading("Which setting to take", "which-setting-to-take"),
        _paragraphs(words.recommended()),
        *(_table(table, "") for table in choices.recommended),
        _heading("An alpha of its own for every round", "adaptive"),
        _paragraphs(words.adaptive()),
        _list(choices.verdicts),
        *(_table(table, "") for table in choices.policies),
    ]


def _head(analyses: Sequence[Analysis]) -> str:
    return "\n".join(
        [
            f"<h1>{_TITLE}</h1>",
            _paragraphs(words.introduction()),
            '<div class="claim">',
            f"<p>{words.claim(analyses)}</p>",
            _list(words.claims(analyses)),
            "</div>",
            _heading("Why it is not more", "why"),
            _paragraphs(words.reasons()),
            _list(map(words.reason, analyses)),
            *(_table(table, "") for table in summary(analyses)),
        ]
    )


def _studies(first: Analysis) -> tuple[_Study, ...]:
    """In the order of the page. Some texts name a figure that all collections share."""
    return (*_gains(), *_reasons(first))


def _gains() -> tuple[_Study, ...]:
    """What is saved, and what is lost."""
    return (
        _Study(
            "Equal reward, fewer tokens",
            words.matched(),
            lambda gallery: gallery.matched,
            lambda analysis: analysis.matched,
        ),
        _Study(
            "Which answers end early",
            words.lengths(),
            lambda gallery: (),
            lambda analysis: analysis.lengths,
            words.lengths_found,
        ),
        _Study(
            "What more answers buy",
            words.best_of_n(),
            lambda gallery: gallery.best_of_n,
            lambda analysis: analysis.best_of_n,
            words.best_of_n_found,
        ),
        _Study(
            "How many to reject, and when",
            words.sweep(),
            lambda gallery: gallery.sweep,
            lambda analysis: analysis.sweep,
            words.sweep_found,
        ),
    )


def _reasons(first: Analysis) -> tuple[_Study, ...]:
    """Why, and where not."""
    return (
        _Study(
            "What a beginning tells",
            words.correlation(),
            lambda gallery: gallery.correlation,
            lambda analysis: analysis.correlation,
            words.correlation_found,
        ),
        _Study(
            "The most probable answer",
            words.perplexity(),
            lambda gallery: gallery.perplexity,
            lambda analysis: analysis.perplexity,
        ),
        _Study(
            "Score against compute",
            words.improvement(first),
            lambda gallery: gallery.improvement,
            lambda analysis: analysis.improvement,
            words.improvement_found,
        ),
        _Study(
            "Memory, batch and rewards",
            words.anatomy(),
            lambda gallery: gallery.anatomy,
            lambda analysis: analysis.anatomy,
            words.anatomy_found,
        ),
        _Study(
            "Where it fails",
            words.failures(),
            lambda gallery: gallery.failures,
            lambda analysis: analysis.failures,
            words.failures_found,
        ),
    )


def _section(study: _Study, each: Sequence[tuple[Analysis, Gallery]]) -> str:
    """What is asked, and what came out for every collection and reward; nothing if for none."""
    known = [(analysis, gallery) for analysis, gallery in each if study.result(analysis)]
    if not known:
        return ""
    found = [(words.of(analysis), study.found(analysis)) for analysis, _ in known]
    rows = [
        [_figure(picture, words.of(analysis)) for picture in study.pictures(gallery)]
        for analysis, gallery in known
    ]
    parts = [
        _heading(study.heading, study.heading.lower().replace(" ", "-").replace(",", "")),
        _paragraphs(study.text),
        _list(f"<b>{of}.</b> {text}" for of, text in found if text),
        *map(_grid, rows if max(map(len, rows)) >= _WIDE else _by_kind(rows)),
        *(_tables(study.result(analysis), analysis) for analysis, _ in known),
    ]
    return "\n".join(parts)


def _tables(result: Result | None, analysis: Analysis) -> str:
    tables = result.tables() if result else ()
    return "\n".join(_folded(table, words.of(analysis), analysis.slug) for table in tables)


def _list(items: Iterable[str]) -> str:
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{listed}</ul>" if listed else ""


def _heading(text: str, name: str) -> str:
    return f'<h2 id="{name}">{html.escape(text)}</h2>'


def _by_kind(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """One grid: the first picture of each, then the second of each."""
    kinds = itertools.zip_longest(*rows, fillvalue="")
    return [[picture for kind in kinds for picture in kind if picture]]


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def _figure(picture: Picture, of: str) -> str:
    heading, title = html.escape(picture.heading), html.escape(picture.title, quote=True)
    inline = picture.inline.replace("<svg", f'<svg aria-label="{title}"', 1)
    return f"<figure><figcaption>{heading}<small>{of}</small></figcaption>{inline}</figure>"


def _paragraphs(text: Iterable[str]) -> str:
    return "\n".join(f"<p>{paragraph}</p>" for paragraph in text)


def _folded(table: Table, of: str, slug: str) -> str:
    """Behind a line to click on: figures first."""
    line = f"{of}: {html.escape(table.caption)}, {len(table.rows)} rows"
    folded = f"<details><summary>{line}</summary>{_table(table, slug)}</details>"
    return folded if table.rows else ""


def _table(table: Table, slug: str) -> str:
    name, table = "-".join(filter(None, (slug, table.name))), known(table)
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in table.headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(shown(cell))}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="table" tabindex="0"><table id="{name}">'
        f"<caption>{html.escape(table.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _facts(notes: Mapping[str, str]) -> str:
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in notes.items()
    )
    return f"<dl>{rows}</dl>" if rows else ""
