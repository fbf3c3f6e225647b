"""`specrej experiment live`: times real requests and compares them with their replays.

A replay yields tokens and rewards, but no seconds. So some prompts of a collection are answered
again with the same seeds, by the loop that serves requests. The algorithms alternate on every
prompt, so that a slow minute of the machine affects all of them. Each run is stored as it ends. The
first line of the file has the machine and the collection, each further one a run:

    {"prompt_id": "...", "reward": "relevance", "max_tokens": 128, "algorithm": "best-of-n",
      "n": 64, "alpha": 0.0, "schedule": "no cuts", "slots": 0, "prefer_complete": true,
      "seconds": 12.5, "score": 0.71, "complete": true, "tokens": 5120, "as_replayed": true}
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.local.machine import describe_machine
from experiments.json_lines import Line, add_line, read_lines
from experiments.models import Models
from experiments.replay import NeverFits, Replayer, Setting
from experiments.settings import Settings
from experiments.trajectories import OffGrid, Trajectories
from specrej.contracts import (
    Algorithm,
    FinishReason,
    Generation,
    GenerationRequest,
    Schedule,
    Selection,
)


def settings_of(
    ns: Sequence[int],
    alphas: Sequence[float],
    schedules: Sequence[Schedule],
    rewards: Sequence[str],
    slots: int,
    *,
    prefer_complete: bool = True,
) -> tuple[Setting, ...]:
    """Best-of-N, then Speculative Rejection, for every reward and N; slots 0: unlimited.

    Raises:
        ValueError: a memory schedule without slots.
    """
    if not slots and any(schedule.kind == "memory" for schedule in schedules):
        raise ValueError("the memory schedule needs --kv-slots: full slots end its rounds")
    variants = [Setting(alpha=0.0, algorithm=Algorithm.BEST_OF_N)]
    variants += [Setting(alpha=alpha, schedule=each) for each in schedules for alpha in alphas]
    return tuple(
        replace(variant, n=n, reward=reward, slots=slots, prefer_complete=prefer_complete)
        for reward in rewards
        for n in ns
        for variant in variants
    )


class Runs:
    """A file of live runs."""

    def __init__(self, path: Path, head: Line) -> None:
        """Resume the file if it exists.

        Raises:
            ValueError: it belongs to another collection or machine.
        """
        self._path = path
        machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
        about = {"machine": machine, "collection": head}
        if not (lines := read_lines(path)):
            add_line(path, about)
        elif lines[0] != about:
            raise ValueError(f"{path} has another collection or machine: choose another file")
        self.all = lines[1:]

    def add(self, run: Line) -> None:
        self.all.append(run)
        add_line(self._path, run)


async def time_prompt(
    prompt: Trajectories,
    collected: Settings,
    settings: Sequence[Setting],
    models: Models,
    runs: Runs,
) -> None:
    """Time every setting that is missing on one prompt, after a warm-up request."""
    missing = [
        setting
        for setting in settings
        if not any(run | _fields(prompt, setting) == run for run in runs.all)
    ]
    if missing:
        await _answer(prompt, collected, Setting(2, 0.5), models)
    for setting in missing:
        about = f"{prompt.prompt_id}, {setting.reward}, {setting.name}"
        try:
            replayed = Replayer(prompt, setting.reward).run(setting)
        except OffGrid:
            replayed = None
        except NeverFits as error:
            print(f"{about}: left out: {error}", file=sys.stderr, flush=True)
            continue
        start_s = time.perf_counter()
        live = await _answer(prompt, collected, setting, models)
        seconds, tokens = time.perf_counter() - start_s, live.usage.generated_tokens
        score, complete = live.best.score, live.best.finish is FinishReason.STOP
        measured: Line = {"seconds": round(seconds, 6), "score": score, "complete": complete}
        measured["tokens"] = tokens
        comparison = "off the grid, not replayed"
        if replayed:
            same = (replayed.answer, replayed.generated_tokens) == (live.best.id, tokens)
            measured["as_replayed"] = same
            comparison = "as replayed" if same else "NOT as replayed"
        runs.add(_fields(prompt, setting) | measured)
        print(
            f"{about}: {seconds:.1f} s, {tokens} tokens, {comparison}", file=sys.stderr, flush=True
        )


def _fields(prompt: Trajectories, setting: Setting) -> Line:
    """The fields that identify a run."""
    slots = f", {setting.slots} slots" if setting.slots else ""
    is_cut = setting.algorithm is not Algorithm.BEST_OF_N
    return {
        "prompt_id": prompt.prompt_id,
        "reward": setting.reward,
        "max_tokens": prompt.max_tokens,
        "algorithm": setting.algorithm.value,
        "n": setting.n,
        "alpha": setting.alpha,
        "schedule": f"{setting.schedule}{slots}" if is_cut else "no cuts",
        "slots": setting.slots,
        "prefer_complete": setting.prefer_complete,
    }


async def _answer(
    prompt: Trajectories, collected: Settings, setting: Setting, models: Models
) -> Generation:
    """Answer a prompt with this setting."""
    selection = Selection(
        n=setting.n,
        alpha=setting.alpha,
        schedule=setting.schedule,
        algorithm=setting.algorithm,
        prefer_complete=setting.prefer_complete,
    )
    sampling = collected.sampling(prompt.seed - collected.seed)
    request = GenerationRequest(prompt.prompt, sampling, selection)
    return await models.answer(request, setting.reward)
