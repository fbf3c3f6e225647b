"""Replays a request without a model, from complete trajectories.

The tokens of a candidate depend on its seed, id and step only, not on the other candidates. So one
set of complete answers is enough to replay any number of candidates, alpha, schedule and capacity
exactly: cuts are those of `orchestrator.loop.rejection.cut`, decision tokens those of
`orchestrator.loop.schedule`, and full slots are counted as in the engine.

A score is needed wherever a round ends. The likelihood is available at every token, other rewards
only on the grid of positions at which prefixes were scored.

The answer is the one with the highest reward, complete or not, as by default and in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.trajectories import IntArray, Trajectories
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.rejection import cut, num_released
from orchestrator.loop.schedule import first_round_tokens, next_decision_token
from specrej.contracts import FinishReason, Schedule, Selection


def decision_tokens(schedule: Schedule, max_tokens: int) -> tuple[int, ...]:
    """The planned decision tokens before the limit."""
    ends = [0]
    while ends[-1] < max_tokens:
        ends.append(next_decision_token(schedule, ends[-1], max_tokens))
    return tuple(ends[1:-1])


@dataclass(frozen=True, slots=True)
class Setting:
    """How one prompt is answered.

    n: 0 is all candidates of the trajectories. slots: the generator's capacity, all of it for this
    request; 0: unlimited. Full slots end a round at the position of the grid before.
    """

    n: int = 0
    alpha: float = Selection().alpha
    schedule: Schedule = Selection().schedule
    reward: str = LIKELIHOOD
    slots: int = 0

    @property
    def name(self) -> str:
        """The setting as text."""
        slots = f", {self.slots} slots" if self.slots else ""
        return f"N={self.n}, alpha {self.alpha:g}, {self.schedule}{slots}"


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One round; fields as in `specrej.contracts.RoundTrace`.

    survivors: the candidates that are live in the next round.
    """

    decision_token: int
    num_started: int
    generated_tokens: int
    survivors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one request; best_of_n_*: of Best-of-N with the same candidates."""

    answer: int
    score: float
    finish: FinishReason
    generated_tokens: int
    rounds: tuple[ReplayedRound, ...]
    best_of_n_score: float
    best_of_n_tokens: int

    @property
    def regret(self) -> float:
        """The reward of Best-of-N's answer less that of this one; at least 0."""
        return self.best_of_n_score - self.score


def replay(
    trajectories: Trajectories, setting: Setting, candidates: Sequence[int] | IntArray | None = None
) -> Replayed:
    """Replay a request with these candidates, by default the first n.

    Ids in the result are those of the trajectories. Of equal scores the earlier candidate ranks
    first.

    Raises:
        KeyError: the reward was not collected.
        ValueError: a round ends where no prefix was scored, the generator would refuse the request
            for its slots, or `setting.n` is above the number of candidates.
    """
    if candidates is None:
        n = setting.n or trajectories.n
        if n > trajectories.n:
            raise ValueError(f"{n} candidates of {trajectories.n} that were generated")
        candidates = np.arange(n)
    return _Request(trajectories, setting, np.asarray(candidates, dtype=np.int64)).run()


class _Request:
    """One request in progress; candidates are rows 0, 1, ... of the arrays here."""

    def __init__(self, prompt: Trajectories, setting: Setting, rows: IntArray) -> None:
        self._prompt = prompt
        self._setting = setting
        self._ids = rows
        self._max_tokens = prompt.max_tokens
        self._num_tokens = prompt.num_tokens[rows]
        self._is_complete = prompt.finished[rows]
        self._final = prompt.final(setting.reward)[rows]
        self._share = self._admitted_share()
        self._live = np.arange(len(rows))
        self._ranked: dict[int, float] = {}  # scores of finished candidates still in the ranking
        self._ended = np.zeros(len(rows), dtype=np.bool_)
        self._position = 0
        self._rounds: list[ReplayedRound] = []

    def run(self) -> Replayed:
        """Rounds until no candidate is live; see `orchestrator.loop.run.run`."""
        while len(self._live):
            self._rounds.append(self._round())
        # The first of equal scores, as in `orchestrator.loop.rejection.rank`.
        answer = int(np.argmax(np.where(self._ended, self._final, -np.inf)))
        return Replayed(
            answer=int(self._ids[answer]),
            score=float(self._final[answer]),
            finish=FinishReason.STOP if self._is_complete[answer] else FinishReason.LENGTH,
            generated_tokens=sum(round_.generated_tokens for round_ in self._rounds),
            rounds=tuple(self._rounds),
            best_of_n_score=float(self._final.max()),
            best_of_n_tokens=int(self._num_tokens.sum()),
        )

    def _round(self) -> ReplayedRound:
        """Extend, score, reject; see `_Run.round` in `orchestrator.loop.run`."""
        started, start = self._live, self._position
        self._position, is_full = self._end_of_round()
        lengths = np.minimum(self._num_tokens[started], self._position)
        has_ended = self._num_tokens[started] <= self._position
        finished, grown = started[has_ended], started[~has_ended]
        self._ended[finished] = True
        self._ranked.update(zip(finished.tolist(), self._final[finished].tolist(), strict=True))
        self._live = self._survivors(grown, is_full=is_full)
        return ReplayedRound(
            decision_token=self._position,
            num_started=len(started),
            generated_tokens=int((lengths - start).sum()),
            survivors=tuple(self._ids[self._live].tolist()),
        )

    def _survivors(self, grown: IntArray, *, is_full: bool) -> IntArray:
        """Cut the ranking; returns the candidates that stay live. is_full: slots end the round."""
        if not len(grown):
            return grown
        live = grown.tolist()
        partial = self._prompt.partial(self._setting.reward, self._position)[self._ids[grown]]
        scores = self._ranked | dict(zip(live, partial.tolist(), strict=True))
        release = num_released(len(live), self._position) if is_full else 0
        kept = cut(scores, set(live), self._setting.alpha, release=release)
        survives = np.fromiter((row in kept for row in live), np.bool_, len(live))
        self._ranked = {row: score for row, score in self._ranked.items() if row in kept}
        return grown[survives]

    def _end_of_round(self) -> tuple[int, bool]:
        """Where the round ends, and whether full slots end it; see `engine.engine`."""
        lengths = self._num_tokens[self._live]
        until = next_decision_token(self._setting.schedule, self._position, self._max_tokens)
        full = self._full_at(lengths, until)
        if full is not None:
            return self._on_grid(full), True
        return min(until, int(lengths.max())), False

    def _full_at(self, lengths: IntArray, until: int) -> int | None:
        """The first position, before `until`, at which the live candidates cannot grow by a token.

        A live candidate has stored all its tokens but the newest there, and needs one more slot.
        """
        if self._share is None or len(lengths) * until <= self._share:
            return None
        # The first token is drawn from the prompt and needs no slot.
        positions = np.arange(max(1, self._position), until)
        num_live = len(lengths) - np.searchsorted(np.sort(lengths), positions, side="right")
        full = np.flatnonzero(num_live * positions > self._share)
        return int(positions[full[0]]) if len(full) else None

    def _on_grid(self, position: int) -> int:
        """The last position of the grid that is not after this one."""
        if self._setting.reward == LIKELIHOOD:
            return position
        positions = self._prompt.positions
        index = int(np.searchsorted(positions, position, side="right"))
        if not index:
            raise ValueError(f"slots are full at token {position}, before the grid begins")
        return max(int(positions[index - 1]), self._position)

    def _admitted_share(self) -> int | None:
        """Slots for the candidates' tokens; None: unlimited.

        Raises:
            ValueError: it never fits, by the engine's rule of admission.
        """
        if not self._setting.slots:
            return None
        first = first_round_tokens(self._setting.schedule, self._max_tokens)
        floor = max(len(self._ids) * max(0, first - 1), self._max_tokens - 1)
        needed = self._prompt.prompt_tokens + floor
        if needed > self._setting.slots:
            raise ValueError(f"needs {needed} slots, there are {self._setting.slots}")
        return self._setting.slots - self._prompt.prompt_tokens
