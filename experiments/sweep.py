"""Replays hundreds of settings over all prompts, and recommends one for a target.

Rewards of different prompts are on different scales. So *regret* is measured in the gain of
Best-of-N over one answer: 0 is Best-of-N's answer with all candidates of the collection, 1 is the
average of one answer. *Cost* is tokens over those of that Best-of-N.

The best of hundreds of settings looks better on the prompts it was chosen on than it is. So the
choice is repeated on each bootstrap resample of prompts and measured on the prompts left out of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.replay import Replayed, Replayer, Setting, decision_tokens
from experiments.studies.statistics import Estimate, mean, resamples
from experiments.studies.tables import Table, to_csv
from experiments.trajectories import FloatArray, IntArray, Trajectories
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.schedule import first_round_tokens
from specrej.contracts import (
    Algorithm,
    FinishReason,
    GeometricSchedule,
    MemorySchedule,
    Schedule,
    TokensSchedule,
)

_ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_FIRSTS = (8, 16, 32, 64)
_FACTORS = (2.0, 4.0)
_SINGLE_CUTS = (16, 32, 64)
_MEMORY_SHARES = (0.5, 0.25, 0.125)  # of the slots that Best-of-N needs
_MIN_N = 8


@dataclass(frozen=True, slots=True)
class Swept:
    """One setting over all prompts, in their order: [P] arrays.

    scores: of the answers. tokens: generated. regrets, costs: as in the module's docstring.
    complete: 1 where the answer ended by itself, else 0.
    """

    setting: Setting
    scores: FloatArray
    tokens: FloatArray
    regrets: FloatArray
    costs: FloatArray
    complete: FloatArray

    @property
    def name(self) -> str:
        """The setting as text."""
        return name_of(self.setting)


def means(swept: Sequence[Swept], caption: str = "") -> Table:
    """A row per setting, with means over prompts."""
    columns = {
        "setting": "name",
        "n": "setting.n",
        "alpha": "setting.alpha",
        "regret": lambda row: float(row.regrets.mean()),
        "cost": lambda row: float(row.costs.mean()),
        "tokens": lambda row: float(row.tokens.mean()),
        "score": lambda row: float(row.scores.mean()),
        "complete": lambda row: float(row.complete.mean()),
    }
    return Table.of("sweep", caption, swept, columns)


def name_of(setting: Setting) -> str:
    """A setting as text."""
    if setting.algorithm is Algorithm.BEST_OF_N:
        return f"Best-of-{setting.n}"
    slots = f", {setting.slots} slots" if setting.slots else ""
    return f"N={setting.n}, alpha {setting.alpha:g}, {setting.schedule}{slots}"


def regret_and_cost(replayer: Replayer, run: Replayed) -> tuple[float, float]:
    """Of one request; answers that ended at the limit count like complete ones.

    Regret is 0 where all candidates have the same reward.
    """
    best = float(replayer.final.max())
    gain = best - float(replayer.final.mean())
    tokens = int(replayer.trajectories.num_tokens.sum())
    return (best - run.highest) / gain if gain > 0 else 0.0, run.generated_tokens / tokens


def default_settings(
    n: int, max_tokens: int, prompt_tokens: int, reward: str
) -> tuple[Setting, ...]:
    """Best-of-N and nine alphas under all kinds of schedules, for N = 8, 16, ... up to `n`."""
    sizes = sorted({n, *(_MIN_N * 2**i for i in range(20) if _MIN_N * 2**i < n)})
    schedules: list[Schedule] = [
        GeometricSchedule(first=first, factor=factor)
        for first in _FIRSTS
        for factor in _FACTORS
        if first < max_tokens
    ]
    schedules += [TokensSchedule((at,)) for at in _SINGLE_CUTS if at < max_tokens]
    settings = [Setting(size, 0.0, reward=reward, algorithm=Algorithm.BEST_OF_N) for size in sizes]
    for size in sizes:
        settings += [
            Setting(size, alpha, schedule, reward) for schedule in schedules for alpha in _ALPHAS
        ]
        settings += [
            Setting(size, alpha, MemorySchedule(first=8), reward, slots, snap=True)
            for share in _MEMORY_SHARES
            for alpha in _ALPHAS
            # Slots for the longest prompt and for the first round.
            if (slots := prompt_tokens + int(share * size * max_tokens))
            >= prompt_tokens + max(size * 8, max_tokens)
        ]
    return tuple(settings)


def settings_for(prompts: Sequence[Trajectories], reward: str, n: int = 0) -> tuple[Setting, ...]:
    """The default settings that can be replayed on a collection."""
    max_tokens = min(prompt.max_tokens for prompt in prompts)
    prompt_tokens = max(prompt.prompt_tokens for prompt in prompts)
    largest = n or min(prompt.n for prompt in prompts)
    grid = set.intersection(*(set(prompt.positions.tolist()) for prompt in prompts))
    settings = default_settings(largest, max_tokens, prompt_tokens, reward)
    return tuple(setting for setting in settings if _is_on_grid(grid, setting, max_tokens))


def _is_on_grid(grid: set[int], setting: Setting, max_tokens: int) -> bool:
    """Whether prefixes were scored wherever the setting cuts."""
    if setting.reward == LIKELIHOOD:
        return True
    if setting.slots and min(grid) > first_round_tokens(setting.schedule, max_tokens):
        return False  # the slots may be full before the grid begins
    return grid.issuperset(decision_tokens(setting.schedule, max_tokens))


def sweep(prompts: Sequence[Trajectories], settings: Sequence[Setting]) -> tuple[Swept, ...]:
    """Replay every setting on every prompt.

    Raises:
        ValueError: the settings have several rewards.
        OffGrid, NeverFits: a setting cannot be replayed.
    """
    if len({setting.reward for setting in settings}) != 1:
        raise ValueError("all settings of a sweep must have the same reward")
    columns = [_measure(prompt, settings) for prompt in prompts]
    return tuple(
        Swept(setting, *np.array([column[row] for column in columns], dtype=np.float64).T)
        for row, setting in enumerate(settings)
    )


def _measure(prompt: Trajectories, settings: Sequence[Setting]) -> list[tuple[float, ...]]:
    """Score, tokens, regret, cost and completeness of one prompt under every setting."""
    replayer = Replayer(prompt, settings[0].reward)
    rows: list[tuple[float, ...]] = []
    for setting in settings:
        run = replayer.run(setting)
        is_complete = float(run.finish is FinishReason.STOP)
        rows.append((run.score, run.generated_tokens, *regret_and_cost(replayer, run), is_complete))
    return rows


def undominated(swept: Sequence[Swept]) -> list[Swept]:
    """The settings that no other beats in both cost and regret, by rising cost."""
    best: list[Swept] = []
    for row in sorted(swept, key=lambda row: (row.costs.mean(), row.regrets.mean())):
        if not best or row.regrets.mean() < best[-1].regrets.mean():
            best.append(row)
    return best


def write(swept: Sequence[Swept], path: Path) -> None:
    """One JSON line per setting, and a CSV file of the means beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_to_json(row)) + "\n" for row in swept), "utf-8")
    path.with_suffix(".csv").write_text(to_csv(means(swept)), "utf-8")


def read(path: Path) -> tuple[Swept, ...]:
    """The sweep that `write` stored.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a sweep.
    """
    try:
        return tuple(_from_json(path.read_text("utf-8")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a sweep: {error}") from None


def _to_json(swept: Swept) -> dict[str, Any]:
    setting = asdict(swept.setting) | {"algorithm": swept.setting.algorithm.value}
    names = ("scores", "tokens", "regrets", "costs", "complete")
    return {"setting": setting, **{name: getattr(swept, name).tolist() for name in names}}


def _from_json(text: str) -> Iterator[Swept]:
    for line in text.splitlines():
        arrays = json.loads(line)
        setting = arrays.pop("setting")
        schedule = _schedule(**setting.pop("schedule"))
        algorithm = Algorithm(setting.pop("algorithm"))
        yield Swept(
            Setting(**setting, schedule=schedule, algorithm=algorithm),
            **{name: np.array(values, dtype=np.float64) for name, values in arrays.items()},
        )


def _schedule(kind: str, tokens: Sequence[int] = (), **fields: Any) -> Schedule:
    """The schedule with these fields."""
    if kind == "tokens":
        return TokensSchedule(tuple(tokens))
    return MemorySchedule(**fields) if kind == "memory" else GeometricSchedule(**fields)


class NothingFits(ValueError):
    """No setting meets the target; the message has the nearest value."""


@dataclass(frozen=True, slots=True)
class Target:
    """The fewest tokens with at most `regret`, or the least regret for a budget.

    Exactly one field is set; all are means over prompts. tokens: generated per prompt.

    Raises:
        ValueError: none or several fields are set.
    """

    regret: float | None = None
    tokens: float | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        if [self.regret, self.tokens, self.cost].count(None) != 2:
            raise ValueError("a target is either a regret, a number of tokens or a cost")

    def spent(self, swept: Swept) -> FloatArray:
        """[P] of a setting, in the unit of the budget."""
        return swept.tokens if self.cost is None else swept.costs

    def order(self, regrets: FloatArray, spent: FloatArray) -> IntArray:
        """The rows that meet the target, best first; ties are broken by the other array."""
        if self.regret is not None:
            rows = np.lexsort((regrets, spent))
            return rows[regrets[rows] <= self.regret]
        rows = np.lexsort((spent, regrets))
        return rows[spent[rows] <= (self.tokens or self.cost or 0.0)]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The chosen setting, with estimates on the given prompts.

    held_out_*: means on prompts left out of the choice, over all resamples; NaN if there are none.
    same_choice: the share of resamples in which the same setting is chosen.
    runners_up: the next best settings, best first.
    """

    chosen: Swept
    regret: Estimate
    tokens: Estimate
    cost: Estimate
    held_out_regret: float
    held_out_tokens: float
    held_out_cost: float
    same_choice: float
    runners_up: tuple[Swept, ...]


def recommend(swept: Sequence[Swept], target: Target, num_runners_up: int = 3) -> Recommendation:
    """The setting that meets the target best.

    Raises:
        NothingFits: no setting does.
    """
    regrets = np.stack([row.regrets for row in swept])  # [settings, prompts]
    spent = np.stack([target.spent(row) for row in swept])
    order = target.order(regrets.mean(axis=1), spent.mean(axis=1))
    if not len(order):
        raise NothingFits(_nearest(regrets, spent, target))
    chosen = swept[int(order[0])]
    choices: list[
        tuple[Swept | None, IntArray]
    ] = []  # by resample: the setting chosen, and the prompts left out
    for draw in resamples(regrets.shape[1]):
        again = target.order(regrets[:, draw].mean(axis=1), spent[:, draw].mean(axis=1))
        if len(again):
            choices.append((swept[int(again[0])], np.setdiff1d(np.arange(len(draw)), draw)))
        else:
            choices.append((None, draw[:0]))
    held_out = [
        [values[left_out].mean() for values in (choice.regrets, choice.tokens, choice.costs)]
        for choice, left_out in choices
        if choice is not None and len(left_out)
    ]
    means = np.mean(held_out, axis=0).tolist() if held_out else [math.nan] * 3
    return Recommendation(
        chosen,
        regret=mean(chosen.regrets),
        tokens=mean(chosen.tokens),
        cost=mean(chosen.costs),
        held_out_regret=means[0],
        held_out_tokens=means[1],
        held_out_cost=means[2],
        same_choice=sum(choice is chosen for choice, _ in choices) / len(choices),
        runners_up=tuple(swept[int(row)] for row in order[1 : 1 + num_runners_up]),
    )


def _nearest(regrets: FloatArray, spent: FloatArray, target: Target) -> str:
    least = float((spent if target.regret is None else regrets).mean(axis=1).min())
    if target.tokens is not None:
        return f"no setting generates at most {target.tokens:g} tokens: the least is {least:.0f}"
    name, limit = ("cost", target.cost) if target.regret is None else ("regret", target.regret)
    return f"no setting has a {name} of at most {limit:g}: the least is {least:.3g}"
