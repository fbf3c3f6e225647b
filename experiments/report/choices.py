"""What to take from the sweeps and from the comparison of policies, as tables for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import recommend
from experiments.recommend import NothingFits, Recommendation, Target
from experiments.studies.statistics import Estimate
from experiments.studies.tables import Cell, Table
from experiments.sweep import Swept

_REGRETS = (0.02, 0.05, 0.1)
_BUDGETS = (0.05, 0.1, 0.2)  # of the tokens of Best-of-N with all candidates

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Choices:
    """Of each reward a table of recommended settings, a verdict on adaptive alphas and a table."""

    recommended: tuple[Table, ...]
    verdicts: tuple[str, ...]
    policies: tuple[Table, ...]


def choices(sweeps: Mapping[str, Sequence[Swept]], policies: Mapping[str, Rows]) -> Choices:
    """By reward: what `sweep` and `policy` wrote."""
    return Choices(
        tuple(_recommended(reward, swept) for reward, swept in sweeps.items()),
        tuple(_verdict(reward, rows) for reward, rows in policies.items()),
        tuple(_policies(reward, rows) for reward, rows in policies.items()),
    )


def _recommended(reward: str, swept: Sequence[Swept]) -> Table:
    # A setting's tokens over its cost are those of Best-of-N with everybody.
    whole = float(np.mean(swept[0].tokens / swept[0].costs))
    targets = [(f"regret at most {each:g}", Target(regret=each)) for each in _REGRETS]
    targets += [
        (f"at most {part:.0%} of the tokens", Target(tokens=part * whole)) for part in _BUDGETS
    ]
    headings = (
        *("wanted", "setting", "regret (95 %)", "cost (95 %)", "tokens (95 %)"),
        *("regret, on prompts left out", "chosen again in"),
    )
    rows = tuple(_row(name, swept, target) for name, target in targets)
    caption = f"Of {len(swept)} settings, by {reward}"
    return Table(f"recommended-{reward}", caption, headings, rows)


def _row(name: str, swept: Sequence[Swept], target: Target) -> tuple[Cell, ...]:
    try:
        found: Recommendation = recommend.recommend(swept, target)
    except NothingFits:
        return (name, "none", *[float("nan")] * 5)
    estimates = [
        Estimate(each.mean, each.low, each.high)
        for each in (found.regret, found.cost, found.tokens)
    ]
    return (name, found.chosen.name, *estimates, found.held_out_regret, f"{found.same_choice:.0%}")


def _policies(reward: str, rows: Rows) -> Table:
    headings = ("policy", "schedule", "gain over fixed alphas, equal tokens (95 %)", "is better")
    whole = [each for each in rows if each["knob"] is None]
    found = tuple(
        (
            *(str(each["policy"]), str(each["schedule"])),
            Estimate(each["gain"], each["gain_low"], each["gain_high"]),
            "yes" if each["wins"] else "no",
        )
        for each in whole
    )
    return Table(f"policies-{reward}", f"Adaptive alphas by {reward}", headings, found)


def _verdict(reward: str, rows: Rows) -> str:
    winners = [each for each in rows if each["knob"] is None and each["wins"]]
    if not winners:
        return f"<b>By {reward}.</b> No policy is better than the best fixed alphas beyond chance."
    best = max(winners, key=lambda each: float(each["gain"]))
    return (
        f"<b>By {reward}.</b> {best['policy']} with {best['schedule']} is better: "
        f"{best['gain']:.3g} less regret ({best['gain_low']:.3g} to {best['gain_high']:.3g}) "
        "at equal tokens."
    )
