"""The settings that the studies replay, and their measurements.

A plan is replayed on every prompt. Where a prompt has more answers than N, several disjoint groups
of N are replayed and averaged. Regret is the reward of Best-of-N less that of Speculative
Rejection, as in `experiments.replay`: both have the same answers, so that luck cancels. One replay
yields both objectives, since a cut has no answers at the limit: complete answers preferred, as in
the service, and the reward alone, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.flops import UNKNOWN, ComputeModel
from experiments.replay import Replayed, Replayer, Setting, decision_tokens
from experiments.studies.best_of_n import curve
from experiments.trajectories import FloatArray, IntArray, Trajectories
from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import (
    FinishReason,
    Schedule,
)

ALPHAS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
DOUBLING = Schedule(first=16, factor=2.0)  # the service's default
MEMORY = Schedule("memory")
_FIRSTS = (8, 16, 32, 64)
_EXPLICIT = ((16, 64, 256), (32,))
_MEMORY_TOKENS = 16
_MIN_N = 16  # with fewer answers there is little to reject
_MAX_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting for every prompt.

    memory_tokens: there are slots for this many tokens of each of the N candidates; 0: unlimited.
    """

    n: int
    alpha: float
    schedule: Schedule
    memory_tokens: int = 0

    @property
    def name(self) -> str:
        """The schedule as text, and the memory."""
        memory = f", slots for {self.memory_tokens} each" if self.memory_tokens else ""
        return f"{self.schedule}{memory}"

    def decision_tokens(self, max_tokens: int) -> tuple[int, ...] | None:
        """The decision tokens before the limit; None where full slots end rounds."""
        return None if self.memory_tokens else decision_tokens(self.schedule, max_tokens)

    def setting(self, reward: str, prompt_tokens: int) -> Setting:
        slots = prompt_tokens + self.n * self.memory_tokens if self.memory_tokens else 0
        return Setting(self.n, self.alpha, self.schedule, reward, slots, snap=True)

    def run(self, replayer: Replayer, rows: IntArray) -> Replayed:
        """Replay these candidates of a prompt; errors as of `Replayer.run`."""
        setting = self.setting(replayer.reward, replayer.trajectories.prompt_tokens)
        return replayer.run(setting, rows)


def plans(
    prompts: Sequence[Trajectories], reward: str, alphas: Sequence[float] = ALPHAS
) -> tuple[Plan, ...]:
    """The plans with all decision tokens on the grid; the largest N first.

    Plans with too little memory for one whole answer are left out.
    """
    max_tokens = min(prompt.max_tokens for prompt in prompts)
    longest = max(prompt.max_tokens for prompt in prompts)
    schedules: list[tuple[Schedule, int]] = [
        (Schedule(first=first), 0) for first in _FIRSTS if first < max_tokens
    ]
    cuts = (tuple(at for at in explicit if at < max_tokens) for explicit in _EXPLICIT)
    schedules += [(Schedule("tokens", tokens=tokens), 0) for tokens in cuts if tokens]
    if max_tokens > _MEMORY_TOKENS:
        schedules.append((MEMORY, _MEMORY_TOKENS))
    return tuple(
        Plan(n, alpha, schedule, memory_tokens)
        for n in ns(prompts)
        for schedule, memory_tokens in schedules
        if not memory_tokens or n * memory_tokens >= longest
        if is_scored(prompts, reward, Plan(n, 0.5, schedule, memory_tokens))
        for alpha in alphas
    )


def ns(prompts: Sequence[Trajectories]) -> tuple[int, ...]:
    """The number of answers per prompt, and three halvings of it."""
    largest = min(prompt.n for prompt in prompts)
    halvings = [largest // 2**i for i in range(4)]
    return tuple(n for n in halvings if n >= _MIN_N) or (largest,)


def base_n(prompts: Sequence[Trajectories]) -> int:
    """N of the improvement score's base: an eighth of the answers per prompt, at least 2 if there
    are so many: of one answer, the best is the worst."""
    most = min(prompt.n for prompt in prompts)
    return min(most, max(2, most // 8))


def is_scored(prompts: Sequence[Trajectories], reward: str, plan: Plan) -> bool:
    """Whether prefixes were scored wherever the plan cuts.

    Full slots end a round at the grid position before, so the first position matters too.
    """
    if reward == LIKELIHOOD:
        return True
    needed = set(plan.decision_tokens(min(prompt.max_tokens for prompt in prompts)) or ())
    return all(
        needed <= set(prompt.positions.tolist())
        and (not plan.memory_tokens or int(prompt.positions[0]) <= plan.memory_tokens)
        for prompt in prompts
    )


def groups(num_candidates: int, n: int) -> list[IntArray]:
    """At most `_MAX_GROUPS` disjoint groups of `n` candidates.

    Raises:
        ValueError: there are fewer than `n` candidates.
    """
    if n > num_candidates:
        raise ValueError(f"{n} candidates of {num_candidates} that were generated")
    starts = range(0, num_candidates - n + 1, n)[:_MAX_GROUPS]
    return [np.arange(start, start + n) for start in starts]


@dataclass(frozen=True, slots=True)
class Measured:
    """A replayed plan: [prompts] arrays, means over groups.

    rewards, regrets: by the reward alone; rewards are Best-of-N's less the regret. values,
    value_regrets: the same with complete answers preferred (`Trajectories.values`); scores,
    complete: the reward of that answer, and the share of complete ones. full_*: of Best-of-N with
    the same N.
    """

    plan: Plan
    rewards: FloatArray
    values: FloatArray
    regrets: FloatArray
    value_regrets: FloatArray
    tokens: FloatArray
    full_tokens: FloatArray
    flops: FloatArray
    scores: FloatArray
    complete: FloatArray
    full_complete: FloatArray


def measure_all(
    replayers: Sequence[Replayer],
    compute: ComputeModel = UNKNOWN,
    alphas: Sequence[float] = ALPHAS,
) -> tuple[Measured, ...]:
    """Replay all plans on every prompt, the largest N first.

    Raises:
        ValueError: none of the plans can be replayed.
    """
    prompts = [replayer.trajectories for replayer in replayers]
    chosen = plans(prompts, replayers[0].reward, alphas)
    if not chosen:
        raise ValueError("no prefix was scored where a schedule would cut")
    return tuple(measure(replayers, plan, compute) for plan in chosen)


def default_of(measured: Sequence[Measured]) -> Measured:
    """The service's default with the largest N, or the plan that is nearest to it."""
    n = measured[0].plan.n
    usual = [run for run in measured if run.plan == Plan(n, run.plan.alpha, DOUBLING)]
    return min(usual or measured, key=lambda run: abs(run.plan.alpha - 0.5))


def measure(replayers: Sequence[Replayer], plan: Plan, compute: ComputeModel) -> Measured:
    """Replay one plan on every prompt.

    Raises:
        ValueError: a prompt has fewer answers than N.
        OffGrid: a round ends where no prefix was scored.
    """
    rows = np.array([_means(replayer, plan, compute) for replayer in replayers])
    prompts = [replayer.trajectories for replayer in replayers]
    best, best_value = (
        curve(prompts, replayers[0].reward, [plan.n], prefer_complete=preferred).rewards[:, 0]
        for preferred in (False, True)
    )
    return Measured(plan, best - rows[:, 0], best_value - rows[:, 1], *rows.T)


def _means(replayer: Replayer, plan: Plan, compute: ComputeModel) -> FloatArray:
    """The fields of Measured from `regrets` on, for one prompt."""
    prompt, rows = replayer.trajectories, []
    for group in groups(prompt.n, plan.n):
        run = plan.run(replayer, group)
        rows.append(
            (
                run.regret_alone,
                run.regret,
                run.generated_tokens,
                run.best_of_n_tokens,
                compute.flops(prompt.prompt_tokens, run),
                run.score,
                run.finish is FinishReason.STOP,
                prompt.finished[run.best_of_n_answer],
            )
        )
    means: FloatArray = np.mean(np.array(rows, dtype=np.float64), axis=0)
    return means
