"""Writes all studies of some collections as files: charts, tables and an HTML page.

`write([("128 tokens", trajectories)], Path("out"))` creates in `out`: report.html, which loads no
other file; summary and recommended, as .md and .csv; studies-*.md with all studies in few rows,
small enough to commit; figures/*.svg; tables/*.md and .csv; results/*.json with all results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.figures import charts
from experiments.flops import UNKNOWN, ComputeModel
from experiments.report.page import page
from experiments.report.summary import TIMED, compact, measured_by, summary
from experiments.studies.analysis import analyse
from experiments.studies.improvement import Live, read_live
from experiments.studies.plans import ALPHAS
from experiments.studies.tables import Table, to_csv, to_json, to_markdown
from experiments.trajectories import Trajectories

__all__ = ["write"]

Collection = tuple[str, Sequence[Trajectories]]


def write(
    sets: Sequence[Collection],
    out: Path,
    live: Live | Path | None = None,
    *,
    notes: Mapping[str, str] | None = None,
    compute: Callable[[str], ComputeModel] = lambda reward: UNKNOWN,
    alphas: Sequence[float] = ALPHAS,
) -> Path:
    """Study every collection under every reward that it has; returns the page's path.

    live: timed runs, or their file (`experiments.live`). notes: facts for the end of the page, such
    as machine, model and command. compute: the models for which FLOPs are counted, by reward.
    alphas: those that are replayed.

    Raises:
        ValueError: a collection is empty, or `live` is not a file of live runs.
    """
    timed = read_live(live) if isinstance(live, Path) else live
    notes = {**(notes or {}), **({TIMED: timed.machine} if timed else {})}
    runs = timed.runs if timed else ()
    analyses = [
        analyse(name, prompts, reward, runs, compute(reward), alphas)
        for name, prompts in sets
        for reward in _shared_rewards(name, prompts)
    ]
    pictures = [charts.draw(analysis) for analysis in analyses]
    for folder in ("figures", "tables", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    measured = measured_by(notes, analyses)
    for picture in (figure for drawn in pictures for study in drawn.values() for figure in study):
        (out / "figures" / f"{picture.name}.svg").write_text(picture.svg, "utf-8")
    for analysis in analyses:
        for table in analysis.tables():
            _write_table(table, out / "tables" / f"{analysis.slug}-{table.name}", measured)
        results = json.dumps({"notes": notes} | to_json(analysis), ensure_ascii=False)
        (out / "results" / f"{analysis.slug}.json").write_text(results + "\n", "utf-8")
        text = compact(analysis, measured_by(notes, [analysis]))
        (out / f"studies-{analysis.slug}.md").write_text(text, "utf-8")
    summaries = summary(analyses)
    for table in summaries:
        _write_table(table, out / table.name, measured)
    path = out / "report.html"
    path.write_text(page(analyses, pictures, summaries, notes), "utf-8")
    return path


def _shared_rewards(name: str, prompts: Sequence[Trajectories]) -> tuple[str, ...]:
    if not prompts:
        raise ValueError(f"{name} has no prompts")
    first, *others = (prompt.reward_names for prompt in prompts)
    return tuple(reward for reward in first if all(reward in names for names in others))


def _write_table(table: Table, stem: Path, measured: str) -> None:
    stem.with_name(f"{stem.name}.md").write_text(f"{measured}\n\n{to_markdown(table)}", "utf-8")
    stem.with_name(f"{stem.name}.csv").write_text(to_csv(table), "utf-8")
