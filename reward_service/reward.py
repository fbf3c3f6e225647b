"""What a reward is, and how one batch is scored; imports no torch.

A batch becomes a task, a task is computed piece by piece, and one forward pass computes pieces of
several sessions: so a small batch never waits for the whole of a large one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from specrej import contracts as c
from specrej.answer_form import written
from specrej.threads import settle

T = TypeVar("T", bound=Hashable)

_CALLS = c.AnswerForm("json")


class RewardLost(Exception):
    """A reward's engine or device cannot compute until the service is restarted."""


class Task:
    """A batch under way; its pieces are computed in the order in which they are taken."""

    def __init__(
        self, pieces: Iterable[tuple[int, Any]], finish: Callable[[int], c.Scores]
    ) -> None:
        """pieces: the number of tokens of each, at least 1, and the piece. Each is made when the
        one before it is taken, the first one here. finish: from the number of tokens taken to one
        finite score per candidate, once every piece is computed.
        """
        self._pieces = iter(pieces)
        self._finish = finish
        self._next = next(self._pieces, None)
        self._num_taken = 0
        self.given = 0  # tokens that count as its part of the passes, see `take_fairly`

    @property
    def next_tokens(self) -> int:
        """Tokens of the next piece; 0 if none is left."""
        return self._next[0] if self._next else 0

    def take(self) -> Any:
        """The next piece, for `Reward.compute`."""
        assert self._next
        (num_tokens, piece), self._next = self._next, next(self._pieces, None)
        self._num_taken += num_tokens
        return piece

    def scores(self) -> c.Scores:
        """One finite score per candidate."""
        return self._finish(self._num_taken)


class Described:
    """What a reward tells of itself."""

    name: str  # in requests
    fingerprint: str  # digest of weights and settings
    description: str  # what it measures, in a sentence
    takes_data: bool = False  # whether requests may bring data for it
    sample_data: str = ""  # that it accepts
    is_cheap: bool = False  # microseconds per text, so that it can veto within rounds
    images: str = "text"  # as in its spec


class Reward(Described):
    """Scores responses to a prompt; called by one thread at a time, always the same one.

    By default a batch is one piece, which `score` computes, and a session is its prompt. Rewards
    whose batches share passes define `begin` and `compute` instead.
    """

    token_budget: int = 1  # most tokens per `compute`, unless a single piece has more

    def open(self, prompt: c.Prompt, *, once: bool = False) -> Any:
        """A session that keeps nothing yet; `once`: it gets a single batch.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        return prompt

    def open_with(self, prompt: c.Prompt, data: str) -> Any:
        """As `open`, of a reward that takes data: JSON, or an empty text.

        Raises:
            InvalidRequest: the reward needs other data; the paths begin with "data".
        """
        raise NotImplementedError

    def begin(self, session: Any, candidates: Sequence[c.Candidate]) -> Task:
        """A task for this batch; what the session keeps of other candidates is freed."""
        scores: Future[c.Scores] = Future()  # if it fails, the other batches of its pass do not
        piece = partial(settle, scores, partial(self.score, session, candidates))
        return Task([(1, piece)], lambda _: scores.result())

    def compute(self, pieces: Sequence[Any]) -> None:
        """Compute pieces that were taken from tasks of any sessions.

        Raises:
            RewardLost: it will never compute again.
        """
        for piece in pieces:
            piece()

    def free(self, session: Any) -> None:
        """Free what a session keeps; if it is used again, it computes that again."""

    def score(self, session: Any, candidates: Sequence[c.Candidate]) -> c.Scores:
        """One finite score per candidate, higher is better; texts may be empty. `session`: what
        `open` returned, the prompt by default."""
        raise NotImplementedError


class RemoteReward(Described, ABC):
    """A reward that another process computes; called on the event loop, by any number at once."""

    takes_data = True

    @abstractmethod
    async def answer(
        self, prompt: c.Prompt, candidates: Sequence[c.Candidate], data: str = ""
    ) -> c.Scores:
        """One score per candidate.

        Raises:
            InvalidRequest: the reward cannot take this prompt or this data.
            RewardInvalid: the server returned something else.
            Unavailable: the server cannot be reached, or is too slow.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""


def take_fairly(tasks: Sequence[Task], token_budget: int) -> list[Any]:
    """Pieces for one forward pass, of at most `token_budget` tokens; a larger one is alone in it.

    The next piece is always of the task that was given the fewest tokens, the first of equals.
    """
    pieces: list[Any] = []
    in_pass = 0
    while waiting := [task for task in tasks if task.next_tokens]:
        task = min(waiting, key=lambda task: task.given)
        num_tokens = task.next_tokens
        if pieces and in_pass + num_tokens > token_budget:
            break
        in_pass += num_tokens
        task.given += num_tokens
        pieces.append(task.take())
    return pieces


def score_batch(session: Any, reward: Reward, candidates: Sequence[c.Candidate]) -> c.Scores:
    """Scores of a batch that shares its passes with no other."""
    try:
        task = reward.begin(session, candidates)
        while pieces := take_fairly([task], reward.token_budget):
            reward.compute(pieces)
        return task.scores()
    except BaseException:
        reward.free(session)  # it counts on what was not computed
        raise


def score(reward: Reward, prompt: c.Prompt, texts: Sequence[str], data: str = "") -> c.Scores:
    """Scores of complete answers, in a session of their own."""
    if reward.takes_data:
        session = reward.open_with(prompt, data)
    else:
        session = reward.open(prompt, once=True)
    try:
        return score_batch(session, reward, as_candidates(texts, c.FinishReason.STOP))
    finally:
        reward.free(session)


def text_of(turn: c.Message) -> str:
    """All that a turn says, its calls in JSON."""
    return "\n".join(filter(None, (turn.text, written(turn.tool_calls, _CALLS))))


def as_candidates(texts: Sequence[str], finish: c.FinishReason | None = None) -> list[c.Candidate]:
    """Texts as candidates, with their indices as ids."""
    return [c.Candidate(i, text, 0, 0.0, finish) for i, text in enumerate(texts)]


def distinct(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """Every different item once, in order of appearance, and each item's index among them."""
    places: dict[T, int] = {}
    where = [places.setdefault(item, len(places)) for item in items]
    return list(places), where


@dataclass(eq=False, slots=True)
class Text:
    """A tokenized text that is computed whole, and the head's output for it once it is; `images`:
    those that its engine reads with it."""

    token_ids: Sequence[int]
    images: Any = None
    result: Any = None
    num_computed: int = 0


def text_task(
    texts: Sequence[Text], where: Sequence[int], to_scores: Callable[[list[Any]], list[float]]
) -> Task:
    """A batch of different texts, each of which is a piece.

    where: each candidate's index among the texts; to_scores: from their results to scores.
    """

    def finish(_: int) -> c.Scores:
        values = to_scores([texts[place].result for place in where])
        return c.Scores(tuple(values), sum(text.num_computed for text in texts))

    return Task(((len(text.token_ids), text) for text in texts), finish)
