"""`specrej experiment replay`, `sweep`, `recommend` and `policy`: what needs no model.

Each prints a table for people and one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from experiments import sweep as sweeping
from experiments.adaptive import as_table, compare
from experiments.collecting import DEFAULT_DIRECTORY
from experiments.recommend import Estimate, Recommendation, Target, recommend
from experiments.replay import Replayer, Setting
from experiments.sweep import Scale, Swept, default_settings, name_of
from experiments.trajectories import Trajectories, load
from orchestrator.composition import LIKELIHOOD
from orchestrator.schedule import next_decision_token
from specrej.cli import parse_schedule
from specrej.contracts import Schedule

_RESULTS = Path("build/experiments")
_SHOWN = 12


def add_to(commands: Any) -> None:
    """The commands."""
    for add in (_add_replay, _add_sweep, _add_recommend, _add_policy):
        add(commands)


def schedule(text: str) -> Schedule:
    """As `specrej generate` takes it.

    Raises:
        ValueError: it is none.
    """
    try:
        return parse_schedule(text)
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser("replay", help="one setting on all prompts, without a model")
    _add_source(parser)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--schedule", type=schedule, default=Schedule(), help="as of generate")
    parser.add_argument("--slots", type=int, default=0, help="the generator's; 0: plenty")
    parser.add_argument(
        "--snap", action="store_true", help="full slots end rounds on the grid, where it is coarse"
    )
    parser.set_defaults(command=_replay)


def _add_sweep(commands: Any) -> None:
    parser = commands.add_parser("sweep", help="hundreds of settings on all prompts")
    _add_source(parser)
    parser.add_argument("--out", type=Path, help="JSON lines; a CSV comes beside them")
    parser.set_defaults(command=_sweep)


def _add_recommend(commands: Any) -> None:
    parser = commands.add_parser(
        "recommend",
        help="the best setting of a sweep for a target",
        description="Regret: 0 is Best-of-N with all candidates, 1 is one candidate on average.",
    )
    parser.add_argument("--sweep", type=Path, required=True, help="what sweep wrote")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--regret", type=float, help="the least compute with at most this")
    target.add_argument("--tokens", type=float, help="the best reward with at most so many")
    target.add_argument("--cost", type=float, help="the same, in parts of all candidates' tokens")
    parser.set_defaults(command=_recommend)


def _add_policy(commands: Any) -> None:
    parser = commands.add_parser(
        "policy", help="an alpha of its own for every round against the best fixed one"
    )
    _add_source(parser)
    parser.add_argument(
        "--schedule",
        type=schedule,
        action="append",
        help="repeatable; the default is geometric:16,2 and geometric:8,2",
    )
    parser.add_argument("--out", type=Path, help="JSON")
    parser.set_defaults(command=_policy)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trajectories", type=Path, default=DEFAULT_DIRECTORY, help="what collect wrote"
    )
    parser.add_argument("--reward", default=LIKELIHOOD)
    parser.add_argument("--n", type=int, default=0, help="candidates; 0: all that were written")


async def _replay(arguments: argparse.Namespace) -> None:
    kept = load_with(arguments.trajectories, arguments.reward)
    setting = Setting(
        arguments.n or min(each.n for each in kept),
        arguments.alpha,
        arguments.schedule,
        arguments.reward,
        arguments.slots,
        snap=arguments.snap,
    )
    table = _table(name_of(setting), ("prompt", "answer", "score", "regret", "tokens", "cost"))
    rows = []
    for each in kept:
        replayer = Replayer(each, setting.reward)
        done = replayer.run(setting)
        regret, cost = Scale.of(each, replayer.final).measure(done)
        rows.append(
            {
                "prompt": each.prompt_id,
                "answer": done.answer,
                "score": done.score,
                "regret": regret,
                "tokens": done.generated_tokens,
                "cost": cost,
                "rounds": [(r.decision_token, r.num_live) for r in done.rounds],
            }
        )
        table.add_row(*(_cell(value) for value in list(rows[-1].values())[:6]))
    _finish(table, {"setting": name_of(setting), "prompts": rows})


async def _sweep(arguments: argparse.Namespace) -> None:
    run_sweep(arguments.trajectories, arguments.reward, arguments.n, arguments.out)


def run_sweep(trajectories: Path, reward: str, n: int = 0, out: Path | None = None) -> Path:
    """Sweep the default settings, print and write what comes of it."""
    kept = load_with(trajectories, reward)
    began = time.perf_counter()
    settings = settings_for(kept, reward, n)
    swept = sweeping.sweep(kept, settings)
    seconds = time.perf_counter() - began
    path = out or _RESULTS / f"sweep-{reward}.jsonl"
    sweeping.write(swept, path)
    table = _settings_table("the best for their cost", best_for_their_cost(swept)[:_SHOWN])
    result = {
        "settings": len(swept),
        "prompts": len(kept),
        "seconds": round(seconds, 2),
        "sweep": str(path),
    }
    _finish(table, result)
    return path


def settings_for(kept: Sequence[Trajectories], reward: str, n: int = 0) -> tuple[Setting, ...]:
    """The default settings that can be replayed with what was collected."""
    max_tokens = min(each.max_tokens for each in kept)
    prompt_tokens = max(each.prompt_tokens for each in kept)
    most = n or min(each.n for each in kept)
    wanted = default_settings(most, max_tokens, prompt_tokens, reward)
    grid = set.intersection(*({int(at) for at in each.positions} for each in kept))
    return tuple(each for each in wanted if _is_on(grid, each, max_tokens))


def _is_on(grid: set[int], setting: Setting, max_tokens: int) -> bool:
    """Whether prefixes were scored wherever the setting cuts."""
    if setting.reward == LIKELIHOOD:
        return True
    if setting.slots and min(grid) > setting.schedule.first:
        return False  # the slots may be full before the grid begins
    position = 0
    while position < max_tokens:
        position = next_decision_token(setting.schedule, position, max_tokens)
        if position < max_tokens and position not in grid:
            return False
    return True


def best_for_their_cost(swept: Sequence[Swept]) -> list[Swept]:
    """The settings that no other beats in both cost and regret; cheapest first."""
    best: list[Swept] = []
    for each in sorted(swept, key=lambda each: (each.costs.mean(), each.regrets.mean())):
        if not best or each.regrets.mean() < best[-1].regrets.mean():
            best.append(each)
    return best


async def _recommend(arguments: argparse.Namespace) -> None:
    target = Target(arguments.regret, arguments.tokens, arguments.cost)
    found = recommend(sweeping.read(arguments.sweep), target)
    table = _settings_table("recommended, and runners-up", [found.chosen, *found.runners_up])
    _finish(table, recommendation(found))


def recommendation(found: Recommendation) -> dict[str, Any]:
    """As it is printed."""
    return {
        "setting": found.chosen.name,
        "regret": _interval(found.regret),
        "tokens": _interval(found.tokens),
        "cost": _interval(found.cost),
        "held_out_regret": round(found.held_out_regret, 4),
        "held_out_tokens": round(found.held_out_tokens, 1),
        "held_out_cost": round(found.held_out_cost, 4),
        "same_choice": round(found.same_choice, 4),
    }


async def _policy(arguments: argparse.Namespace) -> None:
    schedules = arguments.schedule or (Schedule(first=16), Schedule(first=8))
    run_policy(arguments.trajectories, arguments.reward, schedules, arguments.n, arguments.out)


def run_policy(
    trajectories: Path,
    reward: str,
    schedules: Sequence[Schedule],
    n: int = 0,
    out: Path | None = None,
) -> Path:
    """Compare, print and write what comes of it."""
    kept = load_with(trajectories, reward)
    rows = as_table(compare(kept, reward, schedules, n))
    columns = ("policy", "schedule", "knob", "cost", "regret", "fixed_regret", "gain")
    table = _table("gain: the best fixed alphas' regret less the policy's, equal tokens", columns)
    for row in rows:
        shown = [_cell(row[name]) for name in columns[:-1]]
        gain = f"{row['gain']:.4f} [{row['gain_low']:.4f}, {row['gain_high']:.4f}]"
        table.add_row(*shown, gain, style="bold" if row["best"] else None)
    path = out or _RESULTS / f"policy-{reward}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "reward": reward,
        "n": n or min(each.n for each in kept),
        "max_tokens": max(each.max_tokens for each in kept),
        "prompts": len(kept),
    }
    path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n", "utf-8")
    _finish(table, result | {"best": [row for row in rows if row["best"]]})
    return path


def load_with(directory: Path, reward: str) -> tuple[Trajectories, ...]:
    """A collection with this reward.

    Raises:
        ValueError: there is none.
    """
    kept = load(directory)
    if any(reward not in each.reward_names for each in kept):
        there = ", ".join(kept[0].reward_names)
        raise ValueError(f"{directory} has no reward {reward}, but {there}")
    return kept


def _settings_table(title: str, swept: Sequence[Swept]) -> Table:
    table = _table(title, ("setting", "regret", "cost", "tokens", "score", "complete"))
    for each in swept:
        means = (each.regrets, each.costs, each.tokens, each.scores, each.complete)
        table.add_row(each.name, *(_cell(float(values.mean())) for values in means))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    return table


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interval(each: Estimate) -> list[float]:
    """Mean, low, high."""
    return [round(value, 4) for value in (each.mean, each.low, each.high)]


def _finish(table: Table, result: Mapping[str, Any]) -> None:
    Console(width=120).print(table)
    print(json.dumps(result))
