"""One prompt under the memory schedule, round by round: the paper's first figure.

Slots fill while answers grow. When they are full, the lowest-ranked candidates are rejected and the
rest continue. So memory stays full while the batch shrinks; Best-of-N needs memory for every answer
to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.replay import Replayed, Replayer
from experiments.studies.plans import Plan
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, IntArray, Trajectories

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_POINTS = 64  # lengths between rounds


@dataclass(frozen=True, slots=True)
class Round:
    """A cut. quantiles, kept_quantiles: of rewards at QUANTILES, of all ranked and of survivors;
    the latter are empty in the last round."""

    length: int
    live: int
    live_after: int
    slots: int
    slots_after: int
    quantiles: tuple[float, ...]
    kept_quantiles: tuple[float, ...]

    @property
    def kept_median(self) -> float:
        """The median reward of survivors; NaN in the last round."""
        return self.kept_quantiles[2] if self.kept_quantiles else float("nan")


@dataclass(frozen=True, slots=True)
class Moment:
    """Live candidates and slots at a length; full_*: of Best-of-N with the same N."""

    length: int
    live: int
    slots: int
    full_live: int
    full_slots: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One prompt. `slots` is the capacity."""

    reward: str
    prompt_id: str
    n: int
    alpha: float
    slots: int
    rounds: tuple[Round, ...]
    moments: tuple[Moment, ...]

    @property
    def full_slots(self) -> int:
        """The slots that Best-of-N holds at once."""
        return max(moment.full_slots for moment in self.moments)

    def tables(self) -> tuple[Table, ...]:
        """A row per round."""
        columns = {
            "length": "length",
            "live before": "live",
            "live after": "live_after",
            "slots before": "slots",
            "slots after": "slots_after",
            "lowest": lambda row: row.quantiles[0],
            "lower quarter": lambda row: row.quantiles[1],
            "median reward": lambda row: row.quantiles[2],
            "upper quarter": lambda row: row.quantiles[3],
            "highest": lambda row: row.quantiles[4],
            "median of those kept": "kept_median",
        }
        caption = f"Prompt {self.prompt_id}: {self.n} answers in {self.slots:,} slots"
        return (Table.of("anatomy", caption, self.rounds, columns),)


def study(replayer: Replayer, plan: Plan) -> Anatomy:
    """Of one prompt with its first `plan.n` candidates.

    Raises:
        OffGrid: a round ends before the grid begins.
    """
    prompt, rows = replayer.trajectories, np.arange(plan.n)
    replayed = plan.run(replayer, rows)
    rounds, live = [], rows
    for played in replayed.rounds:
        survivors = np.array(played.survivors, dtype=np.int64)
        rounds.append(_round(replayer, played.decision_token, live, survivors))
        live = survivors
    return Anatomy(
        replayer.reward,
        prompt.prompt_id,
        plan.n,
        plan.alpha,
        plan.setting(replayer.reward, prompt.prompt_tokens).slots,
        tuple(rounds),
        _moments(prompt, rows, replayed),
    )


def _round(replayer: Replayer, position: int, started: IntArray, survivors: IntArray) -> Round:
    prompt = replayer.trajectories
    is_live = prompt.num_tokens[started] > position
    growing, ended = started[is_live], started[~is_live]
    scores, kept = replayer.final[ended], np.empty(0)
    if len(growing):
        partial = replayer.partial(position)
        scores, kept = np.concatenate([scores, partial[growing]]), partial[survivors]
    return Round(
        position,
        len(growing),
        len(survivors),
        prompt.prompt_tokens + len(growing) * (position - 1),
        prompt.prompt_tokens + len(survivors) * (position - 1),
        _quantiles(scores),
        _quantiles(kept) if len(kept) else (),
    )


def _quantiles(scores: FloatArray) -> tuple[float, ...]:
    return tuple(np.quantile(scores, QUANTILES).tolist())


def _moments(prompt: Trajectories, rows: IntArray, replayed: Replayed) -> tuple[Moment, ...]:
    """At the cuts and at lengths between them, since answers end between cuts too."""
    longest = int(prompt.num_tokens[rows].max())
    lengths = np.unique(np.linspace(1, longest, _POINTS).astype(np.int64))
    moments = []
    members, start = rows, 0
    for played in replayed.rounds:
        # A cut has two moments, before and after it: memory is a sawtooth.
        inside = lengths[(lengths > start) & (lengths < played.decision_token)]
        points = [*([start] if start else []), *inside.tolist(), played.decision_token]
        moments += [_moment(prompt, rows, members, length) for length in points]
        members, start = np.array(played.survivors, dtype=np.int64), played.decision_token
    rest = lengths[lengths > start].tolist()
    return (*moments, *(_moment(prompt, rows, rows[:0], length) for length in rest))


def _moment(prompt: Trajectories, rows: IntArray, members: IntArray, length: int) -> Moment:
    # An answer of exactly this length still holds its slots.
    live = int((prompt.num_tokens[members] >= length).sum())
    full = int((prompt.num_tokens[rows] >= length).sum())
    base, stored = prompt.prompt_tokens, length - 1  # the newest token is not stored yet
    return Moment(length, live, base + live * stored, full, base + full * stored)
