"""Writes all studies of some collections as files: charts, tables and an HTML page.

`write([frames, ...], Path("out"))` creates in `out`: report.html, which loads no other file;
summary and recommended, as .md and .csv; studies-*.md with all studies in few rows, small enough to
commit; figures/*.svg; tables/*.md and .csv.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments import charts
from experiments.frames import Frames
from experiments.frontier import AHEAD, Comparison, first_tokens, frontier, pays_from
from experiments.statistics import Estimate, shown
from experiments.studies import (
    BOUND,
    EXPECTED,
    RATIO,
    Study,
    best_of_n,
    correlation,
    equal_reward,
    improvement,
    second_judge,
)

_PROVENANCE = ("collected", "machine", "model")  # keys of the notes
_MAX_ROWS = 30  # of a compact table with a row per setting


def analyse(frames: Frames) -> list[Study]:
    """All studies of a collection under one reward, `matched` first."""
    of_settings = [equal_reward(frames), best_of_n(frames), first_tokens(frames)]
    more = (frontier, correlation, improvement, second_judge)
    return [*of_settings, *(study(frames) for study in more)]


def write(sets: Sequence[Frames], out: Path, notes: Mapping[str, str]) -> list[Study]:
    """Write all files; returns the summaries.

    notes: facts for the end of the page, such as machine, model and command.
    """
    for folder in ("figures", "tables"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    analysed = [(frames, analyse(frames)) for frames in sets]
    parts = []
    for frames, studies in analysed:
        slug = _slug(frames)
        measured = measured_by(notes, [frames])
        (out / f"studies-{slug}.md").write_text(_compact(frames, studies, measured), "utf-8")
        for study in studies:
            write_table(study, out / "tables" / f"{slug}-{study.name}", measured)
            pictures = []
            for chart in study.charts:
                svg = charts.svg(f"{slug}-{chart.name}", chart.title, chart.draw).encode()
                (out / "figures" / f"{slug}-{chart.name}.svg").write_bytes(svg)
                pictures.append((chart.title, b64encode(svg).decode()))
            parts.append((frames, study, pictures))
    summaries = [_summary(analysed), _recommended(analysed)]
    for study in summaries:
        write_table(study, out / study.name, measured_by(notes, sets))
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    templates.filters["html"] = _html
    page = templates.get_template("report.html.jinja").render(
        summaries=summaries, parts=parts, notes=notes
    )
    (out / "report.html").write_text(page, "utf-8")
    return summaries


def _slug(frames: Frames) -> str:
    name = f"{frames.collection} {frames.reward}".lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _summary(analysed: Sequence[tuple[Frames, Sequence[Study]]]) -> Study:
    """The default's alpha and schedule at each N: compute for equal reward, and what bounds it."""
    rows = []
    for frames, studies in analysed:
        first, matched = frames.default.iloc[0], studies[0].table
        of = matched[(matched["schedule"] == first.schedule) & (matched["alpha"] == first.alpha)]
        for _, default in of.iterrows():
            rows.append(
                {
                    "answers": frames.collection,
                    "reward": frames.reward,
                    "prompts": len(frames.prompts),
                    "N": int(default["N"]),
                    "mean length": float(frames.lengths.mean()),
                    "complete, share": float(np.mean([p.finished.mean() for p in frames.prompts])),
                    RATIO: default[RATIO],
                    "saved at equal N": default["tokens saved at equal N"],
                    "times part of N kept": default["part of N kept"],
                    EXPECTED: default[EXPECTED],
                    BOUND: default[BOUND],
                }
            )
    caption = "Best-of-N over Speculative Rejection at equal reward: the default"
    return Study("summary", caption, pd.DataFrame(rows))


def _recommended(analysed: Sequence[tuple[Frames, Sequence[Study]]]) -> Study:
    """What is recommended for the default's tokens."""
    rows = []
    for frames, studies in analysed:
        (first,) = (study.table for study in studies if study.name == "first_tokens")
        made = Comparison(frames.runs, frames.full).recommend(frames.default)
        rows.append(
            {
                "answers": frames.collection,
                "reward": frames.reward,
                "recommended for the default's tokens": made.chosen,
                "why": made.why,
                "the default's reward (95 %)": made.reward,
                "regret (95 %)": made.regret,
                AHEAD: made.ahead,
                "rejection pays from token": str(pays_from(first) or "none"),
            }
        )
    return Study("recommended", "Recommended settings", pd.DataFrame(rows))


def measured_by(notes: Mapping[str, str], sets: Sequence[Frames]) -> str:
    """A line above tables: date, machine, versions and model as far as noted, seeds and sizes."""
    noted = [f"{name} {notes[name]}" for name in _PROVENANCE if notes.get(name)]
    for frames in sets:
        seeds = [prompt.seed for prompt in frames.prompts]
        noted.append(
            f"{len(seeds)} prompts, N = {frames.n}, at most {frames.max_tokens:,} tokens, "
            f"seeds {min(seeds)} to {max(seeds)}"
        )
    return "Measured: " + "; ".join(dict.fromkeys(noted)) + "."


def _compact(frames: Frames, studies: Sequence[Study], measured: str) -> str:
    """All studies as Markdown of some kB; tables of settings have only the default's rows."""
    parts = [f"# {frames.collection}, by {frames.reward}\n", f"{measured}\n"]
    for study in studies:
        table, caption = study.table, study.caption
        if len(table) > _MAX_ROWS:
            first = frames.default.iloc[0]
            is_default = (table["N"] == first.n) & (table["schedule"] == first.schedule)
            table = table[is_default | (table["schedule"] == "no cuts")]
            caption += f"; of N = {first.n}, {first.schedule}, at every alpha"
        if not table.empty:
            parts.append(f"**{caption}**\n\n{markdown(table)}")
    return "\n".join(parts)


def write_table(study: Study, stem: Path, measured: str) -> None:
    """The table as .md, and as .csv with all digits, where an estimate takes three columns."""
    text = f"{measured}\n\n**{study.caption}**\n\n{markdown(study.table)}"
    stem.with_name(f"{stem.name}.md").write_text(text, "utf-8")
    columns = {}
    for heading, cells in _used(study.table).items():
        columns[heading] = [getattr(cell, "value", cell) for cell in cells]
        if any(isinstance(cell, Estimate) for cell in cells):
            for end in ("low", "high"):
                columns[f"{heading}, {end}"] = [getattr(cell, end, np.nan) for cell in cells]
    pd.DataFrame(columns).to_csv(stem.with_name(f"{stem.name}.csv"), index=False)


def markdown(table: pd.DataFrame) -> str:
    """The table without columns that have no values."""
    used = _used(table)
    rows = [list(used), ["---" if i == 0 else "---:" for i in range(len(used.columns))]]
    rows += used.map(shown).to_numpy().tolist()
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _used(table: pd.DataFrame) -> pd.DataFrame:
    is_used = [any(shown(cell) for cell in table[heading]) for heading in table]
    return table.loc[:, is_used] if len(table) else table


def _html(table: pd.DataFrame) -> Any:
    return Markup(_used(table).map(shown).to_html(index=False, border=0))
