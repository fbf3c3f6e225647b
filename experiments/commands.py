"""The commands of `specrej experiment`.

`replay`, `recommend` and `branching` print tables, each followed by a JSON object on one line.
`live` prints only such a line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as TextTable

from experiments import branching as branchings
from experiments import collect as collecting
from experiments import live as live_runs
from experiments.flops import recorded
from experiments.json_lines import Line
from experiments.models import Models, in_process, remote
from experiments.prompts import Item, read_prompts
from experiments.replay import Replayer, Setting
from experiments.settings import Settings, default_grid
from experiments.studies import frontier as frontiers
from experiments.studies import prefixes
from experiments.studies.plans import DOUBLING, measure_all
from experiments.studies.tables import Table, shown, to_json
from experiments.trajectories import Store, Trajectories, load
from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import FinishReason


async def run_all(arguments: argparse.Namespace) -> None:
    """Collect what is missing, study and report.

    The output directory holds trajectories/ and report/.
    """
    # Imported here, since figures need matplotlib and the other commands do not.
    from experiments import report

    root, grid = arguments.out, _collection_settings(arguments).grid
    if off_grid := sorted(set(arguments.lengths) - set(grid)):
        raise ValueError(f"--lengths {off_grid}: not of the grid, {', '.join(map(str, grid))}")
    arguments.out = root / "trajectories"
    await collect(arguments)
    prompts, head = load(arguments.out), Store(arguments.out).head() or {}
    page = report.write(
        by_length(prompts, arguments.lengths),
        root / "report",
        arguments.live,
        notes=_notes(head),
        compute=partial(recorded, head),
    )
    print(f"report: {page}", file=sys.stderr)


def by_length(
    prompts: Sequence[Trajectories], lengths: Sequence[int]
) -> list[tuple[str, tuple[Trajectories, ...]]]:
    """The collection under every limit below its own, then under its own; rising."""
    whole = min(prompt.max_tokens for prompt in prompts)
    limits = sorted(length for length in lengths if length < whole)
    sets = [(limit, tuple(prompt.shortened(limit) for prompt in prompts)) for limit in limits]
    return [(f"{limit} tokens", group) for limit, group in [*sets, (whole, tuple(prompts))]]


def _notes(head: Line) -> dict[str, str]:
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


async def collect(arguments: argparse.Namespace) -> None:
    """Collect what is missing."""
    settings = _collection_settings(arguments)
    if arguments.chunk < 1:
        raise ValueError("--chunk must be at least 1")
    items = read_prompts(arguments.prompts, arguments.limit)
    store = Store(arguments.out)
    remaining = collecting.missing(store, settings, items)
    if not remaining:
        return
    async with _models(arguments, settings.rewards) as models:
        with _progress(len(remaining), settings.n * settings.max_tokens) as progress:
            await collecting.collect(store, settings, items, models, progress, arguments.chunk)


def _collection_settings(arguments: argparse.Namespace) -> Settings:
    """The settings that the flags set; raises ValueError as Settings does."""
    values = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    values |= {
        "grid": arguments.grid or default_grid(arguments.max_tokens),
        "rewards": tuple(name for name in _names(arguments.rewards) if name != LIKELIHOOD),
        "stop": tuple(arguments.stop),
    }
    return Settings(**values)


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)


def _models(
    arguments: argparse.Namespace, rewards: Sequence[str]
) -> AbstractAsyncContextManager[Models]:
    if arguments.generator_address:
        return remote(rewards, arguments.generator_address, arguments.reward_address)
    return in_process(rewards, arguments.kv_slots)


@contextmanager
def _progress(num_prompts: int, tokens_per_prompt: int) -> Iterator[collecting.Progress]:
    """A progress bar and a line per prompt, on stderr."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:5.1f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    # The estimate is over a long period, since prompts differ in the lengths of their answers.
    with Progress(*columns, console=console, speed_estimate_period=1e6) as bar:
        total = num_prompts * tokens_per_prompt
        task = bar.add_task(f"{num_prompts} prompts", total=total)
        numbers = itertools.count(1)

        def done(item: Item, trajectories: Trajectories, seconds: float) -> None:
            console.print(
                f"[{next(numbers)}/{num_prompts}] {item.id}: {trajectories.n} answers, "
                f"{int(trajectories.num_tokens.sum()):,} tokens, "
                f"{trajectories.finished.mean():.0%} complete, {seconds:.0f} s",
                highlight=False,
                markup=False,
            )

        yield collecting.Progress(lambda tokens: bar.advance(task, tokens), done)


async def replay(arguments: argparse.Namespace) -> None:
    """One setting on all prompts."""
    prompts = load(arguments.trajectories, arguments.reward)
    setting = Setting(
        arguments.n or min(prompt.n for prompt in prompts),
        arguments.alpha,
        arguments.schedule,
        arguments.reward,
        arguments.slots,
        snap=arguments.snap,
        prefer_complete=not arguments.reward_alone,
    )
    headings = (
        *("prompt", "answer", "score", "complete", "highest score", "regret", "tokens"),
        "Best-of-N's",
    )
    rows, result = [], []
    for prompt in prompts:
        replayer = Replayer(prompt, setting.reward)
        run = replayer.run(setting)
        complete = "yes" if run.finish is FinishReason.STOP else "no"
        answer = (prompt.prompt_id, run.answer, run.score, complete, run.highest)
        row = (*answer, run.regret, run.generated_tokens, run.best_of_n_tokens)
        rounds = [(trace.decision_token, len(trace.survivors)) for trace in run.rounds]
        rows.append(row)
        result.append({**dict(zip(headings, row, strict=True)), "rounds": rounds})
    table = Table("replay", setting.name, headings, tuple(rows))
    _print(table, {"setting": setting.name, "prompts": result})


async def recommend(arguments: argparse.Namespace) -> None:
    """A setting for the default's tokens, and the best ones by budget, judged on other prompts."""
    prompts = load(arguments.trajectories, arguments.reward)
    replayers = [Replayer(prompt, arguments.reward) for prompt in prompts]
    correlation = prefixes.correlation(prompts, arguments.reward)
    frontier = frontiers.study(replayers, measure_all(replayers), correlation)
    side = int(arguments.reward_alone)
    first_tokens, *by_side = frontier.tables()
    chosen, default = frontier.sides[side], frontier.sides[side].default
    result = {
        "recommended": chosen.recommended,
        "reason": chosen.reason,
        "rejection_pays_from_token": frontier.pays_from[side],
        "default_ahead_of_best_of_n": [default.ahead.value, default.ahead.low, default.ahead.high],
    }
    for table in (first_tokens, by_side[2 * side]):
        _print(table, result)


async def live(arguments: argparse.Namespace) -> None:
    """Time real requests, and compare them with their replays."""
    store = Store(arguments.trajectories)
    head = store.head()
    if head is None:
        raise ValueError(f"{arguments.trajectories} holds no trajectories yet")
    collected = Settings.from_json(head["settings"])
    async with _models(arguments, collected.rewards) as models:
        if models.identity() != head["identity"]:
            raise ValueError("these models are not those of the collection")
        settings = live_runs.settings_of(
            arguments.n,
            arguments.alpha or [0.5],
            arguments.schedule or [DOUBLING],
            (*collected.rewards, LIKELIHOOD),
            arguments.kv_slots,
            prefer_complete=not arguments.reward_alone,
        )
        runs = live_runs.Runs(arguments.out, head)
        for prompt in itertools.islice(store, arguments.limit or None):
            await live_runs.time_prompt(prompt, collected, settings, models, runs)
    compared = [run["as_replayed"] for run in runs.all if "as_replayed" in run]
    counts = {"runs": len(runs.all), "replayed": len(compared), "as_replayed": sum(compared)}
    print(json.dumps({"live": str(arguments.out)} | counts))


async def branching(arguments: argparse.Namespace) -> None:
    """Branching against Speculative Rejection, on live requests."""
    names = _names(arguments.rewards)
    if not names:
        raise ValueError("--rewards must name a reward")
    settings = Settings(
        max_tokens=arguments.max_tokens,
        grid=default_grid(arguments.max_tokens),
        rewards=names,
        seed=arguments.seed,
    )
    systems = [branchings.System(n) for n in sorted(arguments.n)]
    systems += [branchings.System(arguments.start, forks) for forks in arguments.branching]
    items = read_prompts(arguments.prompts, arguments.limit)
    served = dict.fromkeys(name for name in names if name != LIKELIHOOD)
    async with _models(arguments, tuple(served)) as models:
        runs = await branchings.measure(arguments.out, items, settings, systems, models)
    for reward in names:
        for table in branchings.compare(runs, reward):
            _print(table, {"reward": reward, "rows": table.rows, "headings": table.headings})


def _print(table: Table, result: Mapping[str, Any]) -> None:
    """A table, then the result as a line of JSON."""
    text = TextTable(*table.headings, title=table.caption)
    for row in table.rows:
        text.add_row(*map(shown, row))
    Console(width=120).print(text)
    print(json.dumps(to_json(result)))
