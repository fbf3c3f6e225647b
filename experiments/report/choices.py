"""What to take from the sweeps and from the comparison of policies, as tables for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments import recommend
from experiments.recommend import NothingFits, Recommendation, Target
from experiments.studies.statistics import Estimate
from experiments.studies.tables import Cell, Table, shown
from experiments.sweep import Swept

_REGRETS = (0.02, 0.05, 0.1)
_COSTS = (0.05, 0.1, 0.2)

Compared = Mapping[str, Any]  # as `specrej experiment policy` writes it


@dataclass(frozen=True, slots=True)
class Choices:
    """Of each reward a table of recommended settings, a verdict on adaptive alphas and a table."""

    recommended: tuple[Table, ...]
    verdicts: tuple[str, ...]
    policies: tuple[Table, ...]


def choices(sweeps: Mapping[str, Sequence[Swept]], policies: Mapping[str, Compared]) -> Choices:
    """By reward: what `sweep` and `policy` wrote."""
    return Choices(
        tuple(_recommended(reward, swept) for reward, swept in sweeps.items()),
        tuple(_verdict(each) for each in policies.values()),
        tuple(_policies(each) for each in policies.values()),
    )


def _recommended(reward: str, swept: Sequence[Swept]) -> Table:
    targets = [(f"regret at most {each:g}", Target(regret=each)) for each in _REGRETS]
    targets += [(f"cost at most {each:g}", Target(cost=each)) for each in _COSTS]
    headings = (
        *("wanted", "setting", "regret (95 %)", "cost (95 %)", "tokens (95 %)"),
        *("regret, on prompts left out", "cost, there", "tokens, there", "chosen again in"),
    )
    rows = tuple(_row(name, swept, target) for name, target in targets)
    caption = f"Of {len(swept)} settings, by {reward}"
    return Table(f"recommended-{reward}", caption, headings, rows)


def _row(name: str, swept: Sequence[Swept], target: Target) -> tuple[Cell, ...]:
    try:
        found: Recommendation = recommend.recommend(swept, target)
    except NothingFits:
        return (name, "none", *[math.nan] * 6, "")
    estimates = [
        Estimate(each.mean, each.low, each.high)
        for each in (found.regret, found.cost, found.tokens)
    ]
    held_out = (found.held_out_regret, found.held_out_cost, found.held_out_tokens)
    return (name, found.chosen.name, *estimates, *held_out, f"{found.same_choice:.0%}")


def _policies(compared: Compared) -> Table:
    reward, rows = compared["reward"], compared["rows"]
    headings = (
        *("policy", "schedule", "best knob", "cost", "regret"),
        *("regret of fixed alphas, equal tokens", "gain (95 %, all knobs at once)"),
        "gain is shown",
    )
    found = tuple(
        (
            *(each["policy"], each["schedule"], each["knob"], each["cost"], each["regret"]),
            *(each["fixed_regret"], _gain(each), "yes" if each["wins"] else "no"),
        )
        for each in rows
        if each["best"]
    )
    schedules = " and ".join(dict.fromkeys(each["schedule"] for each in rows))
    caption = (
        f"Adaptive alphas by {reward}: N = {compared['n']}, at most {compared['max_tokens']:,} "
        f"tokens, {compared['prompts']} prompts; fixed alphas and policies under {schedules}"
    )
    return Table(f"policies-{reward}", caption, headings, found)


def _verdict(compared: Compared) -> str:
    """What is shown, and how much more there may be."""
    rows, of = compared["rows"], f"<b>By {compared['reward']}.</b>"
    best = max(rows, key=lambda each: (each["wins"], each["gain"]))
    if best["wins"]:
        return (
            f"{of} {best['policy']} {best['knob']:g} with {best['schedule']} is better than the "
            f"best fixed alphas: {shown(_gain(best))} less regret at equal tokens."
        )
    highest = max(0.0, *(each["gain_high"] for each in rows))
    return (
        f"{of} No gain shown over the best fixed alphas; gains of up to {shown(highest)}, the "
        "highest end of any knob's interval, are not excluded."
    )


def _gain(row: Mapping[str, Any]) -> Estimate:
    return Estimate(row["gain"], row["gain_low"], row["gain_high"])
