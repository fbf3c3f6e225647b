"""All candidates of a prompt, generated to their ends, and their storage on disk.

A directory holds `trajectories.jsonl` and one `.npz` file per prompt. The first JSON line has the
settings of the collection; each further line describes one prompt: texts, lengths and finish
reasons. Log-probabilities and scores are in the `.npz` file that the line names. That file is
written before the line, so an interrupted collection can resume with the prompts that are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.json_lines import Line, add_line, read_lines
from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import Message, Prompt

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

_FILE = "trajectories.jsonl"
_SCALARS = ("prompt_id", "prompt_tokens", "max_tokens", "seed")  # fields stored as they are


class OffGrid(ValueError):
    """Prefixes were not scored at this position; the message has the nearest scored positions."""


@dataclass(frozen=True, slots=True)
class PrefixScores:
    """Scores of one reward for one prompt's candidates.

    partial: [N, P] of the first positions[p] tokens; NaN where the answer has fewer tokens, the
        final score where it has exactly that many.
    final: [N] of the whole answer.
    """

    partial: FloatArray
    final: FloatArray


@dataclass(frozen=True)  # no slots: `logprob_sums` is cached
class Trajectories:
    """All candidates of one prompt; candidate i is row i of every array.

    positions: [P] ascending token positions at which prefixes were scored: the grid.
    num_tokens: [N] tokens of each whole answer.
    finished: [N] finish reason STOP (True) or LENGTH.
    logprobs: [N, T] of each token, NaN past the end.
    rewards: by name, without "likelihood", which follows from `logprobs` at every position.
    """

    prompt_id: str
    prompt: Prompt
    prompt_tokens: int
    max_tokens: int
    seed: int
    positions: IntArray
    num_tokens: IntArray
    finished: BoolArray
    logprobs: FloatArray
    rewards: Mapping[str, PrefixScores]
    texts: tuple[str, ...]

    @property
    def n(self) -> int:
        """Number of candidates."""
        return len(self.num_tokens)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The available rewards, the likelihood last."""
        return (*self.rewards, LIKELIHOOD)

    @cached_property
    def logprob_sums(self) -> FloatArray:
        """[N, T] running sums, added in the engine's order so that results are equal bit by bit."""
        sums: FloatArray = np.cumsum(np.nan_to_num(self.logprobs, nan=0.0), axis=1)
        return sums

    def final(self, reward: str) -> FloatArray:
        """[N] scores of the whole answers.

        Raises:
            KeyError: the reward was not collected.
        """
        if reward == LIKELIHOOD:
            return self.logprob_sums[:, -1] / self.num_tokens
        return self.rewards[reward].final

    def values(self, reward: str, *, prefer_complete: bool) -> FloatArray:
        """[N] final scores by which whole answers are compared; the highest is the answer's.

        If complete answers are preferred, an answer that the limit ended counts as its score less
        the range of this prompt's scores, so that it is not above any complete one.
        """
        final = self.final(reward)
        return final - ~self.finished * np.ptp(final) if prefer_complete else final

    def partial(self, reward: str, position: int) -> FloatArray:
        """[N] scores of the first `position` tokens; NaN where the answer has fewer.

        Raises:
            OffGrid: no prefix was scored there.
        """
        if reward == LIKELIHOOD:
            means = self.logprob_sums[:, position - 1] / position
            return np.where(self.num_tokens >= position, means, np.nan)
        index = int(np.searchsorted(self.positions, position))
        if index == len(self.positions) or self.positions[index] != position:
            nearest = " and ".join(map(str, self.positions[max(0, index - 1) : index + 1]))
            raise OffGrid(
                f"no prefix was scored at token {position}: the nearest on the grid are "
                f"{nearest or 'none'}"
            )
        return self.rewards[reward].partial[:, index]

    def best(self, reward: str) -> int:
        """The candidate with the highest final score, the first of equals."""
        return int(np.argmax(self.final(reward)))

    def shortened(self, max_tokens: int) -> Trajectories:
        """The same answers under a smaller token limit.

        This is exact: a token depends on seed, candidate and step only, so a short answer is the
        beginning of the long one. Texts stay whole, since the text of a prefix is not stored.

        Raises:
            ValueError: `max_tokens` is above the limit of this collection.
            OffGrid: prefixes were not scored there.
        """
        if max_tokens > self.max_tokens:
            raise ValueError(f"{self.prompt_id} was generated up to {self.max_tokens} tokens only")
        columns = self.positions <= max_tokens
        is_cut = self.num_tokens > max_tokens
        rewards = {}
        for name, scores in self.rewards.items():
            final = scores.final
            if max_tokens < self.max_tokens:
                final = np.where(is_cut, self.partial(name, max_tokens), final)
            rewards[name] = PrefixScores(scores.partial[:, columns], final)
        return replace(
            self,
            max_tokens=max_tokens,
            positions=self.positions[columns],
            num_tokens=self.num_tokens.clip(max=max_tokens),
            finished=self.finished & ~is_cut,
            logprobs=self.logprobs[:, :max_tokens],
            rewards=rewards,
        )


class Store:
    """A directory of trajectories, created by `begin`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _FILE

    def begin(self, head: Line) -> None:
        """Start a collection; `head` is its first line and must have "settings"."""
        add_line(self._path, head)

    def add(self, trajectories: Trajectories) -> None:
        """Append a prompt."""
        name = f"{len(self.lines()):04d}.npz"
        path = self._directory / name
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(file, **_arrays(trajectories))
        temporary.replace(path)
        add_line(self._path, _line(trajectories) | {"arrays": name})

    def head(self) -> Line | None:
        """The first line; None if the collection does not exist.

        Raises:
            ValueError: the file is not a collection.
        """
        lines = read_lines(self._path)
        if lines and "settings" not in lines[0]:
            raise ValueError(f"{self._path} is not a collection of trajectories")
        return lines[0] if lines else None

    def lines(self) -> list[Line]:
        """One line per stored prompt, without its arrays."""
        return read_lines(self._path)[1:]

    def __iter__(self) -> Iterator[Trajectories]:
        """The stored prompts, loaded one at a time."""
        for line in self.lines():
            with np.load(self._directory / line["arrays"]) as arrays:
                yield _trajectories(line, arrays)


def load(directory: Path, reward: str = LIKELIHOOD) -> tuple[Trajectories, ...]:
    """All prompts of a collection, in memory.

    Raises:
        ValueError: it is not a collection, is empty, or does not have the reward.
    """
    store = Store(directory)
    store.head()
    prompts = tuple(store)
    if not prompts:
        raise ValueError(f"{directory} holds no trajectories yet")
    if any(reward not in prompt.reward_names for prompt in prompts):
        available = ", ".join(prompts[0].reward_names)
        raise ValueError(f"{directory} has no reward {reward}, but {available}")
    return prompts


def prompt_line(prompt: Prompt) -> Line:
    """A prompt as it is stored."""
    return {"messages": [asdict(turn) for turn in prompt.messages], "text": prompt.text}


def _line(prompt: Trajectories) -> Line:
    arrays = ("positions", "num_tokens", "finished")
    return {
        **{name: getattr(prompt, name) for name in _SCALARS},
        **{name: getattr(prompt, name).tolist() for name in arrays},
        "prompt": prompt_line(prompt.prompt),
        "rewards": list(prompt.rewards),
        "texts": list(prompt.texts),
    }


def _arrays(prompt: Trajectories) -> dict[str, Any]:
    arrays: dict[str, Any] = {"logprobs": _compact(prompt.logprobs)}
    for name, scores in prompt.rewards.items():
        arrays[f"partial/{name}"] = _compact(scores.partial)
        arrays[f"final/{name}"] = _compact(scores.final)
    return arrays


def _compact(values: FloatArray) -> NDArray[np.floating[Any]]:
    """As float32 where that is exact, which holds for values that a model computed in float32."""
    narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow.astype(np.float64), values, equal_nan=True) else values


def _trajectories(line: Line, arrays: Mapping[str, NDArray[Any]]) -> Trajectories:
    def floats(name: str) -> FloatArray:
        return arrays[name].astype(np.float64)

    messages = tuple(Message(**turn) for turn in line["prompt"]["messages"])
    return Trajectories(
        **{name: line[name] for name in _SCALARS},
        prompt=Prompt(messages=messages, text=line["prompt"]["text"]),
        positions=np.array(line["positions"], dtype=np.int64),
        num_tokens=np.array(line["num_tokens"], dtype=np.int64),
        finished=np.array(line["finished"], dtype=np.bool_),
        logprobs=floats("logprobs"),
        rewards={
            name: PrefixScores(floats(f"partial/{name}"), floats(f"final/{name}"))
            for name in line["rewards"]
        },
        texts=tuple(line["texts"]),
    )
