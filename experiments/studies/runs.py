"""What the studies replay: plans, and the groups of candidates that they are replayed on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from experiments.replay import Replayed, Replayer, Setting
from experiments.trajectories import IntArray
from orchestrator.schedule import next_decision_token
from specrej.contracts import Schedule

MEMORY = Schedule("memory")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay on every prompt.

    memory_tokens: slots suffice for so many tokens of each of the N candidates; 0: for all.
    """

    n: int
    alpha: float
    schedule: Schedule
    memory_tokens: int = 0

    @property
    def name(self) -> str:
        """The schedule, in words."""
        match self.schedule.kind:
            case "geometric":
                planned = f"from {self.schedule.first}, x{self.schedule.factor:g}"
            case "tokens":
                planned = "at " + ", ".join(map(str, self.schedule.tokens))
            case _:
                planned = ""
        memory = f"memory for {self.memory_tokens} each" if self.memory_tokens else ""
        return "; ".join(filter(None, (planned, memory))) or "no cuts"

    def planned(self, max_tokens: int) -> tuple[int, ...] | None:
        """Its decision tokens before the limit; None where memory decides."""
        if self.memory_tokens:
            return None
        ends = [0]
        while ends[-1] < max_tokens:
            ends.append(next_decision_token(self.schedule, ends[-1], max_tokens))
        return tuple(ends[1:-1])

    def setting(self, reward: str, prompt_tokens: int) -> Setting:
        """The same for a replay."""
        slots = prompt_tokens + self.n * self.memory_tokens if self.memory_tokens else 0
        return Setting(self.n, self.alpha, self.schedule, reward, slots, snap=True)


def run(replayer: Replayer, plan: Plan, rows: IntArray) -> Replayed:
    """Replay a plan on these candidates of a prompt.

    Raises:
        OffGrid: a round ends where no prefix was scored.
        NeverFits: memory is too little for a candidate alone.
    """
    kept = replayer.trajectories
    setting = plan.setting(replayer.reward, kept.prompt_tokens)
    return replayer.run(setting, candidates=rows)


def groups(num_candidates: int, n: int, most: int) -> list[IntArray]:
    """Disjoint groups of `n` candidates, `most` of them at most.

    Raises:
        ValueError: there are not even so many candidates.
    """
    if n > num_candidates:
        raise ValueError(f"{n} candidates of {num_candidates} that were written")
    starts = itertools.islice(range(0, num_candidates - n + 1, n), most)
    return [np.arange(start, start + n) for start in starts]
