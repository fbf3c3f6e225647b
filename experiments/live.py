"""`specrej experiment live`: real requests, timed, and held against their replays.

A replay knows tokens and rewards, not seconds. So some of the prompts that were collected are
answered again, by the loop that serves requests, with the same seeds; algorithms take turns on
every prompt, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.backends import Backends
from experiments.collect import unshared_salt
from experiments.collecting import DEFAULT_DIRECTORY, add_backends, backends_of, comma_separated
from experiments.replay import Setting, replay
from experiments.settings import Settings
from experiments.studies.runs import Plan
from experiments.sweep import name_of
from experiments.trajectories import Store, Trajectories
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

_DOUBLING = Schedule(first=16, factor=2.0)


@dataclass(frozen=True, slots=True)
class Timed:
    """A live request: seconds, and whether its replay says the same of answer and tokens."""

    prompt_id: str
    setting: Setting
    seconds: float
    score: float
    tokens: int
    as_replayed: bool


def add_to(commands: Any) -> None:
    """The command."""
    parser = commands.add_parser("live", help="time real requests, check replays against them")
    parser.add_argument("--trajectories", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--out", type=Path, default=Path("build/experiments/live.json"))
    parser.add_argument("--limit", type=int, default=3, help="only so many prompts")
    parser.add_argument("--n", type=comma_separated, default=(8, 64), help="numbers, by comma")
    parser.add_argument("--alpha", type=float, action="append", help="repeatable; default 0.5")
    add_backends(parser)
    parser.set_defaults(command=_live)


async def _live(arguments: argparse.Namespace) -> None:
    store = Store(arguments.trajectories)
    head = store.head()
    if head is None:
        raise ValueError(f"{arguments.trajectories} holds no trajectories yet")
    collected = Settings.from_json(head["settings"])
    settings = settings_of(arguments.n, arguments.alpha or [0.5], collected)
    async with backends_of(arguments, collected.rewards) as backends:
        if backends.identity() != head["identity"]:
            raise ValueError("these are other models than those of the collection")
        timed: list[Timed] = []
        for kept in list(store)[: arguments.limit]:
            timed += await timed_prompt(kept, collected, settings, backends)
    write(timed, collected.max_tokens, arguments.out)
    same = sum(each.as_replayed for each in timed)
    print(json.dumps({"live": str(arguments.out), "runs": len(timed), "as_replayed": same}))


def settings_of(
    ns: Sequence[int], alphas: Sequence[float], collected: Settings
) -> tuple[Setting, ...]:
    """Best-of-N, then Speculative Rejection, for every reward and N."""
    return tuple(
        setting
        for reward in (*collected.rewards, LIKELIHOOD)
        for n in ns
        for setting in (
            Setting(n, 0.0, reward=reward, algorithm=Algorithm.BEST_OF_N),
            *(Setting(n, alpha, _DOUBLING, reward) for alpha in alphas),
        )
    )


async def timed_prompt(
    kept: Trajectories, collected: Settings, settings: Sequence[Setting], backends: Backends
) -> list[Timed]:
    """Every setting on one prompt, after a request that warms up."""
    await _answered(kept, collected, Setting(2, 0.5, _DOUBLING), backends)
    timed = []
    for setting in settings:
        began = time.perf_counter()
        live = await _answered(kept, collected, setting, backends)
        seconds = time.perf_counter() - began
        expected = replay(kept, setting)
        as_replayed = (expected.answer, expected.generated_tokens) == (
            live.best.id,
            live.usage.generated_tokens,
        )
        score, tokens = live.best.score, live.usage.generated_tokens
        timed.append(Timed(kept.prompt_id, setting, seconds, score, tokens, as_replayed))
        said = "as replayed" if as_replayed else "NOT as replayed"
        about = f"{kept.prompt_id}, {setting.reward}, {name_of(setting)}"
        print(f"{about}: {seconds:.1f} s, {tokens} tokens, {said}", file=sys.stderr, flush=True)
    return timed


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


def write(timed: Sequence[Timed], max_tokens: int, path: Path) -> None:
    """As `experiments.studies.live` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    plain = {"machine": machine, "runs": list(_plain(timed, max_tokens))}
    path.write_text(json.dumps(plain, indent=1) + "\n", "utf-8")


def _plain(timed: Sequence[Timed], max_tokens: int) -> Iterator[dict[str, Any]]:
    for each in timed:
        setting = each.setting
        is_best_of_n = setting.algorithm is Algorithm.BEST_OF_N
        plan = Plan(setting.n, setting.alpha, setting.schedule)
        yield {
            "prompt_id": each.prompt_id,
            "reward": setting.reward,
            "max_tokens": max_tokens,
            "algorithm": setting.algorithm.value,
            "n": setting.n,
            "alpha": setting.alpha,
            "schedule": "no cuts" if is_best_of_n else plan.name,
            "seconds": round(each.seconds, 6),
            "score": each.score,
            "tokens": each.tokens,
            "as_replayed": each.as_replayed,
        }
