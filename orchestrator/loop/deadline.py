"""The deadline controller: makes cuts deeper or earlier if the answer would otherwise be late.

It extrapolates from the speed so far. Standard library only; the clock is passed in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.loop.rejection import num_kept

# Tokens of a stride before the speed is known. A first one of so many measures a step, too.
_UNMEASURED_TOKENS = 16
# Seconds of a step before it is measured, where each stride costs: more than it usually takes.
_UNMEASURED_S = 0.5

# A stride takes at most this part of the time left, so that a wrong estimate does no harm.
_STRIDE_PART = 0.25

# Reserved for what follows the last step: a part of all the time, and a minimum in seconds.
_RESERVE_PART = 0.03
_RESERVE_S = 0.05

# The part of a step's time that does not depend on the number of rows (reading the weights), as
# long as only one number of rows was measured.
_FIXED_PART = 0.5

# Candidates are assumed to end at the 95th percentile of an exponential distribution of lengths:
# ln(20) times their mean length.
_MOST_END = math.log(20)

_ALPHA_STEP = 0.05


@dataclass(slots=True)
class DeadlineController:
    """One request's speed and time left; without a deadline (inf) it changes nothing.

    `next_token` returns the next decision token after a position; `min_answers` candidates must
    finish.
    """

    next_token: Callable[[int], int]
    max_tokens: int
    time_left_s: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    min_answers: int = 1
    can_reject: bool = True  # whether a cut rejects candidates; never with Best-of-N
    # Whether a pause costs the generator nothing; else strides are as long as the time allows.
    pauses_freely: bool = True
    hurried: bool = False  # whether it has changed anything
    _deadline: float = field(init=False)
    _reserve_s: float = field(init=False)
    _steps: dict[int, float] = field(default_factory=dict)  # seconds per step, by rows
    _latest_rows: int = 0
    # Per step of the first stride; an upper bound: it includes the prompt. None before it.
    _first_s: float | None = None
    _has_cut: bool = False  # to learn how long a step of fewer rows takes
    _score_s: float = 0.0  # per candidate
    _num_ended: int = 0
    _num_grown_tokens: int = 0

    def __post_init__(self) -> None:
        left = self.time_left_s
        self._reserve_s = 0.0 if math.isinf(left) else max(_RESERVE_S, _RESERVE_PART * left)
        self._deadline = self.clock() + left - self._reserve_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, less the reserve."""
        return self._deadline - self.clock()

    @property
    def patience_s(self) -> float:
        """Longest wait for a stride in seconds."""
        return max(0.0, self.left_s)

    @property
    def score_patience_s(self) -> float:
        """Longest wait for scores in seconds; half of the reserve is for those of the last step."""
        return max(0.0, self.left_s + self._reserve_s / 2)

    @property
    def is_over(self) -> bool:
        """Whether there is no time for one more step and its scores."""
        return self.left_s < (self.step_s(1) + self._score_s if self._steps else 0.0)

    def note_stride(self, rows: int, num_tokens: int, num_ended: int, seconds: float) -> None:
        """`rows` candidates grew by `num_tokens` each, and `num_ended` of them ended."""
        is_step = self._first_s is not None or num_tokens >= _UNMEASURED_TOKENS
        if self._first_s is None:
            self._first_s = seconds / max(1, num_tokens)
        if is_step and num_tokens > 0 and rows > 0:
            self._steps[rows] = seconds / num_tokens
            self._latest_rows = rows
        self._num_ended += num_ended
        self._num_grown_tokens += rows * num_tokens

    def note_scoring(self, num_candidates: int, seconds: float) -> None:
        self._score_s = seconds / max(1, num_candidates)

    def step_s(self, rows: int) -> float:
        """Estimated seconds of a step of `rows`: linear through the latest measurement and the one
        with the most rows; 0 before any measurement."""
        if not self._steps:
            return 0.0
        latest = self._steps[self._latest_rows]
        most_rows = max(self._steps)
        if most_rows > self._latest_rows:
            slope = (self._steps[most_rows] - latest) / (most_rows - self._latest_rows)
        else:
            slope = (1 - _FIXED_PART) * latest / self._latest_rows
        slope = min(max(0.0, slope), latest / self._latest_rows)
        return latest + slope * (rows - self._latest_rows)

    def stride_tokens(self, position: int, until: int, rows: int) -> int:
        """Tokens to grow before the clock is read again."""
        wanted = until - position
        if math.isinf(self.time_left_s):
            return wanted
        if self._first_s is None and self.pauses_freely:
            return 1  # the first stride includes the prefill, so it is not measured as a step
        if not self._steps and self.pauses_freely:
            wanted = min(wanted, _UNMEASURED_TOKENS)
        if self._first_s is None:
            most = int(self.patience_s * _STRIDE_PART / _UNMEASURED_S)
            return max(1, min(wanted, max(_UNMEASURED_TOKENS, most)))
        step_s = self.step_s(rows) or self._first_s
        fitting = self.patience_s * _STRIDE_PART / max(step_s, 1e-9)
        return max(1, int(min(fitting, wanted)))

    def must_cut(self, position: int, until: int, rows: int) -> bool:
        """Whether the cut must come now: growing all rows to the decision token `until` leaves too
        little time, even if only as many rows as must finish continue from there.

        While steps of one number of rows are known, the time of one row is a guess. If it seems too
        long, and the planned cut is far, one cut comes now to measure fewer rows.
        """
        is_guess = self.can_reject and len(self._steps) == 1 and rows > self._least
        is_far = (until - position) * self.step_s(rows) > _STRIDE_PART * self.left_s
        if is_guess and is_far and not (self._has_cut or self._fits(position, self._least, 0.0)):
            self._has_cut = self.hurried = True
            return True
        if not self._can_help(position, rows):
            return False
        grown_s = (until - position) * self.step_s(rows) + rows * self._score_s
        late = grown_s + self._finish_s(until, self._least, 0.0) > self.left_s
        self.hurried = self.hurried or late
        return late

    def alpha(self, position: int, num_ranked: int, num_live: int, alpha: float) -> float:
        """The least alpha, from the request's on, with which the plan finishes in time.

        `num_live` of those that are ranked still grow; in the worst case the cut keeps all of them.
        If even `min_answers` candidates would be late, the request's alpha: rejecting more cannot
        help, and with more candidates one is likelier to end early.
        """
        if not self._can_help(position, num_live):
            return alpha
        deepest = 1 - 1 / num_ranked
        tried = alpha
        while tried < deepest:
            growing = min(num_live, self._num_kept(num_ranked, tried))
            if self._fits(position, growing, tried):
                break
            tried = min(round(tried + _ALPHA_STEP, 6), deepest)
        self.hurried = self.hurried or tried > alpha
        return tried

    def has_time_for(self, position: int, width: int) -> bool:
        """Whether so many candidates can all go on to their end in time."""
        fits = not self._steps or self._fits(position, width, 0.0)
        self.hurried = self.hurried or not fits
        return fits

    def _can_help(self, position: int, num_candidates: int) -> bool:
        """Whether rejecting candidates can bring as many as must finish to their end in time."""
        least = self._least
        return bool(self._steps) and num_candidates > least and self._fits(position, least, 0.0)

    @property
    def _least(self) -> int:
        """Candidates that must still finish, at least 1."""
        return max(1, self.min_answers - self._num_ended)

    def _num_kept(self, rows: int, alpha: float) -> int:
        return min(rows, num_kept(rows, alpha, self._least))

    def _fits(self, position: int, rows: int, alpha: float) -> bool:
        return self._finish_s(position, rows, alpha) <= self.left_s

    def _finish_s(self, position: int, rows: int, alpha: float) -> float:
        """Seconds until all rows have ended, if every round rejects the fraction alpha."""
        seconds, end = 0.0, self._end(position)
        step_s, may_shrink = self.step_s(rows), True
        while position < end:
            until = min(self.next_token(position), end)
            seconds += (until - position) * step_s + rows * self._score_s
            position = until
            if may_shrink:  # once a round rejects none, neither does any later one
                kept = self._num_kept(rows, alpha)
                rows, may_shrink = kept, kept < rows
                step_s = self.step_s(rows)
        return seconds

    def _end(self, position: int) -> int:
        """The position at which candidates that have reached `position` will have ended."""
        if not self._num_ended:
            return self.max_tokens
        mean_tokens = self._num_grown_tokens / self._num_ended
        return min(self.max_tokens, position + math.ceil(_MOST_END * mean_tokens))
