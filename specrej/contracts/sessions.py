"""The seams between the orchestrator and its backends: sessions, candidates, slots and scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Protocol, TypeAlias

from specrej.contracts.errors import Unavailable
from specrej.contracts.requests import Prompt, Sampling


class FinishReason(Enum):
    """Why a candidate stopped growing by itself."""

    STOP = "stop"  # end-of-sequence token or stop text: a complete answer
    LENGTH = "length"  # max_tokens: a truncated answer


class RoundEnd(Enum):
    """Why a round ended."""

    DECISION_TOKEN = "decision_token"
    SLOTS_FULL = "slots_full"
    ALL_FINISHED = "all_finished"


class CandidateForm(Enum):
    """How a generator makes its candidates; `specrej.v1.CandidateForm` explains each."""

    IN_PLACE = "in place"
    ROUNDS = "rounds of requests"
    STREAMS = "streams"
    WHOLE_ANSWERS = "whole answers"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate at a decision token.

    `text` is decoded whole; `logprob` is the sum over its `num_tokens` tokens of their
    log-probability under the model at temperature 1, nothing cut off. `finish` is None while live.
    `new_logprobs` are those of `new_token_ids`, if the sampling has `logprobs`. With
    `top_logprobs`, `new_top_token_ids` has the most probable tokens of each step, best first, step
    after step, equally many of each.
    """

    id: int
    text: str
    num_tokens: int
    logprob: float
    finish: FinishReason | None = None
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: tuple[float, ...] = ()
    new_top_token_ids: tuple[int, ...] = ()
    new_top_logprobs: tuple[float, ...] = ()
    stop_text: str = ""  # of the sampling's, if one ended the text and the generator knows it

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SlotGauge:
    """Slots at one moment: `capacity` in all, `owned` by all sessions, `session` by this one.

    `cached` slots hold prompt prefixes that no session uses now; they are given up when needed.
    """

    capacity: int
    owned: int
    session: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenText:
    """The bytes of one token: a part of a text in UTF-8, perhaps not of whole characters."""

    token_id: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Round:
    """A prefix batch: every candidate that is live, or finished in this round, by ascending id.

    `num_tokens` is the token position reached by the live candidates. With `logprobs`,
    `token_texts` has every token that the candidates name. `prompt_tokens` is set only in the first
    round of a session that was opened without this number; else 0. `prefilled_tokens` of prompts
    were computed in this round, those of survivors included; 0: none, or unknown.

    A part of a round that goes on is a round as if it had ended at its latest token: it has its
    candidate, if it has only one, and `num_live`, which others have as 0. What is new in one part
    is not new in a later one, nor at the round's end.
    """

    candidates: tuple[Candidate, ...]
    ended_by: RoundEnd
    num_tokens: int
    slots: SlotGauge
    token_texts: tuple[TokenText, ...] = ()
    prompt_tokens: int = 0
    num_live: int = 0
    prefilled_tokens: int = 0


# Receives the parts of a round, and returns at once.
Report: TypeAlias = Callable[[Round], None]


# The id of a new candidate -> the id of the live candidate that it continues.
Forks = Mapping[int, int]
NO_FORKS: Forks = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Pruned:
    """The slots that a prune freed, the gauge after it, and the forks that were refused."""

    freed_slots: int  # of the rejected candidates, whatever forks took of them
    slots: SlotGauge
    refused: tuple[int, ...] = ()  # ids, ascending
    discarded_tokens: int = 0  # since the last prune: generated, and of no candidate


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model marks the parts of its answers; all empty: an answer is one text.

    `tool_format`: "hermes", "llama3", "mistral" or "json", if the prompt has tools. The texts
    `thinking_begin` and `thinking_end` are around the reasoning; `is_thinking`: the prompt has
    written the beginning already.
    """

    tool_format: str = ""
    thinking_begin: str = ""
    thinking_end: str = ""
    is_thinking: bool = False


PLAIN = AnswerForm()


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
    auto_candidates: int = 0  # most of a session whose n is 0
    session_slots: int = 0  # most that one session may own; 0: all
    adapters: tuple[str, ...] = ()  # of several generators as one: the names of their models
    can_fork: bool = False  # whether its sessions fork candidates; others refuse forks
    flat_steps: bool = False  # whether a step with many candidates takes as long as with one
    form: CandidateForm = CandidateForm.IN_PLACE
    ignores_seeds: bool = False  # whether equal seeds draw different tokens
    abilities: tuple[str, ...] = ()  # of the server behind it
    max_prompt_bytes: int = 0  # longer prompts do not fit the context; 0: unknown
    tool_format: str = ""  # how its answers call tools; empty: tools are refused
    takes_images: bool = False  # whether prompts may have images

    @property
    def whole_answers(self) -> bool:
        """Whether every candidate ends in its first round: no early rejection."""
        return self.form is CandidateForm.WHOLE_ANSWERS

    @property
    def form_summary(self) -> str:
        """How candidates are made, for people."""
        rejects = "no early rejection" if self.whole_answers else "rejected at decision tokens"
        seeds = ("equal seeds draw other tokens",) if self.ignores_seeds else ()
        images = ("images in prompts",) if self.takes_images else ()
        return "; ".join((self.form.value, rejects, *self.abilities, *seeds, *images))


@dataclass(frozen=True, slots=True)
class Scores:
    """One score per candidate, in the order of the batch, and the tokens the reward model computed.

    `fingerprint`: the reward's, or empty. `compare`: whether the values compare the candidates of
    the batch with each other, and with no others. `reward`: its name, from the public port.
    """

    values: tuple[float, ...]
    computed_tokens: int = 0
    fingerprint: str = ""
    compare: bool = False
    reward: str = ""


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """One reward: its name, a digest of weights and settings, and what it measures.

    `max_batch` is the most candidates it takes at once.
    """

    name: str
    fingerprint: str
    description: str
    max_batch: int = 1024
    takes_data: bool = False  # whether requests may bring data for it
    is_cheap: bool = False  # microseconds per text, so that it can veto within rounds
    takes_images: bool = False  # whether it looks at the images of prompts


class GeneratorLost(Unavailable):
    """The session ended with its generator; another generator can answer its request from the
    beginning. Callers receive Unavailable."""


class Session(Protocol):
    """One prompt, its candidates, and the KV slots they hold."""

    n: int  # candidates at the start; their ids are consecutive, from the spec's `first_id` on
    prompt_tokens: int  # of the rendered prompt; 0: the first round has them
    max_tokens: int  # most new tokens of a candidate
    reduced: bool  # whether N was left open, and the slots of other sessions made it smaller
    fingerprint: str  # the generator's, or empty in a process without a port
    costly_rounds: bool  # whether each round computes tokens again, so that fewer are cheaper
    answer_form: AnswerForm  # how answers mark their parts

    async def extend(self, until_tokens: int, report: Report | None = None) -> Round:
        """Grow all live candidates to `until_tokens` new tokens.

        Ends earlier when the session's share of slots is full, or no candidate is live. `report`
        receives the session's first token at once, then at most 20 parts a second; none from
        generators of whole answers.
        """

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """Free the slots of every live candidate not in `keep`, before returning, and make forks.

        A fork is a new candidate with the tokens, keys and values of its parent, which was live
        before the prune; its next tokens are drawn under its own id. Ids of forks ascend, and are
        above those of all earlier candidates. Forks without room for one more token, and those of
        a parent that was not live, are refused.
        """


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a generator opens: `n` candidates of a prompt; n = 0: as many as fit.

    A candidate's tokens depend on the seed and its id, not on its session. Sessions with equal
    salts may share the KV of equal leading prompt tokens, others never do. The generator divides
    its work among salts in proportion to `weight`. Candidates' ids begin at `first_id`. `adapter`:
    the name of the model, or empty for any. `like`, not sent: prefer a generator with this
    fingerprint. `without_likelihood`: nobody reads log-probabilities, so they may be 0.
    """

    prompt: Prompt
    n: int
    sampling: Sampling
    first_round_tokens: int  # that every candidate must be able to reach before the first cut
    cache_salt: str = ""
    adapter: str = ""
    fits_context: bool = False  # fewer than max_tokens are enough where the prompt leaves less room
    like: str = ""
    weight: float = 1.0
    first_id: int = 0
    without_likelihood: bool = False

    def sampling_after(self, prompt_tokens: int, context_tokens: int) -> Sampling:
        """The sampling, whose max_tokens fits beside the prompt if it may be less."""
        room = max(1, context_tokens - prompt_tokens)
        if not self.fits_context or self.sampling.max_tokens <= room:
            return self.sampling
        return replace(self.sampling, max_tokens=room)

    @property
    def first_tokens(self) -> int:
        """Tokens of a candidate in the first round."""
        return min(self.first_round_tokens, self.sampling.max_tokens)


class Generator(Protocol):
    """Makes tokens and owns slots."""

    def open(self, spec: SessionSpec) -> AbstractAsyncContextManager[Session]:
        """A session; leaving the context frees its slots.

        Waits until the prompt and `n * first_round_tokens`, or one whole answer, fit a share of the
        slots. While one candidate is live, no round ends because slots are full.

        Raises:
            InvalidRequest: it can never fit.
            Overloaded: the queue of waiting sessions is full.
        """

    async def check(self, spec: SessionSpec) -> None:
        """Do what `open` does before it reserves slots, which can take seconds.

        Raises:
            InvalidRequest: the prompt exceeds the context, or the structured output is refused.
            Overloaded: too many structured outputs of the salt wait already.
        """

    async def describe(self) -> GeneratorDescription:
        """The model, its limits and its slots."""


class ScoringSession(Protocol):
    """One reward, bound to one prompt, from the first prefix batch to the last."""

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Finite scores, higher is better; the state of candidates not in the batch is dropped."""


# Opens a scoring session; leaving the context frees its state. Entering it raises NotFound if the
# reward is unknown.
Scorer: TypeAlias = Callable[[Prompt], AbstractAsyncContextManager[ScoringSession]]
