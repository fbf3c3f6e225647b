"""The nouns and seams that every part shares: candidate, session, round, slot.

Remote, local and toy generators and scorers satisfy the same Protocols, so that one `run()` loop
drives them all. This file knows no wire, no model and no policy; standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to answer: a conversation or raw text, exactly one of the two."""

    messages: tuple[Message, ...] = ()
    text: str = ""

    @classmethod
    def from_user(cls, content: str) -> Prompt:
        """A conversation of one user turn."""
        return cls(messages=(Message("user", content),))

    @property
    def turns(self) -> tuple[Message, ...]:
        """The conversation; raw text is one user turn."""
        return self.messages or (Message("user", self.text),)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; fields and ranges as in `specrej.v1.Sampling`."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False


class FinishReason(Enum):
    """Why a candidate stopped growing by itself."""

    STOP = "stop"  # end-of-sequence token or stop text: a complete answer
    LENGTH = "length"  # max_tokens: a truncated answer


class RoundEnd(Enum):
    """Why a round ended."""

    DECISION_TOKEN = "decision_token"
    SLOTS_FULL = "slots_full"
    ALL_FINISHED = "all_finished"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate at a decision token.

    `text` is decoded whole; `logprob` is the sum over its `num_tokens` tokens of their
    log-probability under the model at temperature 1, nothing cut off. `finish` is None while live.
    `new_logprobs` are those of `new_token_ids`, where the sampling asks for them.
    """

    id: int
    text: str
    num_tokens: int
    logprob: float
    finish: FinishReason | None = None
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: tuple[float, ...] = ()

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SlotGauge:
    """Slots at one moment: all, holding tokens of any session, holding this session's tokens.

    `cached` slots hold prompt prefixes that no session uses now; they are given up when needed.
    """

    capacity: int
    owned: int
    session: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A prefix batch: every candidate that is live, or finished in this round, by ascending id.

    `num_tokens` is the token position reached by the live candidates. Where a generator was lost,
    others may have made `repeated_tokens` again that had been told of before, and the candidates
    with the ids `lost` are gone. `made_by`: fingerprints of who made it, where they are told.
    """

    candidates: tuple[Candidate, ...]
    ended_by: RoundEnd
    num_tokens: int
    slots: SlotGauge
    repeated_tokens: int = 0
    lost: tuple[int, ...] = ()
    made_by: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune freed, and the gauge after it."""

    freed_slots: int
    slots: SlotGauge


@dataclass(frozen=True, slots=True)
class GeneratorDescription:
    """A generator's model and limits; `slots.session` is 0."""

    model: str
    fingerprint: str
    context_tokens: int
    max_candidates: int
    vocabulary: int
    slot_bytes: int
    device: str
    slots: SlotGauge
    sessions: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """One score per candidate, in the order asked, and the tokens the reward model computed.

    `fingerprint`: the reward's, where it is told.
    """

    values: tuple[float, ...]
    computed_tokens: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """One reward: its name, a digest of weights and settings, and what it measures.

    `max_batch` is the most candidates it takes at once.
    """

    name: str
    fingerprint: str
    description: str
    max_batch: int = 1024


class Session(Protocol):
    """One prompt, its candidates, and the KV slots they hold."""

    @property
    def n(self) -> int:
        """Candidates at the start, with consecutive ids."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the rendered prompt."""

    async def extend(self, until_tokens: int) -> Round:
        """Grow all live candidates to `until_tokens` new tokens.

        Ends earlier when the session's share of slots is full, or no candidate is live.
        """

    async def prune(self, keep: Collection[int]) -> Pruned:
        """Free the slots of every live candidate not in `keep`, before returning."""


class Generator(Protocol):
    """Makes tokens and owns slots."""

    def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AbstractAsyncContextManager[Session]:
        """A session of `n` candidates (0: as many as fit); leaving the context frees its slots.

        Waits until prompt and `n * first_round_tokens` fit a share of the slots. Sessions with
        equal salts may share the KV of equal leading prompt tokens, others never do.

        Ids are `first_candidate .. first_candidate + n - 1`. What a candidate says depends on its
        id, not on the session it is in: several sessions can make what one would have made.

        Raises:
            InvalidRequest: it can never fit.
            Overloaded: too many sessions wait already.
        """

    async def describe(self) -> GeneratorDescription:
        """The model, its limits and its slots."""


class ScoringSession(Protocol):
    """One reward, bound to one prompt, from the first prefix batch to the last."""

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Finite scores, higher is better; candidates missing from the batch are forgotten."""


class Scorer(Protocol):
    """Judges prefixes and answers."""

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[ScoringSession]:
        """A scoring session; leaving the context frees what it keeps.

        Raises:
            NotFound: no such reward.
        """


class Algorithm(Enum):
    """How the best candidate is found."""

    SPECULATIVE_REJECTION = "speculative-rejection"
    BEST_OF_N = "best-of-n"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where decision tokens lie: at `tokens`, at `first * factor**i`, or nowhere (memory).

    Full slots end a round early under every schedule.
    """

    kind: str = "geometric"  # "memory", "tokens" or "geometric"
    tokens: tuple[int, ...] = ()
    first: int = 16
    factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Normalization:
    """What makes the values of different rewards comparable before they are weighted.

    "none": they are as they are. "fixed": (value - mean) / deviation. "batch": the same, with the
    mean and the standard deviation over all candidates that still count at the decision token; 0
    for all where all are equal.
    """

    kind: str = "none"  # "none", "fixed" or "batch"
    mean: float = 0.0  # of "fixed" alone, as is the deviation
    deviation: float = 1.0


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of a weighted sum; a candidate whose raw value is below `veto_below` is vetoed."""

    name: str
    weight: float = 1.0
    normalization: Normalization = field(default_factory=Normalization)
    veto_below: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which candidate is returned; fields and ranges as in `specrej.v1.Selection`."""

    n: int = 0
    alpha: float = 0.5
    schedule: Schedule = field(default_factory=Schedule)
    algorithm: Algorithm = Algorithm.SPECULATIVE_REJECTION
    rewards: tuple[WeightedReward, ...] = ()
    return_candidates: int = 1


class CacheControl(Enum):
    """What the cache may do for a request; as in `specrej.v1.CacheControl`."""

    USE = "use"
    BYPASS = "bypass"
    REFRESH = "refresh"
    USE_BETTER = "use-better"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to answer it; `model` "" means the one that is served.

    `allow_degraded`: something weaker is better than an error.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    selection: Selection = field(default_factory=Selection)
    model: str = ""
    cache: CacheControl = CacheControl.USE
    allow_degraded: bool = False


class Degradation(Enum):
    """What stood in for a step of the plan that could not be done."""

    REWARD = "reward"  # ranked by likelihood: a reward could not be had
    GENERATOR = "generator"  # the best complete answer so far: the generator broke off
    DEADLINE = "deadline"  # the best text so far, truncated: time ran out
    CANDIDATES = "candidates"  # of fewer candidates: one of several generators broke off


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A finished or truncated candidate and its reward."""

    id: int
    text: str
    score: float
    finish: FinishReason
    num_tokens: int
    mean_logprob: float
    token_ids: tuple[int, ...] = ()  # with their logprobs, where the sampling asks for them
    logprobs: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()  # raw values, in the order of the request's rewards
    vetoed: bool = False


class Fate(Enum):
    """What became of a candidate at a decision token."""

    KEPT = "kept"  # it goes on
    REJECTED = "rejected"  # by its rank
    VETOED = "vetoed"  # rejected: a reward is below its veto
    FINISHED = "finished"  # it ended by itself in this round, ranked out or not


@dataclass(frozen=True, slots=True)
class CandidateTrace:
    """One candidate at the end of a round."""

    id: int
    score: float
    fate: Fate


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What happened in one round; fields as in `specrej.v1.RoundTrace`."""

    number: int
    decision_token: int
    ended_by: RoundEnd
    num_started: int
    num_finished: int
    num_rejected: int
    num_live: int
    best_score: float
    scores: tuple[float, ...]
    session_slots: int
    freed_slots: int
    capacity_slots: int
    generated_tokens: int
    extend_ms: float
    score_ms: float
    prune_ms: float
    num_vetoed: int = 0
    num_lost: int = 0
    alpha: float = 0.0
    candidates: tuple[CandidateTrace, ...] = ()  # those scored in it, best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, counted; the one estimate says so."""

    prompt_tokens: int
    generated_tokens: int
    answer_tokens: int
    reward_tokens: int
    freed_slots: int
    best_of_n_tokens_estimate: int


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
    """The answer and how it came about; `candidates[0]` is the answer.

    `hurried`: the deadline made cuts deeper, or earlier, than was asked for.
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

    @property
    def degraded(self) -> bool:
        """Whether something weaker stood in for a step of the plan."""
        return bool(self.degradations)

    @property
    def best(self) -> RankedCandidate:
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: the generator has made room."""

    n: int
    prompt_tokens: int
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class RoundCompleted:
    """Event: a round has ended; `survivors` go on, `best_text` is the best so far, whole or not."""

    trace: RoundTrace
    survivors: tuple[int, ...]
    best_text: str


class AnswerSource(Enum):
    """Where an answer came from."""

    RUN = "run"  # made for this request
    CACHE = "cache"
    FLIGHT = "flight"  # made for an equal request at the same time


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the answer; the last one. Where it came from stays in the process that knows."""

    generation: Generation
    source: AnswerSource = AnswerSource.RUN


Event = Admitted | RoundCompleted | Finished


@dataclass(frozen=True, slots=True)
class ServiceDescription:
    """The whole service: generator, rewards (the first is the default), load and defaults.

    Since it started: answers that were made here, and how many of them were degraded or hurried.
    """

    generator: GeneratorDescription
    rewards: tuple[str, ...]
    cache_available: bool
    running: int
    queued: int
    default_schedule: Schedule
    num_answers: int = 0
    num_degraded: int = 0
    num_hurried: int = 0


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A round, and when it began: milliseconds since the request arrived."""

    start_ms: float
    trace: RoundTrace


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is remembered of a request, no text of it; fields as in `specrej.v1.RequestRecord`."""

    request_id: str
    started_unix_s: float
    selection: Selection
    max_tokens: int
    outcome: str = ""
    elapsed_ms: float = 0.0
    queued_at_ms: float | None = None
    running_at_ms: float | None = None
    opened_at_ms: float | None = None
    n: int = 0
    prompt_tokens: int = 0
    rounds: tuple[RecordedRound, ...] = ()
    source: AnswerSource | None = None
    answer_id: int = 0
    score: float = 0.0
    usage: Usage | None = None
    degradations: tuple[Degradation, ...] = ()
    hurried: bool = False
