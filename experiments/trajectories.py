"""All candidates of a prompt, generated to their ends, and their storage on disk."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import Message, Prompt

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

_HEAD = "collection.json"
_SCALARS = ("prompt_id", "prompt_tokens", "max_tokens", "seed")  # fields stored as they are
_ARRAYS = ("positions", "num_tokens", "finished", "logprobs")


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
    texts: list[str]

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

    def partial(self, reward: str, position: int) -> FloatArray:
        """[N] scores of the first `position` tokens; NaN where the answer has fewer.

        Raises:
            ValueError: no prefix was scored there; the message has the nearest scored positions.
        """
        if reward == LIKELIHOOD:
            means = self.logprob_sums[:, position - 1] / position
            return np.where(self.num_tokens >= position, means, np.nan)
        index = int(np.searchsorted(self.positions, position))
        if index == len(self.positions) or self.positions[index] != position:
            nearest = " and ".join(map(str, self.positions[max(0, index - 1) : index + 1]))
            raise ValueError(
                f"no prefix was scored at token {position}: the nearest on the grid are "
                f"{nearest or 'none'}"
            )
        return self.rewards[reward].partial[:, index]

    def shortened(self, max_tokens: int) -> Trajectories:
        """The same answers under a smaller token limit.

        This is exact: a token depends on seed, candidate and step only, so a short answer is the
        beginning of the long one. Texts stay whole, since the text of a prefix is not stored.

        Raises:
            ValueError: `max_tokens` is above the limit of this collection, or prefixes were not
                scored there.
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
    """A directory with one collection: `collection.json` and a file per prompt.

    A file is renamed to its name when it is complete, so an interrupted collection can resume with
    the prompts that are missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, head: Mapping[str, Any]) -> None:
        """Start a collection; `head` must have "settings"."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(_HEAD, json.dumps(head, indent=1).encode())

    def add(self, trajectories: Trajectories) -> None:
        """Append a prompt."""
        file = io.BytesIO()
        np.savez_compressed(file, **_arrays(trajectories))
        self._write(f"{len(self._files()):04d}.npz", file.getvalue())

    def head(self) -> dict[str, Any] | None:
        """What the collection was begun with; None if it does not exist."""
        path = self._directory / _HEAD
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def __iter__(self) -> Iterator[Trajectories]:
        """The stored prompts, loaded one at a time."""
        for path in self._files():
            with np.load(path) as arrays:
                yield _trajectories(arrays)

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.npz"))

    def _write(self, name: str, content: bytes) -> None:
        temporary = self._directory / f"{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(self._directory / name)


def load(directory: Path, reward: str = LIKELIHOOD) -> tuple[Trajectories, ...]:
    """All prompts of a collection, in memory.

    Raises:
        ValueError: it has no prompts, or does not have the reward.
    """
    prompts = tuple(Store(directory))
    if not prompts:
        raise ValueError(f"{directory} holds no trajectories yet")
    if any(reward not in prompt.reward_names for prompt in prompts):
        available = ", ".join(prompts[0].reward_names)
        raise ValueError(f"{directory} has no reward {reward}, but {available}")
    return prompts


def prompt_line(prompt: Prompt) -> dict[str, Any]:
    """A prompt as it is stored."""
    return {"messages": [asdict(turn) for turn in prompt.messages], "text": prompt.text}


def _arrays(made: Trajectories) -> dict[str, Any]:
    """The content of a file; `about` is a JSON object."""
    about = {name: getattr(made, name) for name in _SCALARS} | {
        "prompt": prompt_line(made.prompt),
        "rewards": [*made.rewards],
        "texts": made.texts,
    }
    arrays: dict[str, Any] = {name: getattr(made, name) for name in _ARRAYS}
    for name, scores in made.rewards.items():
        arrays |= {f"partial/{name}": scores.partial, f"final/{name}": scores.final}
    return {name: _compact(array) for name, array in arrays.items()} | {"about": json.dumps(about)}


def _compact(values: NDArray[Any]) -> NDArray[Any]:
    """As float32 where that is exact, which holds for values that a model computed in float32."""
    if values.dtype != np.float64:
        return values
    narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow.astype(np.float64), values, equal_nan=True) else values


def _trajectories(arrays: Mapping[str, NDArray[Any]]) -> Trajectories:
    def floats(name: str) -> FloatArray:
        return arrays[name].astype(np.float64)

    about = json.loads(str(arrays["about"]))
    messages = tuple(Message(**turn) for turn in about["prompt"]["messages"])
    return Trajectories(
        **{name: about[name] for name in _SCALARS},
        positions=arrays["positions"],
        num_tokens=arrays["num_tokens"],
        finished=arrays["finished"],
        prompt=Prompt(messages=messages, text=about["prompt"]["text"]),
        logprobs=floats("logprobs"),
        rewards={
            name: PrefixScores(floats(f"partial/{name}"), floats(f"final/{name}"))
            for name in about["rewards"]
        },
        texts=about["texts"],
    )
