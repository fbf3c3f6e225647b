"""What to take away as two tables: compute for equal reward, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.analysis import Analysis
from experiments.studies.matched import BOUND, EXPECTED, Match
from experiments.studies.tables import Cell, Table


def summary(analyses: Sequence[Analysis]) -> tuple[Table, Table]:
    """A row per collection and reward: of the service's default, and of the best setting."""
    return (_usual(analyses), _best(analyses))


def setting(match: Match) -> str:
    """In a few words."""
    return f"N = {match.n}, alpha {match.alpha:g}, {match.schedule}"


def _usual(analyses: Sequence[Analysis]) -> Table:
    headings = (
        *("answers", "reward", "prompts", "N", "mean length", "complete, share"),
        *("tokens, ratio (95 %)", "saved at equal N", "times part of N kept"),
        *(EXPECTED, BOUND, "FLOPs, ratio (95 %)"),
        *("the service's choice is complete, share", "Best-of-N's choice, same N"),
    )
    rows = [_usual_row(each) for each in analyses]
    caption = "Best-of-N over Speculative Rejection at equal reward: the service's default"
    return Table("summary", caption, headings, tuple(rows))


def _usual_row(analysis: Analysis) -> tuple[Cell, ...]:
    facts, usual = analysis.facts, analysis.matched.default
    return (
        *(analysis.collection, analysis.reward, facts.num_prompts, usual.n),
        *(facts.mean_tokens, facts.complete_share, usual.ratio, usual.saving, usual.kept),
        *(usual.expected, usual.bound_full, usual.flops_ratio),
        *(usual.complete, usual.full_complete),
    )


def _best(analyses: Sequence[Analysis]) -> Table:
    headings = (
        *("answers", "reward", "best setting", "tokens, ratio (95 %)", "FLOPs, ratio (95 %)"),
        *("as good as Best-of-N with N = (95 %)", "chosen on one half, measured on the other"),
    )
    rows = [
        (
            *(each.collection, each.reward, setting(each.matched.best), each.matched.best.ratio),
            *(each.matched.best.flops_ratio, each.matched.best.matched_n, each.matched.crossed),
        )
        for each in analyses
    ]
    caption = "Best-of-N over Speculative Rejection at equal reward: the best setting"
    return Table("best_settings", caption, headings, tuple(rows))
