"""What a caller receives: answers, events and descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from specrej.contracts.requests import DEFAULT_MAX_TOKENS, DEFAULT_N, Schedule, ToolCall
from specrej.contracts.sessions import FinishReason, GeneratorDescription, RoundEnd


class StopReason(Enum):
    """Why a request ended before all candidates did."""

    SCORE = "score"  # an answer reached `stop_at`
    FIRST = "first"  # so many answers are complete
    VOTE = "vote"  # the leading answer of the vote is safe


@dataclass(frozen=True, slots=True)
class VoteShare:
    """One answer of a vote: its part of all weights, and its candidates."""

    answer: str
    share: float
    count: int


class Degradation(Enum):
    """How an answer is weaker than requested."""

    REWARD = "reward"  # ranked by likelihood: a reward failed
    GENERATOR = "generator"  # the best complete answer so far: the generator failed
    DEADLINE = "deadline"  # the best truncated text: the deadline passed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could be drawn; `token` is a part of a text in UTF-8."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most probable tokens of one step, in descending order."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The text of an answer without what marks its parts: for the user, reasoning, and calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a call: the first one has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class PartsDelta:
    """What a part of a text adds to `AnswerParts`."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A finished or truncated candidate and its reward."""

    id: int
    text: str
    score: float
    finish: FinishReason
    num_tokens: int
    mean_logprob: float
    token_ids: tuple[int, ...] = ()  # with `logprobs` and `tokens`, if the sampling has `logprobs`
    logprobs: tuple[float, ...] = ()
    # Raw values, in the order of the request's rewards; NaN: not scored, as it was vetoed before.
    rewards: tuple[float, ...] = ()
    vetoed: bool = False
    tokens: tuple[bytes, ...] = ()  # parts of a text in UTF-8
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of each token, if the sampling has `top_logprobs`
    vote: str | None = None  # what it votes for
    parts: AnswerParts | None = None  # None: the text has no parts
    stop_text: str = ""  # as in `Candidate`


class Fate(Enum):
    """The state of a candidate after a decision token."""

    KEPT = "kept"  # it continues
    REJECTED = "rejected"  # for its rank
    VETOED = "vetoed"  # rejected: a reward is below its `veto_below`
    FINISHED = "finished"  # it ended by itself in this round, whatever its rank


@dataclass(frozen=True, slots=True)
class CandidateTrace:
    """One candidate at the end of a round."""

    id: int
    score: float
    fate: Fate
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """A candidate that continues another one from a decision token on."""

    id: int
    parent_id: int


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round in numbers; fields as in `specrej.v1.RoundTrace`."""

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
    capacity_slots: int
    generated_tokens: int
    extend_ms: float
    score_ms: float
    prune_ms: float
    num_vetoed: int = 0
    alpha: float = 0.0
    candidates: tuple[CandidateTrace, ...] = ()  # all that were scored, best first
    forks: tuple[Fork, ...] = ()  # made after the cut; `num_live` includes them
    wave: int = 1
    is_check: bool = False  # it only scored answers that had ended


@dataclass(frozen=True, slots=True)
class Usage:
    """Counted tokens, and one estimate."""

    prompt_tokens: int
    generated_tokens: int
    answer_tokens: int
    reward_tokens: int
    freed_slots: int
    best_of_n_tokens_estimate: int
    prefilled_tokens: int = 0  # 0: unknown
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds on a monotonic clock; fields as in `specrej.v1.Timings`."""

    total_ms: float = 0.0
    queue_ms: float = 0.0
    open_ms: float = 0.0
    extend_ms: float = 0.0
    score_ms: float = 0.0
    prune_ms: float = 0.0
    first_round_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer with its rounds and cost; `candidates[0]` is the answer.

    `hurried`: deadline-adjusted; the deadline made cuts deeper or earlier than requested.
    `reduced`: slots of others made n = 0 smaller, or no generator had room for a further wave.
    `relative_scores`: scores rank the candidates of this answer, and compare with no other's.
    `votes` are by descending weight; `num_begun` candidates of n began before it ended.
    """

    candidates: tuple[RankedCandidate, ...]
    rounds: tuple[RoundTrace, ...]
    usage: Usage
    timings: Timings
    n: int
    request_id: str = ""
    generator_fingerprint: str = ""
    reward_fingerprint: str = ""
    cached: bool = False
    degradations: tuple[Degradation, ...] = ()
    hurried: bool = False
    reduced: bool = False
    relative_scores: bool = False
    stopped_by: StopReason | None = None
    votes: tuple[VoteShare, ...] = ()
    num_distinct: int = 0
    num_begun: int = 0

    @property
    def degraded(self) -> bool:
        """Whether the answer is weaker than requested."""
        return bool(self.degradations)

    @property
    def best(self) -> RankedCandidate:
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: the session is open. Sent again if the request starts again at another generator: its
    rounds begin again, and text that was sent is not sent again."""

    n: int
    prompt_tokens: int
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class CandidateText:
    """All of a candidate's text so far."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class RoundCompleted:
    """Event: a round has ended. `best_text` is the best so far, complete or not.

    `texts`, on request: of the round's candidates, rejected ones included, best first. Both are
    empty once `TextDelta` events have the text.
    """

    trace: RoundTrace
    survivors: tuple[int, ...]
    best_text: str
    texts: tuple[CandidateText, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Event, on request: within a round, live candidates have grown to `num_tokens`."""

    num_tokens: int
    num_live: int
    session_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Event, on request: the next part of the answer's text, which is certain to be `id`'s.

    The first one has all of its text so far. There is none while several candidates can win.
    """

    id: int
    text: str
    parts: PartsDelta | None = None  # None: the text has no parts


class AnswerSource(Enum):
    """Where an answer came from."""

    RUN = "run"  # generated for this request
    CACHE = "cache"
    FLIGHT = "flight"  # generated for an equal, concurrent request


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the answer, the last event. `source` is not sent."""

    generation: Generation
    source: AnswerSource = AnswerSource.RUN


Event = Admitted | RoundCompleted | Progress | TextDelta | Finished


@dataclass(frozen=True, slots=True)
class ServiceDescription:
    """The whole service: generator, rewards (the first is the default), load and defaults."""

    generator: GeneratorDescription
    rewards: tuple[str, ...]
    cache_available: bool
    running: int
    queued: int
    default_schedule: Schedule
    default_n: int = DEFAULT_N
    default_max_tokens: int = DEFAULT_MAX_TOKENS
