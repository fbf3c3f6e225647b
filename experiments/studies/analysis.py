"""All studies of one collection under one reward. Replays, draws nothing and writes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import Replayer
from experiments.studies import (
    anatomy,
    best_of_n,
    correlation,
    failures,
    improvement,
    lengths,
    matched,
    perplexity,
    sweep,
)
from experiments.studies.compute import UNKNOWN, ComputeModel, best_of_n_flops
from experiments.studies.live import LiveRun
from experiments.studies.plans import ALPHAS, DOUBLING, base_n, numbers, plans
from experiments.studies.runs import MEMORY, Plan
from experiments.studies.sweep import Measured
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories
from orchestrator.composition import LIKELIHOOD

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was studied; lengths are of all answers."""

    num_prompts: int
    n: int
    max_tokens: int
    mean_tokens: float
    complete_share: float
    num_plans: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """A collection and a reward, studied. `perplexity` is of the likelihood alone."""

    collection: str
    reward: str
    facts: Facts
    lengths: lengths.Lengths
    best_of_n: best_of_n.BestOfN
    sweep: sweep.Sweep
    correlation: correlation.Correlation
    perplexity: perplexity.Perplexity | None
    improvement: improvement.Improvement
    matched: matched.Matched
    anatomy: anatomy.Anatomy | None
    failures: failures.Failures

    @property
    def slug(self) -> str:
        """A name for files and elements."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.collection} {self.reward}".lower())
        return words.strip("-")

    def tables(self) -> tuple[Table, ...]:
        """Of all studies."""
        results = (
            *(self.matched, self.lengths, self.best_of_n, self.sweep, self.correlation),
            *(self.perplexity, self.improvement, self.anatomy, self.failures),
        )
        return tuple(table for each in results if each is not None for table in each.tables())


def analyse(
    collection: str,
    prompts: Sequence[Trajectories],
    reward: str,
    live: Sequence[LiveRun] = (),
    compute: ComputeModel = UNKNOWN,
    alphas: Sequence[float] = ALPHAS,
    say: Say = lambda text: None,
) -> Analysis:
    """Every study; takes some milliseconds per plan and prompt.

    Raises:
        ValueError: there are no prompts.
        KeyError: the reward was not collected.
    """
    if not prompts:
        raise ValueError(f"{collection} has no prompts")
    say(f"{collection}: replaying on {len(prompts)} prompts by {reward}")
    replayers = [Replayer(each, reward) for each in prompts]
    measured = _measured(replayers, plans(prompts, reward, alphas), compute)
    full_flops = best_of_n_flops(replayers, compute)
    # Every study of settings looks at all of them; these two at the service's default schedule.
    ours = [each for each in measured if _is_default(each.plan, prompts)]
    base = base_n(prompts)
    return Analysis(
        collection,
        reward,
        _facts(prompts, len(measured)),
        lengths.study(prompts, reward),
        best_of_n.study(prompts, reward),
        sweep.study(prompts, reward, measured, base),
        correlation.study(prompts, reward),
        perplexity.study(prompts, ours, _baselines(prompts)) if reward == LIKELIHOOD else None,
        improvement.study(*(prompts, reward, measured, base, full_flops, compute.name), live=live),
        matched.study(prompts, reward, measured, full_flops),
        _anatomy(replayers[0]),
        failures.study(prompts, reward, _regrets(ours or measured)),
    )


def _measured(
    replayers: Sequence[Replayer], chosen: Sequence[Plan], compute: ComputeModel
) -> tuple[Measured, ...]:
    if not chosen:
        raise ValueError("no prefix was scored where a schedule would cut")
    return tuple(sweep.measure(replayers, plan, compute) for plan in chosen)


def _is_default(plan: Plan, prompts: Sequence[Trajectories]) -> bool:
    return (plan.n, plan.schedule, plan.memory_tokens) == (numbers(prompts)[0], DOUBLING, 0)


def _baselines(prompts: Sequence[Trajectories]) -> tuple[int, ...]:
    return tuple(sorted({base_n(prompts), numbers(prompts)[0]}))


def _regrets(measured: Sequence[Measured]) -> np.typing.NDArray[np.float64]:
    """At alpha 0.5, or what comes closest."""
    return min(measured, key=lambda each: abs(each.plan.alpha - 0.5)).regrets


def _anatomy(replayer: Replayer) -> anatomy.Anatomy | None:
    """Of the first prompt, with memory for a sixteenth of what its answers would fill.

    But for one of them at least, and for 16 tokens of each.
    """
    kept = replayer.trajectories
    n = numbers([kept])[0]
    memory_tokens = max(16, int(kept.num_tokens.mean()) // 16, math.ceil(kept.max_tokens / n))
    if int(kept.positions[0]) > memory_tokens or kept.max_tokens <= memory_tokens:
        return None
    return anatomy.study(replayer, Plan(n, 0.5, MEMORY, memory_tokens))


def _facts(prompts: Sequence[Trajectories], num_plans: int) -> Facts:
    lengths = np.concatenate([each.num_tokens for each in prompts])
    finished = np.concatenate([each.finished for each in prompts])
    return Facts(
        len(prompts),
        min(each.n for each in prompts),
        max(each.max_tokens for each in prompts),
        float(lengths.mean()),
        float(finished.mean()),
        num_plans,
        tuple(each.seed for each in prompts),
    )
