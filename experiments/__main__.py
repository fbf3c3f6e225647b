"""Reproduce the paper's studies, and find the best settings for your models."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table as TextTable

from experiments import branching as branchings
from experiments import frames, report
from experiments.collect import collect, missing
from experiments.models import in_process
from experiments.prompts import DEFAULT_PROMPTS, read_prompts
from experiments.replay import Setting, replay
from experiments.settings import Settings, default_grid
from experiments.statistics import Estimate, kendall, mean, shown
from experiments.trajectories import Store, Trajectories, load
from orchestrator.loop.composition import LIKELIHOOD
from specrej import threads
from specrej.client.options import parse_branching, parse_schedule
from specrej.contracts import Branching, FinishReason
from specrej.contracts.errors import SpecrejError

_ROOT = Path("build/experiments")
_RESUME = "Stop it at any time: the same command continues with what is missing."


def main() -> None:
    """Run one command; an error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="specrej experiment", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_replay(commands)
    _add_branching(commands)
    arguments = parser.parse_args()
    threads.bound_spinning()
    try:
        asyncio.run(arguments.command(arguments))
    except (SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"specrej experiment: {error}\n")
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        parser.exit(130)


def _add_run(commands: Any) -> None:
    text = "collect what is missing, replay all settings, branch, and report"
    parser = commands.add_parser("run", help=text, description=_RESUME)
    parser.set_defaults(command=_run)
    _add_prompts(parser)
    parser.add_argument("--n", type=int, default=512, help="candidates per prompt")
    parser.add_argument("--grid", type=_numbers, help="token positions at which to score prefixes")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer")
    parser.add_argument(
        "--lengths",
        type=_numbers,
        default=(),
        help="also study these smaller token limits, by comma: the same answers, cut off",
    )
    parser.add_argument("--no-branching", action="store_true", help="leave out live requests")
    _add_systems(parser)


def _add_replay(commands: Any) -> None:
    text = "regret and correlation of one setting, without a model"
    parser = commands.add_parser("replay", help=text)
    parser.set_defaults(command=_replay)
    parser.add_argument("--trajectories", type=Path, default=_ROOT / "trajectories")
    parser.add_argument("--reward", default=LIKELIHOOD)
    parser.add_argument("--n", type=int, default=0, help="candidates; 0: all that were generated")
    parser.add_argument("--alpha", type=float, default=frames.DEFAULT_ALPHA)
    parser.add_argument("--schedule", type=parse_schedule, default=frames.DEFAULT)
    parser.add_argument("--slots", type=int, default=0, help="KV slots; 0: unlimited")


def _add_branching(commands: Any) -> None:
    text = "forks of survivors against rejection, on live requests"
    parser = commands.add_parser("branching", help=text, description=_RESUME)
    parser.set_defaults(command=_branching)
    _add_prompts(parser)
    _add_systems(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=_ROOT, help="directory")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS], help="JSON or JSON lines"
    )
    parser.add_argument("--limit", type=int, default=0, help="number of prompts; 0: all")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens per candidate")
    parser.add_argument(
        "--rewards", type=_names, default="relevance,harmless", help="by comma; likelihood is added"
    )
    parser.add_argument("--seed", type=int, default=1, help="of prompt 0; prompt i adds i")


def _add_systems(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rejection", type=_numbers, default=(16, 32, 64, 128), help="N of rejection alone"
    )
    parser.add_argument("--start", type=int, default=32, help="candidates before the first forks")
    parser.add_argument("--branching", type=parse_branching, nargs="+", default=[Branching()])


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of at least 1, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError("must be numbers of 1 or more, separated by commas")
    return tuple(map(int, parts))


async def _run(arguments: argparse.Namespace) -> None:
    """Collect what is missing, study, branch and report.

    The output directory holds trajectories/, report/ and branching.jsonl.
    """
    out, settings = arguments.out, _settings(arguments)
    if off_grid := sorted({*arguments.lengths} - {*settings.grid}):
        grid = ", ".join(map(str, settings.grid))
        raise ValueError(f"--lengths {off_grid}: not of the grid, {grid}")
    store = Store(out / "trajectories")
    items = read_prompts(arguments.prompts, arguments.limit)
    if missing(store, settings, items):
        async with in_process(settings.rewards) as models:
            await collect(store, settings, items, models)
    prompts = load(out / "trajectories")
    sets = [
        frames.frames_of(name, of_length, reward)
        for name, of_length in by_length(prompts, arguments.lengths)
        for reward in prompts[0].reward_names
    ]
    for study in report.write(sets, out / "report", _notes(store.head() or {})):
        _print(study.caption, study.table)
    if not arguments.no_branching:
        await _branching(arguments)
    print(json.dumps({"report": str(out / "report/report.html")}))


def by_length(
    prompts: Sequence[Trajectories], lengths: Sequence[int]
) -> list[tuple[str, tuple[Trajectories, ...]]]:
    """The collection under every limit below its own, then under its own; rising."""
    whole = min(prompt.max_tokens for prompt in prompts)
    limits = sorted(length for length in lengths if length < whole)
    sets = [(limit, tuple(prompt.shortened(limit) for prompt in prompts)) for limit in limits]
    return [(f"{limit} tokens", group) for limit, group in [*sets, (whole, tuple(prompts))]]


def _notes(head: Mapping[str, Any]) -> dict[str, str]:
    """Provenance for the report, from the first line of a collection."""

    def joined(key: str) -> str:
        return ", ".join(f"{name} {value}" for name, value in head.get(key, {}).items())

    return {
        "collected": str(head.get("date", "")),
        "machine": joined("machine"),
        "model": str(head.get("identity", {}).get("model", "")),
        "settings": joined("settings"),
        "command": "specrej experiment " + " ".join(sys.argv[1:]),
    }


def _settings(arguments: argparse.Namespace) -> Settings:
    """The settings that the command's flags set; raises ValueError as Settings does."""
    given = vars(arguments)
    values = {field.name: given[field.name] for field in fields(Settings) if field.name in given}
    values["grid"] = given.get("grid") or default_grid(arguments.max_tokens)
    values["rewards"] = tuple(name for name in arguments.rewards if name != LIKELIHOOD)
    values["stop"] = tuple(given.get("stop", ()))
    return Settings(**values)


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)


async def _replay(arguments: argparse.Namespace) -> None:
    """One setting on all prompts: its regret, and Kendall's tau at its decision tokens."""
    prompts = load(arguments.trajectories, arguments.reward)
    setting = Setting(
        arguments.n or min(prompt.n for prompt in prompts),
        arguments.alpha,
        arguments.schedule,
        arguments.reward,
        arguments.slots,
    )
    rows: list[dict[str, Any]] = []
    rounds = []
    taus: dict[int, list[float]] = {}
    for prompt in prompts:
        run, final = replay(prompt, setting), prompt.final(setting.reward)
        row = {
            "prompt": prompt.prompt_id,
            "answer": run.answer,
            "score": run.score,
            "complete": "yes" if run.finish is FinishReason.STOP else "no",
            "regret": run.regret,
            "tokens": run.generated_tokens,
            "Best-of-N's": run.best_of_n_tokens,
        }
        rows.append(row)
        rounds.append([(trace.decision_token, len(trace.survivors)) for trace in run.rounds])
        for trace in run.rounds[:-1]:
            growing = prompt.num_tokens > trace.decision_token
            partial = prompt.partial(setting.reward, trace.decision_token)
            tau = kendall(partial[growing], final[growing])
            taus.setdefault(trace.decision_token, []).append(tau)
    _print(setting.name, pd.DataFrame(rows))
    correlations = {at: mean(values) for at, values in sorted(taus.items())}
    tau_rows = [
        {"decision token": at, "Kendall tau (95 %)": tau} for at, tau in correlations.items()
    ]
    _print("Kendall's tau of partial and final scores", pd.DataFrame(tau_rows))
    result = {
        "setting": setting.name,
        "regret": mean([row["regret"] for row in rows]),
        "correlation": correlations,
        "prompts": [row | {"rounds": of} for row, of in zip(rows, rounds, strict=True)],
    }
    print(json.dumps(_plain(result)))


async def _branching(arguments: argparse.Namespace) -> None:
    """Branching against Speculative Rejection, on live requests."""
    names = arguments.rewards
    if not names:
        raise ValueError("--rewards must name a reward")
    settings = replace(_settings(arguments), rewards=names)
    systems = [branchings.System(n) for n in sorted(arguments.rejection)]
    systems += [branchings.System(arguments.start, forks) for forks in arguments.branching]
    items = read_prompts(arguments.prompts, arguments.limit)
    served = tuple(dict.fromkeys(name for name in names if name != LIKELIHOOD))
    async with in_process(served) as models:
        path = arguments.out / "branching.jsonl"
        runs = await branchings.measure(path, items, settings, systems, models)
    for reward in names:
        for study in branchings.compare(runs, reward):
            _print(study.caption, study.table)
            table = study.table.to_dict("records")
            print(json.dumps(_plain({"reward": reward, "name": study.name, "rows": table})))


def _print(caption: str, table: pd.DataFrame) -> None:
    text = TextTable(*map(str, table), title=caption)
    for row in table.to_numpy():
        text.add_row(*map(shown, row))
    Console(width=140).print(text)


def _plain(value: Any) -> Any:
    """A result as JSON values: NaN is null, infinity the text "beyond"."""
    if isinstance(value, Estimate):
        return {end: _plain(getattr(value, end)) for end in ("value", "low", "high")}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else shown(value)
    return value


if __name__ == "__main__":
    main()
