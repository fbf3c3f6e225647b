"""All studies of one collection under one reward. Draws nothing and writes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.flops import UNKNOWN, ComputeModel
from experiments.replay import Replayer
from experiments.studies import (
    anatomy,
    best_of_n,
    frontier,
    improvement,
    matched,
    perplexity,
    prefixes,
)
from experiments.studies.anatomy import Anatomy
from experiments.studies.best_of_n import BestOfN, Lengths
from experiments.studies.frontier import Frontier
from experiments.studies.improvement import Improvement, LiveRun
from experiments.studies.matched import Matched
from experiments.studies.perplexity import Perplexity
from experiments.studies.plans import (
    ALPHAS,
    DOUBLING,
    MEMORY,
    Plan,
    base_n,
    default_of,
    measure_all,
    ns,
)
from experiments.studies.prefixes import Correlation, Failures
from experiments.studies.tables import Result, Table
from experiments.trajectories import Trajectories
from orchestrator.loop.composition import LIKELIHOOD


@dataclass(frozen=True, slots=True)
class Facts:
    """The size of the collection; lengths are of all answers."""

    num_prompts: int
    n: int
    max_tokens: int
    mean_tokens: float
    complete_share: float
    num_plans: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """A collection studied under a reward.

    perplexity: of the likelihood only. anatomy: None if prefixes were not scored early enough.
    """

    collection: str
    reward: str
    facts: Facts
    matched: Matched
    lengths: Lengths
    best_of_n: BestOfN
    frontier: Frontier
    correlation: Correlation
    perplexity: Perplexity | None
    improvement: Improvement
    anatomy: Anatomy | None
    failures: Failures

    @property
    def slug(self) -> str:
        """A name for files and HTML ids."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.collection} {self.reward}".lower()).strip("-")

    def tables(self) -> tuple[Table, ...]:
        results: tuple[Result | None, ...] = (
            *(self.matched, self.lengths, self.best_of_n, self.frontier, self.correlation),
            *(self.perplexity, self.improvement, self.anatomy, self.failures),
        )
        return tuple(table for result in results if result for table in result.tables())


def analyse(
    collection: str,
    prompts: Sequence[Trajectories],
    reward: str,
    live: Sequence[LiveRun] = (),
    compute: ComputeModel = UNKNOWN,
    alphas: Sequence[float] = ALPHAS,
) -> Analysis:
    """Run every study; takes some milliseconds per plan and prompt.

    Raises:
        ValueError: there are no prompts, or none of the plans can be replayed.
        KeyError: the reward was not collected.
    """
    if not prompts:
        raise ValueError(f"{collection} has no prompts")
    replayers = [Replayer(prompt, reward) for prompt in prompts]
    measured = measure_all(replayers, compute, alphas)
    full_flops = compute.best_of_n(replayers)
    n, base, default = ns(prompts)[0], base_n(prompts), default_of(measured)
    correlation = prefixes.correlation(prompts, reward)
    probable = None
    if reward == LIKELIHOOD:
        usual = [run for run in measured if run.plan == Plan(n, run.plan.alpha, DOUBLING)]
        probable = perplexity.study(prompts, usual, sorted({base, n}))
    return Analysis(
        collection,
        reward,
        _facts(prompts, len(measured)),
        matched.study(prompts, reward, measured, full_flops),
        best_of_n.lengths(prompts, reward),
        best_of_n.study(prompts, reward),
        frontier.study(replayers, measured, correlation),
        correlation,
        probable,
        improvement.study(prompts, reward, measured, base, full_flops, compute.name, live),
        _anatomy(replayers[0]),
        prefixes.failures(prompts, reward, default.regrets),
    )


def _anatomy(replayer: Replayer) -> Anatomy | None:
    """Of the first prompt, with slots for a sixteenth of its answers' tokens.

    There are at least slots for one whole answer, and for 16 tokens of each.
    """
    prompt = replayer.trajectories
    n = ns([prompt])[0]
    memory_tokens = max(16, int(prompt.num_tokens.mean()) // 16, math.ceil(prompt.max_tokens / n))
    if int(prompt.positions[0]) > memory_tokens or prompt.max_tokens <= memory_tokens:
        return None
    return anatomy.study(replayer, Plan(n, 0.5, MEMORY, memory_tokens))


def _facts(prompts: Sequence[Trajectories], num_plans: int) -> Facts:
    return Facts(
        len(prompts),
        min(prompt.n for prompt in prompts),
        max(prompt.max_tokens for prompt in prompts),
        float(np.concatenate([prompt.num_tokens for prompt in prompts]).mean()),
        float(np.concatenate([prompt.finished for prompt in prompts]).mean()),
        num_plans,
        tuple(prompt.seed for prompt in prompts),
    )
