"""All studies of some collections as files: figures, tables, and a page that explains them.

    write([("128 tokens", trajectories)], Path("out"))

leaves in `out`: report.html, which needs nothing else; summary.md and .csv; studies-*.md, every
study in few rows, small enough to commit; figures/*.png and .svg; tables/*.md and .csv;
results/*.json, from which all of it can be drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.figures import gallery
from experiments.figures.gallery import Gallery
from experiments.report.brief import TIMED, brief, measured_by
from experiments.report.choices import Choices
from experiments.report.page import page
from experiments.report.summary import summary
from experiments.studies import live as live_runs
from experiments.studies.analysis import Analysis, analyse
from experiments.studies.compute import UNKNOWN, ComputeModel
from experiments.studies.live import Live
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
    compute: Callable[[str], ComputeModel] | None = None,
    alphas: Sequence[float] = ALPHAS,
    choices: Choices | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Study every collection under every reward it has; returns the page's path.

    live: timed runs, or their file (`experiments.studies.live`). notes: facts for the page's end,
    such as machine, model and command; date, machine and model head tables too.
    compute: FLOPs by reward; left out otherwise. alphas: those that are swept.
    choices: of settings and policies, if they were compared.

    Raises:
        ValueError: a collection is empty, or `live` is no such file.
    """
    timed = live_runs.read(live) if isinstance(live, Path) else live
    analyses = [
        analyse(
            *(name, prompts, reward),
            live=timed.of(reward, prompts[0].max_tokens) if timed else (),
            compute=compute(reward) if compute else UNKNOWN,
            alphas=alphas,
            say=say,
        )
        for name, prompts in sets
        for reward in _rewards(name, prompts)
    ]
    galleries = [gallery.draw(each) for each in analyses]
    shown = dict(notes or {})
    if timed:
        shown[TIMED] = timed.machine
    report = _files(analyses, galleries, out, choices, shown)
    report.write_text(page(analyses, galleries, shown, choices), "utf-8")
    return report


def _rewards(name: str, prompts: Sequence[Trajectories]) -> tuple[str, ...]:
    """Those that all prompts have."""
    if not prompts:
        raise ValueError(f"{name} has no prompts")
    first, *others = (each.reward_names for each in prompts)
    return tuple(reward for reward in first if all(reward in names for names in others))


def _files(
    analyses: Sequence[Analysis],
    galleries: Sequence[Gallery],
    out: Path,
    choices: Choices | None,
    notes: Mapping[str, str],
) -> Path:
    """All but the page itself; returns where that belongs."""
    for folder in ("figures", "tables", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    by = measured_by(notes, analyses)
    for analysis, drawn in zip(analyses, galleries, strict=True):
        for each in drawn.all():
            (out / "figures" / f"{each.name}.svg").write_text(each.svg, "utf-8")
            (out / "figures" / f"{each.name}.png").write_bytes(each.png)
        for table in analysis.tables():
            _table(table, out / "tables" / f"{analysis.slug}-{table.name}", by)
        own = measured_by(notes, [analysis])
        (out / f"studies-{analysis.slug}.md").write_text(brief(analysis, own), "utf-8")
        results = json.dumps({"notes": dict(notes)} | to_json(analysis), ensure_ascii=False)
        (out / "results" / f"{analysis.slug}.json").write_text(results + "\n", "utf-8")
    chosen = (*choices.recommended, *choices.policies) if choices else ()
    for table in (*summary(analyses), *chosen):
        _table(table, out / table.name, by)
    return out / "report.html"


def _table(table: Table, stem: Path, by: str) -> None:
    stem.with_name(stem.name + ".md").write_text(f"{by}\n\n{to_markdown(table)}", "utf-8")
    stem.with_name(stem.name + ".csv").write_text(to_csv(table), "utf-8")
