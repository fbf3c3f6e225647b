"""What commands to an engine carry and return, and what it reports. No torch.

The own engine and the stock engine share them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

from generator_service.admission import Demand
from specrej import contracts as c

if TYPE_CHECKING:
    from generator_service.engine.grammar import CompiledGrammar


class CompletesStop(Protocol):
    """One candidate's stop texts; it receives each token once, in order."""

    def __call__(self, token_id: int) -> bool:
        """Whether the candidate's next token completes a stop text."""

    def copy(self) -> Self:
        """The same state, of another candidate."""


class GrowingText(Protocol):
    """One candidate's text; it receives each token once, in order."""

    def grown(self, token_ids: Sequence[int], finish: c.FinishReason | None) -> str:
        """The text so far with the candidate's next tokens, without an incomplete last character.
        If they finish it: without the end token or the stop text."""

    @property
    def stop_text(self) -> str:
        """The stop text that finished it; empty: none, or unknown."""

    def copy(self) -> Self:
        """The same state, of another candidate."""


@dataclass(frozen=True, slots=True)
class OpenCommand:
    """A session to be opened.

    `stop_texts` returns a new `CompletesStop` for one candidate, `texts` a new `GrowingText`; n =
    0: the engine chooses the number of candidates.
    """

    prompt_ids: Sequence[int]
    n: int
    sampling: c.Sampling
    first_round_tokens: int
    stop_texts: Callable[[], CompletesStop] | None = None
    cache_salt: str = ""
    grammar: CompiledGrammar | None = None  # of the sampling's structured output
    texts: Callable[[], GrowingText] | None = None
    weight: float = 1.0  # of the tenant, whose sessions have equal salts
    first_id: int = 0
    images: Any = None  # of the prompt, as the program that computes wants them
    answer_form: c.AnswerForm = c.PLAIN

    def demand(self, prompt_slots: int, slots_of: Callable[[int], int]) -> Demand:
        """The session's demand; `slots_of`: the engine's slots of one candidate by its tokens."""
        first, longest = self.first_round_tokens, self.sampling.max_tokens
        return Demand(self.n, prompt_slots, first, longest, slots_of)

    def candidates(self, n: int) -> list[GrowingCandidate]:
        """`n` candidates without tokens."""
        stops, texts = self.stop_texts, self.texts
        return [
            GrowingCandidate(number, stops() if stops else None, texts() if texts else None)
            for number in range(self.first_id, self.first_id + n)
        ]

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that are not drawn before min_tokens."""
        return eos_ids.union(self.sampling.stop_token_ids)

    def finish_of(
        self, candidate: GrowingCandidate, eos_ids: frozenset[int]
    ) -> c.FinishReason | None:
        """Why a candidate has finished with its newest token; None: it goes on."""
        sampling, num_tokens = self.sampling, len(candidate.token_ids)
        newest = candidate.token_ids[-1]
        stops = candidate.completes_stop and candidate.completes_stop(newest)
        if stops and num_tokens >= sampling.min_tokens:
            return c.FinishReason.STOP
        is_eos = newest in eos_ids and not sampling.ignore_eos
        if is_eos or newest in sampling.stop_token_ids:
            return c.FinishReason.STOP
        return c.FinishReason.LENGTH if num_tokens >= sampling.max_tokens else None


@dataclass(frozen=True, slots=True)
class Opened:
    """An admitted session."""

    n: int
    reduced: bool  # as in `contracts.Session`


# The most probable tokens of a step, best first, and their log-probabilities.
Top = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class PrefixBatch:
    """A round's result, or a part of one, as `contracts.Round`; candidates are copies."""

    prefixes: tuple[GrowingCandidate, ...]
    ended_by: c.RoundEnd
    num_tokens: int
    slots: c.SlotGauge
    num_live: int = 0


class ReportRate:
    """When a session reports growth: its first token at once, then at most 20 times a second."""

    _PAUSE_S = 0.05

    def __init__(self) -> None:
        self._next_s = -math.inf

    def is_due(self) -> bool:
        """Whether to report now, which is then the latest report."""
        now = time.monotonic()
        is_due = now >= self._next_s
        if is_due:
            self._next_s = now + self._PAUSE_S
        return is_due


def named_tokens(
    candidates: Sequence[c.Candidate], bytes_of: Callable[[int], bytes]
) -> tuple[c.TokenText, ...]:
    """The bytes of every new token and every one that was most probable, each once."""
    ids = {token for one in candidates for token in (*one.new_token_ids, *one.new_top_token_ids)}
    return tuple(c.TokenText(token, bytes_of(token)) for token in sorted(ids))


@dataclass(slots=True)
class GrowingCandidate:
    """A candidate inside an engine; `new_...` are of its tokens since the last report."""

    id: int
    completes_stop: CompletesStop | None = None
    text: GrowingText | None = None
    token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0
    finish: c.FinishReason | None = None
    new_top: list[Top] = field(default_factory=list)  # only if requested

    @property
    def num_new(self) -> int:
        """Tokens since the last report."""
        return len(self.new_logprobs)

    def fork(self, candidate_id: int) -> GrowingCandidate:
        """A candidate of its own with the same tokens."""
        return replace(
            self,
            id=candidate_id,
            completes_stop=self.completes_stop and self.completes_stop.copy(),
            text=self.text and self.text.copy(),
            token_ids=list(self.token_ids),
            new_logprobs=list(self.new_logprobs),
            new_top=list(self.new_top),
        )

    def append(self, token_id: int, logprob: float) -> None:
        self.token_ids.append(token_id)
        self.new_logprobs.append(logprob)
        self.logprob += logprob

    def report(self) -> GrowingCandidate:
        """A copy as of now, with the same `text`; each token is new in one report only."""
        reported = replace(self, completes_stop=None, token_ids=list(self.token_ids))
        self.new_logprobs, self.new_top = [], []
        return reported

    def candidate(self, *, logprobs: bool) -> c.Candidate:
        """The candidate as reported; log-probabilities of its new tokens only if requested."""
        new_token_ids = self.token_ids[len(self.token_ids) - self.num_new :]
        text = self.text.grown(new_token_ids, self.finish) if self.text else ""
        return c.Candidate(
            id=self.id,
            text=text,
            num_tokens=len(self.token_ids),
            logprob=self.logprob,
            finish=self.finish,
            new_token_ids=tuple(new_token_ids),
            new_logprobs=tuple(self.new_logprobs) if logprobs else (),
            new_top_token_ids=tuple(chain.from_iterable(ids for ids, _ in self.new_top)),
            new_top_logprobs=tuple(chain.from_iterable(values for _, values in self.new_top)),
            stop_text=self.text.stop_text if self.text else "",
        )


# For telemetry, which is not imported here


@dataclass(frozen=True, slots=True)
class Load:
    """Slots and sessions at a moment; `waiting`: sessions that wait for slots."""

    slots: c.SlotGauge
    sessions: int
    waiting: int


@dataclass(slots=True)
class Step:
    """One forward pass: its duration, the candidates in it and the tokens it computed.

    `reused`: prompt tokens of newly admitted sessions that were stored, or being computed, already.
    """

    seconds: float = 0.0
    rows: int = 0
    generated: int = 0
    prefilled: int = 0
    reused: int = 0


OnStep = Callable[[Step], None]
