"""All candidates of a prompt, written to their ends, and how they are kept on disk.

A directory holds `trajectories.jsonl` and an `.npz` per prompt. The first line of the JSON lines
has the settings; every other one is a prompt: its texts, lengths and how they ended. Its arrays,
log-probabilities and scores, are in the `.npz` that the line names, which is written first: so a
collection that was stopped, or killed, goes on with the prompts that are missing.

Knows no model, no policy and no figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Message, Prompt

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
Line = dict[str, Any]

_FILE = "trajectories.jsonl"


class OffGrid(ValueError):
    """Prefixes were not scored at this position; says which neighbours there are."""


@dataclass(frozen=True, slots=True)
class PrefixScores:
    """What one reward says of one prompt's candidates.

    partial: [N, P] of the first positions[p] tokens; NaN where the answer has ended before, the
        whole answer's where it ends just there.
    final: [N] of the whole answer.
    """

    partial: FloatArray
    final: FloatArray


@dataclass(frozen=True, slots=True)
class Trajectories:
    """All candidates of one prompt; candidate i is row i of every array.

    positions: [P] ascending token positions at which prefixes were scored: the grid.
    num_tokens: [N] tokens of each whole answer.
    finished: [N] STOP (True) or LENGTH.
    logprobs: [N, T] of each token, NaN past the end.
    rewards: by name; "likelihood" follows from `logprobs` and is exact at every position.
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
        """Candidates."""
        return len(self.num_tokens)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """All that can be asked for, the likelihood last."""
        return (*(name for name in self.rewards if name != LIKELIHOOD), LIKELIHOOD)

    def scores(self, reward: str) -> PrefixScores:
        """A reward's scores on the grid.

        Raises:
            KeyError: it was not collected.
        """
        if reward == LIKELIHOOD and LIKELIHOOD not in self.rewards:
            return likelihood(self.logprobs, self.num_tokens, self.positions)
        return self.rewards[reward]

    def partial_at(self, reward: str, position: int) -> FloatArray:
        """[N] scores of the first `position` tokens; NaN where the answer has ended before.

        Raises:
            OffGrid: no prefix was scored there.
        """
        if reward == LIKELIHOOD:
            return _mean_logprob(self.logprobs, self.num_tokens, position)
        index = int(np.searchsorted(self.positions, position))
        if index == len(self.positions) or self.positions[index] != position:
            raise OffGrid(_neighbours(self.positions, index, position))
        return self.rewards[reward].partial[:, index]

    def take(self, candidates: Sequence[int] | IntArray) -> Trajectories:
        """Only these candidates, as 0, 1, ...; one may be there several times."""
        rows = np.asarray(candidates, dtype=np.int64)
        rewards = {
            name: PrefixScores(scores.partial[rows], scores.final[rows])
            for name, scores in self.rewards.items()
        }
        return replace(
            self,
            num_tokens=self.num_tokens[rows],
            finished=self.finished[rows],
            logprobs=self.logprobs[rows],
            rewards=rewards,
            texts=tuple(self.texts[row] for row in rows),
        )


def likelihood(logprobs: FloatArray, num_tokens: IntArray, positions: IntArray) -> PrefixScores:
    """The mean log-probability, which the generator's own reward is, on a grid."""
    columns = [_mean_logprob(logprobs, num_tokens, int(position)) for position in positions]
    partial = np.stack(columns, axis=1) if columns else np.empty((len(num_tokens), 0))
    return PrefixScores(
        partial, likelihood_sums(logprobs)[np.arange(len(num_tokens)), -1] / num_tokens
    )


def likelihood_sums(logprobs: FloatArray) -> FloatArray:
    # Added one after the other, as the engine does, so that not even the last bit differs.
    sums: FloatArray = np.cumsum(np.nan_to_num(logprobs, nan=0.0), axis=1)
    return sums


def _mean_logprob(logprobs: FloatArray, num_tokens: IntArray, position: int) -> FloatArray:
    """[N] of the first `position` tokens."""
    means: FloatArray = likelihood_sums(logprobs[:, :position])[:, -1] / position
    return np.where(num_tokens >= position, means, np.nan)


def _neighbours(positions: IntArray, index: int, position: int) -> str:
    near = " and ".join(str(each) for each in positions[max(0, index - 1) : index + 1])
    return f"no prefix was scored at token {position}: the nearest on the grid are {near or 'none'}"


class Store:
    """A directory of trajectories; made by the first write."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / _FILE

    def begin(self, head: Line) -> None:
        """A new collection; `head` has its "settings", and whatever else is known."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(head) + "\n", "utf-8")

    def add(self, trajectories: Trajectories, notes: Line | None = None) -> None:
        """One more prompt; `notes` are kept with it."""
        name = f"{len(self.lines()):04d}.npz"
        arrays = self._directory / name
        torn = arrays.with_suffix(".tmp")
        with torn.open("wb") as file:
            np.savez_compressed(file, **_arrays(trajectories))
        torn.replace(arrays)
        line = _line(trajectories) | {"arrays": name, "notes": notes or {}}
        with self._path.open("a", encoding="utf-8") as file:
            # A line that was torn by a kill must not swallow the next.
            file.write("" if self._ends_whole() else "\n")
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def head(self) -> Line | None:
        """The first line; None where there is nothing yet.

        Raises:
            ValueError: it is not a collection.
        """
        lines = self._whole_lines()
        if lines and "settings" not in lines[0]:
            raise ValueError(f"{self._path} is not a collection of trajectories")
        return lines[0] if lines else None

    def lines(self) -> list[Line]:
        """A line per prompt that is there, without its arrays."""
        return self._whole_lines()[1:]

    def __iter__(self) -> Iterator[Trajectories]:
        """Every prompt that is there, one at a time."""
        for line in self.lines():
            with np.load(self._directory / line["arrays"]) as arrays:
                yield _trajectories(line, arrays)

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, 2)
            return file.read(1) == b"\n"

    def _whole_lines(self) -> list[Line]:
        """All that parse; a line that was torn is nothing."""
        lines = []
        # As bytes: what was torn may not even be text.
        for line in self._path.read_bytes().split(b"\n") if self._path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines


def load(directory: Path) -> tuple[Trajectories, ...]:
    """All prompts of a collection, in memory.

    Raises:
        ValueError: it is not a collection, or an empty one.
    """
    store = Store(directory)
    store.head()
    kept = tuple(store)
    if not kept:
        raise ValueError(f"{directory} holds no trajectories yet")
    return kept


def _line(kept: Trajectories) -> Line:
    return {
        "prompt_id": kept.prompt_id,
        "prompt": plain(kept.prompt),
        "prompt_tokens": kept.prompt_tokens,
        "max_tokens": kept.max_tokens,
        "seed": kept.seed,
        "positions": kept.positions.tolist(),
        "num_tokens": kept.num_tokens.tolist(),
        "finished": kept.finished.tolist(),
        "rewards": [name for name in kept.rewards if name != LIKELIHOOD],
        "texts": list(kept.texts),
    }


def _arrays(kept: Trajectories) -> dict[str, Any]:
    arrays: dict[str, Any] = {"logprobs": _narrowed(kept.logprobs)}
    for name, scores in kept.rewards.items():
        if name != LIKELIHOOD:
            arrays[f"partial/{name}"] = _narrowed(scores.partial)
            arrays[f"final/{name}"] = _narrowed(scores.final)
    return arrays


def _narrowed(values: FloatArray) -> NDArray[np.floating[Any]]:
    """As float32 where that loses nothing: a model's own are."""
    narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow.astype(np.float64), values, equal_nan=True) else values


def _trajectories(line: Line, arrays: Mapping[str, NDArray[Any]]) -> Trajectories:
    positions = np.array(line["positions"], dtype=np.int64)
    num_tokens = np.array(line["num_tokens"], dtype=np.int64)
    logprobs = arrays["logprobs"].astype(np.float64)
    rewards = {
        name: PrefixScores(
            arrays[f"partial/{name}"].astype(np.float64), arrays[f"final/{name}"].astype(np.float64)
        )
        for name in line["rewards"]
    }
    return Trajectories(
        prompt_id=line["prompt_id"],
        prompt=_prompt(line["prompt"]),
        prompt_tokens=line["prompt_tokens"],
        max_tokens=line["max_tokens"],
        seed=line["seed"],
        positions=positions,
        num_tokens=num_tokens,
        finished=np.array(line["finished"], dtype=np.bool_),
        logprobs=logprobs,
        rewards={**rewards, LIKELIHOOD: likelihood(logprobs, num_tokens, positions)},
        texts=tuple(line["texts"]),
    )


def plain(prompt: Prompt) -> Line:
    """A prompt as it is kept."""
    return {"messages": [asdict(turn) for turn in prompt.messages], "text": prompt.text}


def _prompt(kept: Line) -> Prompt:
    messages = tuple(Message(**each) for each in kept["messages"])
    return Prompt(messages=messages, text=kept["text"])
