"""What a request would have done, without a model: pure arithmetic on written-out trajectories.

What a candidate says depends on its seed, id and step only, never on who else is there. So any
number of candidates, alpha, schedule, policy and capacity can be replayed from one set of whole
answers, exactly: the cuts are `orchestrator.rejection.cut`, the decision tokens those of
`orchestrator.schedule`, and full slots are counted as the engine counts them.

A score is needed wherever a round ends. The likelihood is known at every token; other rewards only
on the grid, where their prefixes were scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from experiments.trajectories import FloatArray, IntArray, OffGrid, Trajectories, likelihood_sums
from orchestrator.composition import LIKELIHOOD
from orchestrator.rejection import cut
from orchestrator.run import first_round_tokens
from orchestrator.schedule import next_decision_token
from specrej.contracts import (
    Algorithm,
    FinishReason,
    GenerationRequest,
    RoundEnd,
    Sampling,
    Schedule,
    Selection,
)


class NeverFits(ValueError):
    """The generator would refuse this: so many slots are never free."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How one prompt is answered; `n` 0 means all candidates that there are.

    slots: the generator's capacity, all of it for this request; 0: more than enough.
    snap: a round that full slots end between two positions of the grid ends at the one before.
    """

    n: int = 0
    alpha: float = 0.5
    schedule: Schedule = field(default_factory=Schedule)
    reward: str = LIKELIHOOD
    slots: int = 0
    algorithm: Algorithm = Algorithm.SPECULATIVE_REJECTION
    snap: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy knows when a round ends.

    ranked: scores of all that are ranked, finished and live. live: those of the live ones.
    best_finished: the best score of a complete answer, ranked out or not; -inf without one.
    """

    number: int
    decision_token: int
    next_token: int  # where the next round is planned to end
    max_tokens: int
    ranked: FloatArray
    live: FloatArray
    best_finished: float
    asked: float  # the request's alpha


class Policy(Protocol):
    """Decides how many are rejected."""

    def alpha(self, seen: Seen) -> float:
        """The fraction of those that are ranked to be rejected, from 0 to less than 1."""


class AskedAlpha:
    """The request's own, in every round."""

    def alpha(self, seen: Seen) -> float:
        return seen.asked


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One round; fields as in `specrej.contracts.RoundTrace`. `survivors`: who goes on."""

    number: int
    decision_token: int
    ended_by: RoundEnd
    num_started: int
    num_finished: int
    num_rejected: int
    num_live: int
    best_score: float
    session_slots: int
    freed_slots: int
    generated_tokens: int
    alpha: float
    survivors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One request.

    attended_tokens: over all generated tokens, the candidate's own tokens before each.
    scored_lengths: tokens of each prefix and answer that the reward was asked about. One that
    keeps nothing between rounds computes them all; one that does, about `generated_tokens`.
    best_of_n_*: of the same candidates, all of them to their ends.
    highest: score among all that were written to their ends, their own or the limit. The answer's,
    unless the service prefers a complete one to it.
    """

    answer: int
    score: float
    finish: FinishReason
    answer_tokens: int
    generated_tokens: int
    attended_tokens: int
    scored_lengths: tuple[int, ...]
    rounds: tuple[ReplayedRound, ...]
    best_of_n_answer: int
    best_of_n_score: float
    best_of_n_tokens: int
    highest: float
    best_of_n_highest: float

    @property
    def regret(self) -> float:
        """How much lower the highest score is than Best-of-N's of the same candidates; never
        below 0.

        As in the paper, the limit ends an answer as well as an end token. Where most are stopped by
        it, the few complete ones would else be the best whatever they score.
        """
        return self.best_of_n_highest - self.highest

    @property
    def compute_ratio(self) -> float:
        """Tokens of Best-of-N per token."""
        return self.best_of_n_tokens / self.generated_tokens


class Replayer:
    """One prompt under one reward, prepared for many settings."""

    def __init__(self, trajectories: Trajectories, reward: str) -> None:
        """Raises KeyError: the reward was not collected."""
        self.trajectories = trajectories
        self.reward = reward
        self.final = trajectories.scores(reward).final
        self._sums = likelihood_sums(trajectories.logprobs) if reward == LIKELIHOOD else None
        self._columns: dict[int, FloatArray] = {}

    def partial(self, position: int) -> FloatArray:
        """[N] scores of the first `position` tokens; of no use where fewer were written.

        Raises:
            OffGrid: no prefix was scored there.
        """
        column = self._columns.get(position)
        if column is None:
            if self._sums is not None:
                column = self._sums[:, position - 1] / position
            else:
                column = self.trajectories.partial_at(self.reward, position)
            self._columns[position] = column
        return column

    def run(
        self,
        setting: Setting,
        policy: Policy | None = None,
        candidates: Sequence[int] | IntArray | None = None,
    ) -> Replayed:
        """What the request would have done with the first n candidates, or with these.

        Ids in the outcome are those of the trajectories. Of equal scores the earlier candidate's
        ranks first.

        Raises:
            OffGrid: a round ends where no prefix was scored.
            NeverFits: the request would have been refused.
            ValueError: there are not so many candidates.
        """
        if candidates is None:
            n = setting.n or self.trajectories.n
            if n > self.trajectories.n:
                raise ValueError(f"{n} candidates of {self.trajectories.n} that were written")
            candidates = np.arange(n)
        rows = np.asarray(candidates, dtype=np.int64)
        return _Request(self, setting, policy or AskedAlpha(), rows).run()


def highest_answer(trajectories: Trajectories, reward: str) -> int:
    """The candidate with the highest score of all, the first of equals; see `Replayed.regret`."""
    return int(np.argmax(trajectories.scores(reward).final))


def replay(
    trajectories: Trajectories,
    setting: Setting,
    policy: Policy | None = None,
    candidates: Sequence[int] | IntArray | None = None,
) -> Replayed:
    """One prompt under one setting; as `Replayer.run`, which is faster for many settings."""
    return Replayer(trajectories, setting.reward).run(setting, policy, candidates)


class _Request:
    """One request under way; candidates are rows 0, 1, ... of the arrays here."""

    def __init__(
        self, replayer: Replayer, setting: Setting, policy: Policy, rows: IntArray
    ) -> None:
        kept = replayer.trajectories
        self._replayer = replayer
        self._setting = setting
        self._policy = policy
        self._ids = rows
        self._max_tokens = kept.max_tokens
        self._prompt_tokens = kept.prompt_tokens
        self._positions = kept.positions
        self._num_tokens = kept.num_tokens[rows]
        self._is_complete = kept.finished[rows]
        self._final = replayer.final[rows]
        self._share = self._admitted_share()
        self._live = np.arange(len(rows))
        self._ranked: dict[int, float] = {}  # the finished ones that are still ranked
        self._ended = np.zeros(len(rows), dtype=np.bool_)
        self._position = 0
        self._scored_lengths: list[int] = []
        self._attended_tokens = 0
        self._rounds: list[ReplayedRound] = []

    def run(self) -> Replayed:
        """Rounds until nothing is live; see `orchestrator.run.run`."""
        while len(self._live):
            self._rounds.append(self._round())
        everyone = np.arange(len(self._ids))
        ended = np.flatnonzero(self._ended)
        answer, best = self._best(ended), self._best(everyone)
        complete = bool(self._is_complete[answer])
        return Replayed(
            answer=int(self._ids[answer]),
            score=float(self._final[answer]),
            finish=FinishReason.STOP if complete else FinishReason.LENGTH,
            answer_tokens=int(self._num_tokens[answer]),
            generated_tokens=sum(each.generated_tokens for each in self._rounds),
            attended_tokens=self._attended_tokens,
            scored_lengths=tuple(self._scored_lengths),
            rounds=tuple(self._rounds),
            best_of_n_answer=int(self._ids[best]),
            best_of_n_score=float(self._final[best]),
            best_of_n_tokens=int(self._num_tokens.sum()),
            highest=float(self._final[ended].max()),
            best_of_n_highest=float(self._final.max()),
        )

    def _round(self) -> ReplayedRound:
        """Extend, score, reject; see `orchestrator.run._round`."""
        started, start = self._live, self._position
        ended_by, self._position = self._end_of_round()
        lengths = np.minimum(self._num_tokens[started], self._position)
        has_ended = self._num_tokens[started] <= self._position
        finished, self._live = started[has_ended], started[~has_ended]
        self._ended[finished] = True
        self._ranked.update(zip(finished.tolist(), self._final[finished].tolist(), strict=True))
        self._count(lengths, start)
        grown = self._live
        alpha, scores = self._reject(ended_by)
        stored = max(0, self._position - 1)  # the newest token is stored when the next is drawn
        return ReplayedRound(
            number=len(self._rounds) + 1,
            decision_token=self._position,
            ended_by=ended_by,
            num_started=len(started),
            num_finished=len(finished),
            num_rejected=len(grown) - len(self._live),
            num_live=len(self._live),
            best_score=self._best_score(scores),
            session_slots=self._prompt_tokens + len(grown) * stored,
            freed_slots=(len(grown) - len(self._live)) * stored,
            generated_tokens=int((lengths - start).sum()),
            alpha=alpha,
            survivors=tuple(self._ids[self._live].tolist()),
        )

    def _count(self, lengths: IntArray, start: int) -> None:
        """What growing from `start` to these lengths, and scoring them, has cost."""
        self._scored_lengths += lengths.tolist()
        # 0 + 1 + ... + (length - 1), less what was there.
        self._attended_tokens += int((lengths * (lengths - 1) - start * (start - 1)).sum()) // 2

    def _reject(self, ended_by: RoundEnd) -> tuple[float, FloatArray]:
        """Cut the ranking; returns alpha and the scores of those that go on."""
        best_of_n = self._setting.algorithm is Algorithm.BEST_OF_N
        asked = 0.0 if best_of_n else self._setting.alpha
        if not len(self._live):
            return asked, np.empty(0)
        partial = self._replayer.partial(self._position)[self._ids[self._live]]
        live = self._live.tolist()
        scores = self._ranked | dict(zip(live, partial.tolist(), strict=True))
        alpha = asked
        if not best_of_n:
            alpha = self._policy.alpha(self._seen(scores, partial, asked))
        outcome = cut(scores, set(live), alpha, must_release=ended_by is RoundEnd.SLOTS_FULL)
        goes_on = np.fromiter((each in outcome.kept for each in live), np.bool_, len(live))
        self._ranked = {each: self._ranked[each] for each in self._ranked if each in outcome.kept}
        self._live = self._live[goes_on]
        return alpha, partial[goes_on]

    def _seen(self, scores: dict[int, float], live: FloatArray, asked: float) -> Seen:
        ranked = np.fromiter(scores.values(), np.float64, len(scores))
        number = len(self._rounds) + 1
        answers = self._final[self._ended & self._is_complete]
        best = float(answers.max()) if len(answers) else -np.inf
        after = self._planned()
        return Seen(number, self._position, after, self._max_tokens, ranked, live, best, asked)

    def _end_of_round(self) -> tuple[RoundEnd, int]:
        """Why and where the round ends; see `generator_service.engine`."""
        lengths = self._num_tokens[self._live]
        until = self._planned()
        full = self._full_at(lengths, until)
        if full is not None:
            return RoundEnd.SLOTS_FULL, self._on_grid(full)
        longest = int(lengths.max())
        if longest <= until:
            return RoundEnd.ALL_FINISHED, longest
        return RoundEnd.DECISION_TOKEN, until

    def _planned(self) -> int:
        if self._setting.algorithm is Algorithm.BEST_OF_N:
            return self._max_tokens
        return next_decision_token(self._setting.schedule, self._position, self._max_tokens)

    def _full_at(self, lengths: IntArray, until: int) -> int | None:
        """The first position, from here to before `until`, where not all can grow by a token.

        There, each has stored all its tokens but the newest, and needs one more slot.
        """
        if self._share is None or len(lengths) * until <= self._share:
            return None
        # The first token is drawn from the prompt, and needs none.
        positions = np.arange(max(1, self._position), until)
        num_live = len(lengths) - np.searchsorted(np.sort(lengths), positions, side="right")
        full = np.flatnonzero(num_live * positions > self._share)
        return int(positions[full[0]]) if len(full) else None

    def _on_grid(self, position: int) -> int:
        """The position itself, or the one of the grid before it, if that is wanted."""
        if self._replayer.reward == LIKELIHOOD or not self._setting.snap:
            return position
        index = int(np.searchsorted(self._positions, position, side="right"))
        if not index:
            raise OffGrid(f"slots are full at token {position}, before the grid begins")
        return max(int(self._positions[index - 1]), self._position)

    def _admitted_share(self) -> int | None:
        """Slots for the candidates' tokens, or None; raises NeverFits as the engine refuses."""
        if not self._setting.slots:
            return None
        selection = Selection(
            schedule=self._setting.schedule, algorithm=self._setting.algorithm, n=len(self._ids)
        )
        sampling = Sampling(max_tokens=self._max_tokens)
        request = GenerationRequest(self._replayer.trajectories.prompt, sampling, selection)
        first = min(first_round_tokens(request), self._max_tokens)
        floor = max(len(self._ids) * max(0, first - 1), self._max_tokens - 1)
        if self._prompt_tokens + floor > self._setting.slots:
            raise NeverFits(
                f"needs {self._prompt_tokens + floor} slots, there are {self._setting.slots}"
            )
        return self._setting.slots - self._prompt_tokens

    def _best_score(self, live_scores: FloatArray) -> float:
        scores = np.concatenate([self._final[self._ended], live_scores])
        return float(scores.max())

    def _best(self, rows: IntArray) -> int:
        """The service's answer, of some: complete ones first, then by score, then the first."""
        order = np.lexsort((rows, -self._final[rows], ~self._is_complete[rows]))
        return int(rows[order[0]])
