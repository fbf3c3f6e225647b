"""What a reward is to the rest of the service, and how a batch goes through it; loads no torch.

A batch of a session becomes a task, a task is computed piece by piece, and pieces of several
sessions may be computed together: so a small batch never waits for the whole of a large one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from reward_service.batching import take_fairly
from specrej.contracts import Candidate, FinishReason, Prompt, Scores


class ScoringTask(Protocol):
    """A batch on its way; pieces are computed in the order in which they are taken."""

    @property
    def next_tokens(self) -> int:
        """Tokens of the next piece; 0: there is none left."""

    def take(self) -> Any:
        """The next piece, for `Reward.compute`."""

    def scores(self) -> Scores:
        """One finite score per candidate, once every piece is computed."""


class RewardSession(Protocol):
    """One reward, bound to one prompt; called by the reward's thread."""

    def begin(self, candidates: Sequence[Candidate]) -> ScoringTask:
        """A batch to score; what is kept of candidates missing from it is freed."""

    def close(self) -> None:
        """Free what is kept; a session that goes on computes it again."""


class Reward(Protocol):
    """Judges responses to a prompt; called by one thread at a time, always the same one."""

    @property
    def name(self) -> str:
        """The name to ask for."""

    @property
    def fingerprint(self) -> str:
        """Digest of weights and settings."""

    @property
    def description(self) -> str:
        """What it measures, in a sentence."""

    @property
    def token_budget(self) -> int:
        """Most tokens to hand to `compute` at once, but for a single piece that has more."""

    def open(self, prompt: Prompt, *, once: bool = False) -> RewardSession:
        """A session that keeps nothing yet; `once`: there will be a single batch.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """

    def compute(self, pieces: Sequence[Any]) -> None:
        """What tasks of any sessions gave out."""


def score_batch(session: RewardSession, reward: Reward, candidates: Sequence[Candidate]) -> Scores:
    """A batch from beginning to end, alone."""
    try:
        task = session.begin(candidates)
        while pieces := take_fairly([task], reward.token_budget):
            reward.compute(pieces)
        return task.scores()
    except BaseException:
        session.close()  # it counts on what was not computed
        raise


def score(reward: Reward, prompt: Prompt, texts: Sequence[str]) -> Scores:
    """Whole answers, alone; nothing is kept."""
    session = reward.open(prompt, once=True)
    try:
        return score_batch(session, reward, whole_answers(texts))
    finally:
        session.close()


def whole_answers(texts: Sequence[str]) -> list[Candidate]:
    """Texts that are complete, as candidates."""
    return [Candidate(i, text, 0, 0.0, FinishReason.STOP) for i, text in enumerate(texts)]


class WholeBatchReward(ABC):
    """A reward that scores a batch in one call, and keeps nothing but the prompt."""

    token_budget = 1  # a piece is a whole batch

    def __init__(self, name: str, fingerprint: str, description: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.description = description

    @abstractmethod
    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        """One finite score per candidate, higher is better; texts may be empty."""

    def open(self, prompt: Prompt, *, once: bool = False) -> _PromptOnly:
        return _PromptOnly(self, prompt)

    def compute(self, pieces: Sequence[_WholeBatch]) -> None:
        """One batch after the other; may be overridden to ask for several at a time."""
        for piece in pieces:
            piece.run()


class _PromptOnly:
    def __init__(self, reward: WholeBatchReward, prompt: Prompt) -> None:
        self._reward = reward
        self._prompt = prompt

    def begin(self, candidates: Sequence[Candidate]) -> _WholeBatch:
        return _WholeBatch(self._reward, self._prompt, candidates)

    def close(self) -> None:
        """There is nothing to free."""


class _WholeBatch:
    """A task of one piece: itself. What fails in it fails alone, whatever else is in the pass."""

    def __init__(
        self, reward: WholeBatchReward, prompt: Prompt, candidates: Sequence[Candidate]
    ) -> None:
        self._reward = reward
        self._prompt = prompt
        self._candidates = candidates
        self._scores: Scores | None = None
        self._error: BaseException | None = None
        self.next_tokens = 1

    def take(self) -> _WholeBatch:
        self.next_tokens = 0
        return self

    def run(self) -> None:
        try:
            self._scores = self._reward.score(self._prompt, self._candidates)
        except BaseException as error:
            self._error = error

    def scores(self) -> Scores:
        if self._error:
            raise self._error
        assert self._scores
        return self._scores
