"""Hundreds of settings replayed over all prompts: what each would have cost, and given.

Rewards of different prompts cannot be averaged as they are. So *regret* is measured in the gain of
Best-of-N over one answer: 0 is Best-of-N's answer with all candidates that were written, 1 is what
a candidate gives on average. *Cost* is tokens over those of that Best-of-N.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.replay import Policy, Replayed, Replayer, Setting
from experiments.trajectories import FloatArray, Trajectories
from specrej.cli import schedule_text
from specrej.contracts import Algorithm, FinishReason, Schedule

_ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_FIRSTS = (8, 16, 32, 64)
_FACTORS = (2.0, 4.0)
_ONE_CUT = (16, 32, 64)
_MEMORIES = (0.5, 0.25, 0.125)  # of what Best-of-N needs
_LEAST_N = 8


@dataclass(frozen=True, slots=True)
class Swept:
    """One setting over all prompts, in their order: [P] arrays.

    scores: of the answers. tokens: generated. regrets, costs: see above.
    """

    setting: Setting
    scores: FloatArray
    tokens: FloatArray
    regrets: FloatArray
    costs: FloatArray
    complete: FloatArray  # 1 where the answer is a complete one

    @property
    def name(self) -> str:
        """The setting in words."""
        return name_of(self.setting)


def default_settings(
    n: int, max_tokens: int, prompt_tokens: int, reward: str
) -> tuple[Setting, ...]:
    """N by doubling up to `n`, nine alphas, schedules of all kinds, and Best-of-N itself."""
    sizes = sorted({n, *(_LEAST_N * 2**i for i in range(20) if _LEAST_N * 2**i < n)})
    schedules = _schedules(max_tokens)
    settings = [Setting(size, 0.0, reward=reward, algorithm=Algorithm.BEST_OF_N) for size in sizes]
    for size in sizes:
        settings += [
            Setting(size, alpha, schedule, reward) for schedule in schedules for alpha in _ALPHAS
        ]
        settings += [
            Setting(size, alpha, Schedule("memory", first=8), reward, slots, snap=True)
            for share in _MEMORIES
            for alpha in _ALPHAS
            # Room for the longest prompt, and the first round.
            if (slots := prompt_tokens + int(share * size * max_tokens))
            >= prompt_tokens + max(size * 8, max_tokens)
        ]
    return tuple(settings)


def _schedules(max_tokens: int) -> list[Schedule]:
    geometric = [
        Schedule(first=first, factor=factor)
        for first in _FIRSTS
        for factor in _FACTORS
        if first < max_tokens
    ]
    return geometric + [
        Schedule("tokens", tokens=(token,)) for token in _ONE_CUT if token < max_tokens
    ]


def sweep(
    kept: Sequence[Trajectories], settings: Sequence[Setting], policy: Policy | None = None
) -> tuple[Swept, ...]:
    """Every setting over every prompt.

    Raises:
        ValueError: the settings name several rewards.
        OffGrid, NeverFits: a setting cannot be replayed.
    """
    rewards = {setting.reward for setting in settings}
    if len(rewards) != 1:
        raise ValueError("a sweep is about one reward")
    columns = [_prompt(each, settings, policy) for each in kept]
    return tuple(
        Swept(setting, *np.array([column[row] for column in columns], dtype=np.float64).T)
        for row, setting in enumerate(settings)
    )


def _prompt(
    kept: Trajectories, settings: Sequence[Setting], policy: Policy | None
) -> list[tuple[float, ...]]:
    """Score, tokens, regret, cost and completeness of one prompt under every setting."""
    replayer = Replayer(kept, settings[0].reward)
    scale = Scale.of(kept, replayer.final)
    rows: list[tuple[float, ...]] = []
    for setting in settings:
        done = replayer.run(setting, policy)
        is_complete = float(done.finish is FinishReason.STOP)
        rows.append((done.score, done.generated_tokens, *scale.measure(done), is_complete))
    return rows


@dataclass(frozen=True, slots=True)
class Scale:
    """What one prompt's rewards and tokens are measured in."""

    best: float  # Best-of-N's reward, of all candidates
    gain: float  # how much better it is than a candidate on average; 0 if it is not
    tokens: int  # of all candidates

    @classmethod
    def of(cls, kept: Trajectories, final: FloatArray) -> Scale:
        """Complete answers and stopped ones alike; see `Replayed.regret`."""
        best = float(final.max())
        return cls(best, max(0.0, best - float(final.mean())), int(kept.num_tokens.sum()))

    def measure(self, done: Replayed) -> tuple[float, float]:
        """Regret and cost of a request."""
        # As `Replayed.regret`, but against all candidates that were written.
        regret = (self.best - done.highest) / self.gain if self.gain else 0.0
        return regret, done.generated_tokens / self.tokens


def name_of(setting: Setting) -> str:
    """A setting in words."""
    if setting.algorithm is Algorithm.BEST_OF_N:
        return f"Best-of-{setting.n}"
    slots = f", {setting.slots} slots" if setting.slots else ""
    return f"N={setting.n}, alpha {setting.alpha:g}, {schedule_text(setting.schedule)}{slots}"


def write(swept: Iterable[Swept], path: Path) -> None:
    """JSON lines, a setting each, and a table of the means beside it, as CSV."""
    swept = list(swept)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_plain(each)) + "\n" for each in swept), "utf-8")
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "n", "alpha", "regret", "cost", "tokens", "score", "complete"])
        writer.writerows(_row(each) for each in swept)


def read(path: Path) -> tuple[Swept, ...]:
    """What was written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no sweep.
    """
    try:
        return tuple(_swept(path.read_text("utf-8")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a sweep: {error}") from None


def _plain(swept: Swept) -> dict[str, Any]:
    setting = asdict(swept.setting) | {"algorithm": swept.setting.algorithm.value}
    names = ("scores", "tokens", "regrets", "costs", "complete")
    return {"setting": setting, **{name: getattr(swept, name).tolist() for name in names}}


def _row(swept: Swept) -> list[str]:
    means = (swept.regrets, swept.costs, swept.tokens, swept.scores, swept.complete)
    setting = swept.setting
    return [swept.name, str(setting.n), f"{setting.alpha:g}", *(f"{x.mean():.6g}" for x in means)]


def _swept(text: str) -> Iterator[Swept]:
    for line in text.splitlines():
        plain = json.loads(line)
        setting = plain.pop("setting")
        schedule = setting.pop("schedule")
        schedule = Schedule(**(schedule | {"tokens": tuple(schedule["tokens"])}))
        algorithm = Algorithm(setting.pop("algorithm"))
        yield Swept(
            Setting(**setting, schedule=schedule, algorithm=algorithm),
            **{name: np.array(values, dtype=np.float64) for name, values in plain.items()},
        )
