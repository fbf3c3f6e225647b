"""Tables over all studies: compute for equal reward, recommendations, and compact tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

from experiments.studies.analysis import Analysis
from experiments.studies.matched import BOUND, EXPECTED
from experiments.studies.tables import Table, to_markdown

TIMED = "machine of the timed runs"
_PROVENANCE = ("collected", "machine", "model", TIMED)  # keys of the report's notes
_MAX_ROWS = 30  # of a compact table with a row per setting


def summary(analyses: Sequence[Analysis]) -> tuple[Table, Table]:
    """The service's default, and what is recommended for its tokens by each objective."""
    answers = {"answers": "collection", "reward": "reward"}
    default = {
        **answers,
        "prompts": "facts.num_prompts",
        "N": "matched.default.n",
        "mean length": "facts.mean_tokens",
        "complete, share": "facts.complete_share",
        "tokens, ratio (95 %)": "matched.default.ratio",
        "saved at equal N": "matched.default.saving",
        "times part of N kept": "matched.default.kept",
        EXPECTED: "matched.default.expected",
        BOUND: "matched.default.bound_full",
        "FLOPs, ratio (95 %)": "matched.default.flops_ratio",
        "the service's choice is complete, share (95 %)": "matched.default.complete",
        "Best-of-N's choice, same N (95 %)": "matched.default.full_complete",
    }
    recommended = {
        **{heading: f"analysis.{path}" for heading, path in answers.items()},
        "objective": "side.objective",
        "recommended for the default's tokens": "side.recommended",
        "why": "side.reason",
        "the default's reward (95 %)": "side.default.reward",
        "regret (95 %)": "side.default.regret",
        "ahead of Best-of-N at equal tokens (95 %)": "side.default.ahead",
        "rejection pays from token": lambda row: str(row.pays_from or "none"),
    }
    rows = [
        SimpleNamespace(analysis=analysis, side=side, pays_from=pays_from)
        for analysis in analyses
        for side, pays_from in zip(
            analysis.frontier.sides, analysis.frontier.pays_from, strict=True
        )
    ]
    caption = "Best-of-N over Speculative Rejection at equal reward, complete or not: the default"
    return (
        Table.of("summary", caption, analyses, default),
        Table.of("recommended", "Recommended settings, by objective", rows, recommended),
    )


def measured_by(notes: Mapping[str, str], analyses: Sequence[Analysis]) -> str:
    """A line above tables: date, machine, versions and model as far as noted, seeds and sizes."""
    noted = [f"{name} {notes[name]}" for name in _PROVENANCE if notes.get(name)]
    noted += (
        f"{facts.num_prompts} prompts, N = {facts.n}, at most {facts.max_tokens:,} tokens, "
        f"seeds {min(facts.seeds)} to {max(facts.seeds)}"
        for facts in (analysis.facts for analysis in analyses)
    )
    return "Measured: " + "; ".join(dict.fromkeys(noted)) + "."


def compact(analysis: Analysis, measured: str) -> str:
    """All studies as Markdown of some kB; tables of settings have only the default's rows."""
    tables = (_default_rows(table, analysis) for table in analysis.tables() if table.rows)
    heading = f"# {analysis.collection}, by {analysis.reward}\n"
    return "\n".join([heading, f"{measured}\n", *map(to_markdown, tables)])


def _default_rows(table: Table, analysis: Analysis) -> Table:
    """The default's N and schedule at every alpha, and Best-of-N."""
    if len(table.rows) <= _MAX_ROWS or "schedule" not in table.headings:
        return table
    default = analysis.matched.default
    n, schedule = (table.headings.index(name) for name in ("N", "schedule"))
    rows = tuple(
        row
        for row in table.rows
        if row[schedule] == "no cuts" or (row[n], row[schedule]) == (default.n, default.schedule)
    )
    caption = f"{table.caption}; of N = {default.n}, {default.schedule}, at every alpha"
    return replace(table, caption=caption, rows=rows)
