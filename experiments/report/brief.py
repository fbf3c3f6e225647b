"""What is kept of a result set beside its summary: every study in few rows, and who measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.studies.analysis import Analysis, Facts
from experiments.studies.matched import Match
from experiments.studies.tables import Table, to_markdown

TIMED = "machine of the timed runs"
_WHO = ("collected", "machine", "model", TIMED)  # of the report's notes
_MOST_ROWS = 30  # of a table with a row per setting


def measured_by(notes: Mapping[str, str], analyses: Sequence[Analysis]) -> str:
    """A line above results: date, machine, versions and model, as far as noted; seeds and sizes."""
    noted = (f"{name} {notes[name]}" for name in _WHO if notes.get(name))
    sizes = dict.fromkeys(_sizes(each.facts) for each in analyses)
    return "Measured: " + "; ".join([*noted, *sizes]) + "."


def _sizes(facts: Facts) -> str:
    first, last = min(facts.seeds), max(facts.seeds)
    return (
        f"{facts.num_prompts} prompts, N = {facts.n}, at most {facts.max_tokens:,} tokens, "
        f"seeds {first} to {last}"
    )


def brief(analysis: Analysis, by: str) -> str:
    """Markdown of some kB; of tables with a row per setting, those of the service's default."""
    tables = (_few(each, analysis.matched.default) for each in analysis.tables() if each.rows)
    heading = f"# {analysis.collection}, by {analysis.reward}\n"
    return "\n".join([heading, f"{by}\n", *map(to_markdown, tables)])


def _few(table: Table, usual: Match) -> Table:
    """At any alpha, the default's N and schedule, and Best-of-N."""
    if len(table.rows) <= _MOST_ROWS or "schedule" not in table.headings:
        return table
    n, schedule = (table.headings.index(name) for name in ("N", "schedule"))
    rows = tuple(
        row
        for row in table.rows
        if row[schedule] == "no cuts" or (row[n], row[schedule]) == (usual.n, usual.schedule)
    )
    caption = f"{table.caption}; of N = {usual.n}, {usual.schedule}, at every alpha"
    return replace(table, caption=caption, rows=rows)
