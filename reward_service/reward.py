"""The protocol of rewards, and how one batch is scored; imports no torch.

A session's batch becomes a task, a task is computed piece by piece, and one forward pass computes
pieces of several sessions: so a small batch never waits for the whole of a large one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from specrej.contracts import Candidate, FinishReason, Prompt, Scores

T = TypeVar("T", bound=Hashable)


def finite_sum(terms: Sequence[float]) -> float:
    """The sum; NaN, which no score may be, where it is infinite or undefined."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return math.nan


class RewardLost(Exception):
    """A reward's engine or device will compute no more: only a restart of the service helps."""


class ScoringTask(Protocol):
    """A batch under way; its pieces are computed in the order in which they are taken."""

    @property
    def next_tokens(self) -> int:
        """Tokens of the next piece; 0 if none is left."""

    def take(self) -> Any:
        """The next piece, for `Reward.compute`."""

    def scores(self) -> Scores:
        """One finite score per candidate, once every piece is computed."""


class RewardSession(Protocol):
    """One reward, bound to one prompt; called by the reward's thread."""

    def begin(self, candidates: Sequence[Candidate]) -> ScoringTask:
        """A task for this batch; what the session keeps of other candidates is freed."""

    def close(self) -> None:
        """Free what is kept; a session that is used again computes it again."""


class Described(Protocol):
    """What every reward has."""

    name: str  # in requests
    fingerprint: str  # digest of weights and settings
    description: str  # what it measures, in a sentence


class Reward(Described, Protocol):
    """Scores responses to a prompt; called by one thread at a time, always the same one."""

    token_budget: int  # most tokens per `compute`, unless a single piece has more

    def open(self, prompt: Prompt, *, once: bool = False) -> RewardSession:
        """A session that keeps nothing yet; `once`: it gets a single batch.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """

    def compute(self, pieces: Sequence[Any]) -> None:
        """Compute pieces that were taken from tasks of any sessions.

        Raises:
            RewardLost: it will never compute again.
        """


def take_fairly(
    tasks: Sequence[ScoringTask], token_budget: int, given: list[int] | None = None
) -> list[Any]:
    """Pieces for one forward pass, of at most `token_budget` tokens; a larger one is alone in it.

    The next piece is always of the task that was given the fewest tokens, the first of equals.
    `given`: the tokens that each task was given in earlier passes; those of this pass are added.
    """
    pieces: list[Any] = []
    given = [0] * len(tasks) if given is None else given
    in_pass = 0
    while waiting := [index for index, task in enumerate(tasks) if task.next_tokens]:
        index = min(waiting, key=given.__getitem__)
        num_tokens = tasks[index].next_tokens
        if pieces and in_pass + num_tokens > token_budget:
            break
        in_pass += num_tokens
        given[index] += num_tokens
        pieces.append(tasks[index].take())
    return pieces


def compute_alone(task: ScoringTask, reward: Reward) -> None:
    """All of a task's pieces, in passes of its own."""
    while pieces := take_fairly([task], reward.token_budget):
        reward.compute(pieces)


def score_batch(session: RewardSession, reward: Reward, candidates: Sequence[Candidate]) -> Scores:
    """Scores of a batch that shares its passes with no other."""
    try:
        task = session.begin(candidates)
        compute_alone(task, reward)
        return task.scores()
    except BaseException:
        session.close()  # it counts on what was not computed
        raise


def score(reward: Reward, prompt: Prompt, texts: Sequence[str]) -> Scores:
    """Scores of complete answers, in a session of their own."""
    session = reward.open(prompt, once=True)
    try:
        return score_batch(session, reward, whole_answers(texts))
    finally:
        session.close()


def whole_answers(texts: Sequence[str]) -> list[Candidate]:
    return [Candidate(i, text, 0, 0.0, FinishReason.STOP) for i, text in enumerate(texts)]


def distinct(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """Every different item once, in order of appearance, and each item's index among them."""
    places: dict[T, int] = {}
    where = [places.setdefault(item, len(places)) for item in items]
    return list(places), where


@dataclass(frozen=True, slots=True)
class StatelessSession:
    """A session that keeps nothing between batches."""

    begin: Callable[[Sequence[Candidate]], ScoringTask]

    def close(self) -> None:
        """Do nothing."""


@dataclass(eq=False, slots=True)
class Text:
    """A tokenized text that is computed whole, and the head's output for it once it is."""

    token_ids: Sequence[int]
    types: Sequence[int] = ()  # token types, for encoders
    result: Any = None
    num_computed: int = 0


@dataclass(eq=False, slots=True)
class TextTask:
    """A batch of texts, each of which is a piece; equal texts are computed once.

    where: each candidate's index among the texts; to_scores: from their results to scores.
    """

    texts: Sequence[Text]
    where: Sequence[int]
    to_scores: Callable[[list[Any]], list[float]]
    _taken: int = field(default=0, init=False)

    @property
    def next_tokens(self) -> int:
        return len(self.texts[self._taken].token_ids) if self._taken < len(self.texts) else 0

    def take(self) -> Text:
        self._taken += 1
        return self.texts[self._taken - 1]

    def scores(self) -> Scores:
        values = self.to_scores([self.texts[place].result for place in self.where])
        return Scores(tuple(values), sum(text.num_computed for text in self.texts))


@dataclass(eq=False, slots=True)
class WholeBatchTask:
    """A batch as one piece: the task itself. If it fails, others of its pass do not."""

    score: Callable[[], Scores]
    next_tokens: int = 1
    _scores: Scores | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def take(self) -> WholeBatchTask:
        self.next_tokens = 0
        return self

    def run(self) -> None:
        try:
            self._scores = self.score()
        except BaseException as error:
            self._error = error

    def scores(self) -> Scores:
        if self._error:
            raise self._error
        assert self._scores
        return self._scores


class WholeBatchReward(ABC):
    """A reward that scores a batch in one call, and keeps nothing but the prompt."""

    token_budget = 1  # one batch

    def __init__(self, name: str, fingerprint: str, description: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.description = description

    @abstractmethod
    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        """One finite score per candidate, higher is better; texts may be empty."""

    def open(self, prompt: Prompt, *, once: bool = False) -> RewardSession:
        return StatelessSession(
            lambda candidates: WholeBatchTask(partial(self.score, prompt, candidates))
        )

    def compute(self, pieces: Sequence[WholeBatchTask]) -> None:
        """One batch after the other."""
        for piece in pieces:
            piece.run()
