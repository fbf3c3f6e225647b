"""One prompt under the memory schedule, round by round: the paper's first figure.

Slots fill while answers grow; when they are full, the lowest are rejected and the rest grows on. So
memory stays full while the batch shrinks, where Best-of-N would need memory for every answer to its
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import Replayed, Replayer
from experiments.studies.runs import Plan, run
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, IntArray, Trajectories

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_POINTS = 64  # lengths between rounds


@dataclass(frozen=True, slots=True)
class Round:
    """At a cut: rewards are quantiles of those ranked there, then of those that go on.

    quantiles, kept_quantiles: at QUANTILES; the latter empty in the last round.
    """

    length: int
    live: int
    live_after: int
    slots: int
    slots_after: int
    quantiles: tuple[float, ...]
    kept_quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """Live candidates and slots at a length; full_*: of Best-of-N with as many."""

    length: int
    live: int
    slots: int
    full_live: int
    full_slots: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The study's result. `slots` is the capacity."""

    reward: str
    prompt_id: str
    n: int
    alpha: float
    slots: int
    rounds: tuple[Round, ...]
    moments: tuple[Moment, ...]

    def tables(self) -> tuple[Table, ...]:
        """A row per round."""
        headings = (
            *("length", "live before", "live after", "slots before", "slots after"),
            *("lowest", "lower quarter", "median reward", "upper quarter", "highest"),
            "median of those kept",
        )
        rows = tuple(
            (
                *(r.length, r.live, r.live_after, r.slots, r.slots_after),
                *r.quantiles,
                r.kept_quantiles[2] if r.kept_quantiles else float("nan"),
            )
            for r in self.rounds
        )
        caption = f"Prompt {self.prompt_id}: {self.n} answers in {self.slots:,} slots"
        return (Table("anatomy", caption, headings, rows),)


def study(replayer: Replayer, plan: Plan) -> Anatomy:
    """Of one prompt, its first candidates.

    Raises:
        OffGrid: a round ends before the grid begins.
    """
    kept, rows = replayer.trajectories, np.arange(plan.n)
    found = run(replayer, plan, rows)
    rounds, live = [], rows
    for each in found.rounds:
        after = np.array(each.survivors, dtype=np.int64)
        rounds.append(_round(replayer, each.decision_token, live, after))
        live = after
    return Anatomy(
        replayer.reward,
        kept.prompt_id,
        plan.n,
        plan.alpha,
        plan.setting(replayer.reward, kept.prompt_tokens).slots,
        tuple(rounds),
        _moments(kept, rows, found),
    )


def _round(replayer: Replayer, position: int, live: IntArray, after: IntArray) -> Round:
    """`live` are those that began it."""
    kept = replayer.trajectories
    growing = live[kept.num_tokens[live] > position]
    ended = live[kept.num_tokens[live] <= position]
    scores = replayer.final[ended]
    if len(growing):
        scores = np.concatenate([scores, replayer.partial(position)[growing]])
    passed = replayer.partial(position)[after] if len(after) else np.empty(0)
    return Round(
        position,
        len(growing),
        len(after),
        kept.prompt_tokens + len(growing) * position,
        kept.prompt_tokens + len(after) * position,
        _quantiles(scores),
        _quantiles(passed) if len(passed) else (),
    )


def _quantiles(scores: FloatArray) -> tuple[float, ...]:
    return tuple(float(each) for each in np.quantile(scores, QUANTILES))


def _moments(kept: Trajectories, rows: IntArray, found: Replayed) -> tuple[Moment, ...]:
    """Between rounds too: answers end all the time."""
    longest = int(kept.num_tokens[rows].max())
    lengths = np.unique(np.linspace(1, longest, _POINTS).astype(np.int64))
    moments = []
    started: Sequence[int] | IntArray = rows
    begins = 0
    for each in found.rounds:
        members = np.asarray(started, dtype=np.int64)
        # At a cut there are two moments, before it and after it: memory is a saw-tooth.
        inside = lengths[(lengths > begins) & (lengths < each.decision_token)]
        points = [*([begins] if begins else []), *inside.tolist(), each.decision_token]
        moments += [_moment(kept, rows, members, length) for length in points]
        started, begins = each.survivors, each.decision_token
    rest = lengths[lengths > begins]
    return (*moments, *(_moment(kept, rows, rows[:0], int(length)) for length in rest))


def _moment(kept: Trajectories, rows: IntArray, members: IntArray, length: int) -> Moment:
    # An answer of exactly this length still holds its slots.
    live = int((kept.num_tokens[members] >= length).sum())
    full = int((kept.num_tokens[rows] >= length).sum())
    prompt = kept.prompt_tokens
    return Moment(length, live, prompt + live * length, full, prompt + full * length)
