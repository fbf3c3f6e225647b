"""`specrej experiment live`: real requests, timed, and held against their replays.

A replay knows tokens and rewards, not seconds. So some of the prompts that were collected are
answered again, by the loop that serves requests, with the same seeds; algorithms take turns on
every prompt, so that a slow minute of the machine meets all of them. Each run is kept as it ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from experiments.backends import Backends
from experiments.collect import unshared_salt
from experiments.collecting import DEFAULT_DIRECTORY, add_backends, backends_of, comma_separated
from experiments.commands import schedule
from experiments.replay import NeverFits, Replayed, Setting, replay
from experiments.settings import Settings
from experiments.studies.plans import DOUBLING
from experiments.studies.runs import Plan
from experiments.sweep import name_of
from experiments.trajectories import Line, OffGrid, Store, Trajectories
from loadtest.sweep.machine import describe_machine
from orchestrator.composition import LIKELIHOOD
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer
from specrej.contracts import (
    Algorithm,
    Finished,
    Generation,
    GenerationRequest,
    Schedule,
    Selection,
)


def add_to(commands: Any) -> None:
    """The command."""
    parser = commands.add_parser(
        "live",
        help="time real requests, check replays against them",
        description="Stop it at any time: the same command goes on with the runs that miss.",
    )
    parser.add_argument("--trajectories", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--out", type=Path, default=Path("build/experiments/live.json"))
    parser.add_argument("--limit", type=int, default=3, help="only so many prompts")
    parser.add_argument("--n", type=comma_separated, default=(8, 64), help="numbers, by comma")
    parser.add_argument("--alpha", type=float, action="append", help="repeatable; default 0.5")
    parser.add_argument(
        "--schedule", type=schedule, action="append", help="repeatable; default geometric:16,2"
    )
    add_backends(parser)
    parser.set_defaults(command=_live)


async def _live(arguments: argparse.Namespace) -> None:
    store = Store(arguments.trajectories)
    head = store.head()
    if head is None:
        raise ValueError(f"{arguments.trajectories} holds no trajectories yet")
    collected = Settings.from_json(head["settings"])
    runs = Runs(arguments.out, head)
    async with backends_of(arguments, collected.rewards) as backends:
        if backends.identity() != head["identity"]:
            raise ValueError("these are other models than those of the collection")
        settings = settings_of(
            arguments.n,
            arguments.alpha or [0.5],
            arguments.schedule or [DOUBLING],
            (*collected.rewards, LIKELIHOOD),
            arguments.kv_slots,
        )
        for kept in itertools.islice(store, arguments.limit):
            await time_prompt(kept, collected, settings, backends, runs)
    compared = [each["as_replayed"] for each in runs.all if "as_replayed" in each]
    counts = {"runs": len(runs.all), "replayed": len(compared), "as_replayed": sum(compared)}
    print(json.dumps({"live": str(arguments.out)} | counts))


def settings_of(
    ns: Sequence[int],
    alphas: Sequence[float],
    schedules: Sequence[Schedule],
    rewards: Sequence[str],
    slots: int,
) -> tuple[Setting, ...]:
    """Best-of-N, then Speculative Rejection, for every reward and N; slots 0: plenty.

    Raises:
        ValueError: memory is to end rounds, and it is not said how much there is.
    """
    if not slots and any(each.kind == "memory" for each in schedules):
        raise ValueError("the memory schedule needs --kv-slots: where they are full, rounds end")
    return tuple(
        setting
        for reward in rewards
        for n in ns
        for setting in (
            Setting(n, 0.0, reward=reward, slots=slots, algorithm=Algorithm.BEST_OF_N),
            *(Setting(n, alpha, each, reward, slots) for each in schedules for alpha in alphas),
        )
    )


class Runs:
    """A file of live runs, as `experiments.studies.live` reads it; written anew by each."""

    def __init__(self, path: Path, head: Line) -> None:
        """Goes on with what is there.

        Raises:
            ValueError: that is of another collection or machine.
        """
        self._path = path
        machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
        self._about = {"machine": machine, "collection": head}
        self.all: list[Line] = []
        if path.exists():
            kept = json.loads(path.read_text("utf-8"))
            self.all = kept.pop("runs", [])
            if kept != self._about:
                raise ValueError(f"{path} is of another collection or machine: choose another file")

    def has(self, asked: Line) -> bool:
        """Whether a run that begins so is there."""
        return any(each | asked == each for each in self.all)

    def add(self, run: Line) -> None:
        """Keep one more. A kill leaves the file as it was, or with it."""
        self.all.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.with_suffix(".tmp")
        torn.write_text(json.dumps(self._about | {"runs": self.all}, indent=1) + "\n", "utf-8")
        torn.replace(self._path)


async def time_prompt(
    kept: Trajectories,
    collected: Settings,
    settings: Sequence[Setting],
    backends: Backends,
    runs: Runs,
) -> None:
    """Every setting that misses on one prompt, after a request that warms up."""
    asked = {setting: _asked(kept, setting) for setting in settings}
    missing = [setting for setting in settings if not runs.has(asked[setting])]
    if missing:
        await _answered(kept, collected, Setting(2, 0.5), backends)
    for setting in missing:
        about = f"{kept.prompt_id}, {setting.reward}, {name_of(setting)}"
        try:
            expected = _replayed(kept, setting)
        except NeverFits as error:
            _say(f"{about}: left out: {error}")
            continue
        began = time.perf_counter()
        live = await _answered(kept, collected, setting, backends)
        timed = asked[setting] | _measured(live, expected, time.perf_counter() - began)
        runs.add(timed)
        _say(f"{about}: {timed['seconds']:.1f} s, {timed['tokens']} tokens, {_said(timed)}")


def _asked(kept: Trajectories, setting: Setting) -> Line:
    """What tells a run from others."""
    is_best_of_n = setting.algorithm is Algorithm.BEST_OF_N
    planned = Plan(setting.n, setting.alpha, setting.schedule).name
    if setting.schedule.kind == "memory":
        planned = f"memory of {setting.slots} slots"
    return {
        "prompt_id": kept.prompt_id,
        "reward": setting.reward,
        "max_tokens": kept.max_tokens,
        "algorithm": setting.algorithm.value,
        "n": setting.n,
        "alpha": setting.alpha,
        "schedule": "no cuts" if is_best_of_n else planned,
        "slots": setting.slots,
    }


def _replayed(kept: Trajectories, setting: Setting) -> Replayed | None:
    """None: a round ends where no prefix was scored. Raises NeverFits."""
    try:
        return replay(kept, setting)
    except OffGrid:
        return None


def _measured(live: Generation, expected: Replayed | None, seconds: float) -> Line:
    """What came of a run, and whether its replay says the same, if there is one."""
    tokens = live.usage.generated_tokens
    measured: Line = {"seconds": round(seconds, 6), "score": live.best.score, "tokens": tokens}
    if expected:
        same = (expected.answer, expected.generated_tokens) == (live.best.id, tokens)
        measured["as_replayed"] = same
    return measured


def _said(timed: Line) -> str:
    """How a run compares with its replay."""
    if "as_replayed" not in timed:
        return "off the grid, not replayed"
    return "as replayed" if timed["as_replayed"] else "NOT as replayed"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _answered(
    kept: Trajectories, collected: Settings, setting: Setting, backends: Backends
) -> Generation:
    """By the loop that serves requests."""
    selection = Selection(
        n=setting.n, alpha=setting.alpha, schedule=setting.schedule, algorithm=setting.algorithm
    )
    sampling = collected.sampling(kept.seed - collected.seed)
    request = GenerationRequest(kept.prompt, sampling, selection)
    is_own = setting.reward == LIKELIHOOD
    scorer = LikelihoodScorer() if is_own else backends.scorers[setting.reward]
    async with aclosing(run(request, backends.generator, scorer, unshared_salt())) as events:
        last = [event async for event in events][-1]
    assert isinstance(last, Finished)
    return last.generation
