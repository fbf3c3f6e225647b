"""The paper's improvement score against relative compute, both algorithms on one engine.

The score is 100 x (1 + mean over prompts of (reward - best of base) / (best of base - worst of
base)), Sun et al., arXiv 2410.20290, section 5: 100 is as good as Best-of-N of a base N, 200 better
by the base's whole range. Compute is relative to the base's. Tokens and FLOPs are counted from
replays, by the reward alone; seconds come from live runs (`experiments.live`), if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from experiments.json_lines import read_lines
from experiments.studies.best_of_n import curve, doublings
from experiments.studies.plans import Measured
from experiments.studies.statistics import Estimate, expected_first, mean
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, Trajectories

FAST, FULL = "Speculative Rejection", "Best-of-N"


@dataclass(frozen=True, slots=True)
class Base:
    """Best-of-N's reward and the lowest reward, averaged over all draws of `n`: [prompts]."""

    n: int
    best: FloatArray
    worst: FloatArray


def base_of(prompts: Sequence[Trajectories], reward: str, n: int) -> Base:
    rising = [np.sort(prompt.final(reward)) for prompt in prompts]
    worst = np.array([expected_first(finals, n) for finals in rising])
    return Base(n, curve(prompts, reward, [n]).rewards[:, 0], worst)


def improvement_score(rewards: FloatArray, base: Base) -> Estimate:
    """Of a reward per prompt; prompts with equal rewards of all base answers are left out."""
    scale = base.best - base.worst
    varies = scale > 1e-9 * np.abs(base.best)  # equal ones may differ by rounding
    return mean(100 * (1 + (rewards - base.best)[varies] / scale[varies]))


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One timed request. algorithm: "best-of-n" or "speculative-rejection".

    as_replayed: whether its replay has the same answer and number of tokens. complete: whether the
    answer ended by itself; None if unknown.
    """

    prompt_id: str
    reward: str
    max_tokens: int
    algorithm: str
    n: int
    seconds: float
    score: float
    alpha: float = 0.0
    schedule: str = "no cuts"
    as_replayed: bool = True
    complete: bool | None = None
    prefer_complete: bool = True

    @property
    def method(self) -> str:
        """FAST or FULL."""
        return FULL if self.algorithm == "best-of-n" else FAST

    @property
    def setting(self) -> tuple[str, int, float, str]:
        """Method, N, alpha and schedule."""
        return (self.method, self.n, self.alpha, self.schedule)


@dataclass(frozen=True, slots=True)
class Live:
    """All runs of a file, and the machine they ran on."""

    machine: str
    runs: tuple[LiveRun, ...]


def read_live(path: Path) -> Live:
    """A file of live runs (`experiments.live`); unknown fields are ignored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not hold live runs.
    """
    path.stat()  # `read_lines` takes a missing file for an empty one
    names = {field.name for field in fields(LiveRun)}
    try:
        head, *lines = read_lines(path)
        runs = [
            LiveRun(**{name: value for name, value in run.items() if name in names})
            for run in lines
        ]
        return Live(str(head["machine"]), tuple(runs))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} does not hold live runs: {error}") from error


@dataclass(frozen=True, slots=True)
class Point:
    """A setting; `tokens` and `flops` are relative to the base's."""

    method: str
    n: int
    alpha: float
    schedule: str
    score: Estimate
    tokens: float
    flops: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Live runs of one setting; `seconds` are relative to the base's on the same prompts.

    score: compared with the base's live answers, since both prefer complete answers; runs by the
        reward alone are left out.
    """

    method: str
    n: int
    alpha: float
    schedule: str
    score: Estimate
    seconds: float
    complete: float
    num_runs: int


_SETTING = {"method": "method", "N": "n", "alpha": "alpha", "schedule": "schedule"}


@dataclass(frozen=True, slots=True)
class Improvement:
    """Scores by compute.

    model: for which FLOPs are counted; "" if unknown. num_unlike: live runs that are left out, as
    their replays differ.
    """

    reward: str
    base_n: int
    model: str
    points: tuple[Point, ...]
    timed: tuple[Timed, ...]
    num_unlike: int

    @property
    def left_out(self) -> str:
        """The number of live runs that are left out, for a caption; empty if none."""
        return f"{self.num_unlike} not as replayed left out" if self.num_unlike else ""

    def tables(self) -> tuple[Table, ...]:
        """Replays, and live runs if there are any."""
        of = f"{self.reward}, against Best-of-{self.base_n}"
        columns = {**_SETTING, "improvement score (95 %)": "score"}
        replays = Table.of(
            "improvement",
            f"Improvement score and relative compute: {of}",
            self.points,
            {**columns, "relative tokens": "tokens", "relative FLOPs": "flops"},
        )
        live = Table.of(
            "live",
            ", ".join(filter(None, (f"The same, of live runs: {of}", self.left_out))),
            self.timed,
            {
                **columns,
                "relative seconds": "seconds",
                "complete answers": "complete",
                "runs": "num_runs",
            },
        )
        return (replays, live) if self.timed else (replays,)


def study(
    prompts: Sequence[Trajectories],
    reward: str,
    measured: Sequence[Measured],
    base_n: int,
    full_flops: FloatArray,
    model: str,
    live: Sequence[LiveRun] = (),
) -> Improvement:
    """Best-of-N from a quarter of the base up, and all settings that were measured.

    full_flops: [prompts, 2], as of `ComputeModel.best_of_n`.
    """
    base = base_of(prompts, reward, base_n)
    ns = tuple(n for n in doublings(min(prompt.n for prompt in prompts)) if n * 4 >= base_n)
    prompt_flops, answer_flops = full_flops.mean(axis=0)
    base_flops = float(prompt_flops + base_n * answer_flops)
    known = curve(prompts, reward, (*ns, base_n))
    base_tokens = float(known.tokens[:, -1].mean())
    points = [
        Point(
            FULL,
            n,
            0.0,
            "no cuts",
            improvement_score(known.rewards[:, i], base),
            float(known.tokens[:, i].mean()) / base_tokens,
            float(prompt_flops + n * answer_flops) / base_flops,
        )
        for i, n in enumerate(ns)
    ]
    for measurement in measured:
        plan, score = measurement.plan, improvement_score(measurement.rewards, base)
        tokens = float(measurement.tokens.mean()) / base_tokens
        flops = float(measurement.flops.mean()) / base_flops
        points.append(Point(FAST, plan.n, plan.alpha, plan.name, score, tokens, flops))
    prompt_ids = [prompt.prompt_id for prompt in prompts]
    key = (reward, prompts[0].max_tokens)
    runs = [run for run in live if (run.reward, run.max_tokens) == key and run.prefer_complete]
    runs = [run for run in runs if run.prompt_id in prompt_ids]
    comparable = [run for run in runs if run.as_replayed]
    timed = _timed(comparable, prompt_ids, base)
    num_unlike = len(runs) - len(comparable)
    return Improvement(reward, base_n, model, tuple(points), timed, num_unlike)


def _timed(live: Sequence[LiveRun], prompt_ids: list[str], base: Base) -> tuple[Timed, ...]:
    """Each setting on the prompts for which the base was timed too."""
    of_base = [run for run in live if run.method == FULL and run.n == base.n]
    timed = []
    for setting in dict.fromkeys(run.setting for run in live):
        runs = [run for run in live if run.setting == setting]
        shared = sorted({run.prompt_id for run in runs} & {run.prompt_id for run in of_base})
        if not shared:
            continue
        runs = [run for run in runs if run.prompt_id in shared]
        rewards, best = (_by_prompt(group, shared, "score") for group in (runs, of_base))
        seconds, base_seconds = (_by_prompt(group, shared, "seconds") for group in (runs, of_base))
        scale = (base.best - base.worst)[[prompt_ids.index(prompt_id) for prompt_id in shared]]
        score = improvement_score(rewards, Base(base.n, best, best - scale))
        relative = float(seconds.sum()) / float(base_seconds.sum())
        complete = [math.nan if run.complete is None else run.complete for run in runs]
        timed.append(Timed(*setting, score, relative, float(np.mean(complete)), len(runs)))
    return tuple(timed)


def _by_prompt(runs: Sequence[LiveRun], prompt_ids: Sequence[str], name: str) -> FloatArray:
    """[prompts] means of a field over the runs of each prompt."""
    return np.array(
        [
            np.mean([getattr(run, name) for run in runs if run.prompt_id == prompt_id])
            for prompt_id in prompt_ids
        ]
    )
