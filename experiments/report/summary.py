"""Tables over all studies: compute for equal reward, recommended settings, and compact tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.studies.analysis import Analysis
from experiments.studies.matched import BOUND, EXPECTED
from experiments.studies.tables import Cell, Table, to_markdown
from experiments.sweep import NothingFits, Swept, Target, recommend

TIMED = "machine of the timed runs"
_PROVENANCE = ("collected", "machine", "model", TIMED)  # keys of the report's notes
_MAX_ROWS = 30  # of a compact table with a row per setting
_REGRETS = (0.02, 0.05, 0.1)
_COSTS = (0.05, 0.1, 0.2)


def summary(analyses: Sequence[Analysis]) -> tuple[Table, Table]:
    """The service's default and the best setting: a row per collection and reward."""
    answers = {"answers": "collection", "reward": "reward"}
    caption = "Best-of-N over Speculative Rejection at equal reward: the"
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
        "the service's choice is complete, share": "matched.default.complete",
        "Best-of-N's choice, same N": "matched.default.full_complete",
    }
    best = {
        **answers,
        "best setting": "matched.best.setting",
        "tokens, ratio (95 %)": "matched.best.ratio",
        "FLOPs, ratio (95 %)": "matched.best.flops_ratio",
        "as good as Best-of-N with N = (95 %)": "matched.best.matched_n",
        "chosen on one half, measured on the other": "matched.crossed",
    }
    return (
        Table.of("summary", f"{caption} service's default", analyses, default),
        Table.of("best_settings", f"{caption} best setting", analyses, best),
    )


def recommended(reward: str, swept: Sequence[Swept]) -> Table:
    """The settings that a sweep recommends for some targets."""
    targets = [(f"regret at most {limit:g}", Target(regret=limit)) for limit in _REGRETS]
    targets += [(f"cost at most {limit:g}", Target(cost=limit)) for limit in _COSTS]
    headings = (
        *("wanted", "setting", "regret (95 %)", "cost (95 %)", "tokens (95 %)"),
        *("regret, on prompts left out", "cost, there", "tokens, there", "chosen again in"),
    )
    rows = tuple(_recommended(name, swept, target) for name, target in targets)
    caption = f"Of {len(swept)} settings, by {reward}"
    return Table(f"recommended-{reward}", caption, headings, rows)


def _recommended(name: str, swept: Sequence[Swept], target: Target) -> tuple[Cell, ...]:
    try:
        best = recommend(swept, target)
    except NothingFits:
        return (name, "none", *[math.nan] * 6, "")
    held_out = (best.held_out_regret, best.held_out_cost, best.held_out_tokens)
    estimates = (best.regret, best.cost, best.tokens)
    return (name, best.chosen.name, *estimates, *held_out, f"{best.same_choice:.0%}")


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
