"""`specrej experiment run`: collect what is missing, then all that is made of it.

Under one directory: trajectories/, sweep-REWARD.jsonl and .csv, policy-REWARD.json, report/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import collecting
from experiments.commands import run_policy, run_sweep
from experiments.studies.compute import recorded
from experiments.studies.shortened import shortened
from experiments.sweep import read
from experiments.trajectories import Line, Store, Trajectories, load
from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Schedule

_ROOT = Path("build/experiments")
_SCHEDULES = (Schedule(first=16), Schedule(first=8))
_LEAST_PROMPTS = 3  # a policy is learnt from others than it is tried on


def add_to(commands: Any) -> None:
    """The command."""
    parser = commands.add_parser(
        "run",
        help="collect what is missing, then sweep, study, draw and report",
        description="Stop it at any time: the same command goes on with the prompts that miss.",
    )
    collecting.add_options(parser)
    parser.set_defaults(out=_ROOT, command=run)
    parser.add_argument(
        "--lengths",
        type=collecting.comma_separated,
        default=(),
        help="study these smaller limits of tokens too: the same answers, cut off",
    )
    parser.add_argument("--live", type=Path, help="what live wrote: seconds of real requests")


async def run(arguments: argparse.Namespace) -> None:
    """Everything."""
    # Here, as figures need matplotlib, which collecting does not.
    from experiments.report import write
    from experiments.report.choices import choices

    root = arguments.out
    arguments.out = root / "trajectories"
    await collecting.run(arguments)
    rewards = collecting.settings_of(arguments).rewards
    kept, head = load(arguments.out), Store(arguments.out).head() or {}
    sweeps, policies = {}, {}
    for reward in (*rewards, LIKELIHOOD):
        sweeps[reward] = read(run_sweep(arguments.out, reward, out=root / f"sweep-{reward}.jsonl"))
        if len(kept) >= _LEAST_PROMPTS:
            path = root / f"policy-{reward}.json"
            run_policy(arguments.out, reward, _SCHEDULES, min(64, kept[0].n), path)
            policies[reward] = json.loads(path.read_text("utf-8"))
    page = write(
        list(by_length(kept, arguments.lengths)),
        root / "report",
        arguments.live,
        notes=notes(head),
        compute=partial(recorded, head),
        choices=choices(sweeps, policies),
        say=_say,
    )
    _say(f"report: {page}")


def by_length(
    kept: Sequence[Trajectories], lengths: Sequence[int]
) -> list[tuple[str, tuple[Trajectories, ...]]]:
    """The collection under every limit, the shortest first."""
    whole = min(each.max_tokens for each in kept)
    cut = [(length, tuple(shortened(each, length) for each in kept)) for length in sorted(lengths)]
    sets = [(length, prompts) for length, prompts in cut if length < whole]
    return [(f"{length} tokens", prompts) for length, prompts in [*sets, (whole, tuple(kept))]]


def notes(head: Line) -> dict[str, str]:
    """What the report says of how its trajectories were made."""
    machine = ", ".join(f"{name} {value}" for name, value in head.get("machine", {}).items())
    settings = ", ".join(f"{name} {value}" for name, value in head.get("settings", {}).items())
    return {
        "collected": str(head.get("date", "")),
        "machine": machine,
        "model": str(head.get("identity", {}).get("model", "")),
        "settings": settings,
        "command": "specrej experiment " + " ".join(sys.argv[1:]),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
