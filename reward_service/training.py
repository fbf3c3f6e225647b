"""Fits a Bradley-Terry head on a frozen causal backbone: `specrej train-reward`.

A pair of answers is right if the chosen one scores higher than the rejected one; the head is the
linear map that makes that likeliest (Bradley and Terry 1952), with weight decay, from the hidden
states at the last token of each conversation. These are computed once and kept beside the head, so
that a run that was stopped goes on where it was. Part of the pairs is held out to choose when to
stop; another part may be, to report on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

from reward_service.classifier import HEAD_TENSOR, ClassifierReward
from specrej import fingerprint
from specrej.contracts import Message, Prompt
from specrej.errors import SpecrejError

HEAD = "head.safetensors"
REPORT = "training.json"
FEATURES = "features.npy"

# Pairs between two notes of how far it is; what lies between them is computed again after a stop.
_PAIRS_AT_ONCE = 16


class BadPairs(ValueError):
    """A file of pairs that cannot be read; says where."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and two answers to it."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Report:
    """How good the head is; accuracies are shares of pairs ranked right."""

    steps: int
    train_pairs: int
    validation_pairs: int
    test_pairs: int
    train_accuracy: float
    validation_accuracy: float
    test_accuracy: float
    test_interval: tuple[float, float]  # 95 %, Wilson


def read_pairs(path: Path) -> list[Pair]:
    """JSON lines of {prompt or messages, chosen, rejected}, gzipped or not.

    Raises:
        BadPairs: a line is something else.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    lines = enumerate(text.split("\n"), 1)
    return [_pair(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _pair(line: str, where: str) -> Pair:
    try:
        data = json.loads(line)
        turns = data.get("messages") or [{"role": "user", "content": data["prompt"]}]
        messages = tuple(Message(str(turn["role"]), str(turn["content"])) for turn in turns)
        pair = Pair(Prompt(messages=messages), data["chosen"], data["rejected"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        needs = "must be {prompt or messages, chosen, rejected}"
        raise BadPairs(f"{where}: {needs}: {error}") from None
    if not isinstance(pair.chosen, str) or not isinstance(pair.rejected, str):
        raise BadPairs(f"{where}: chosen and rejected must be texts")
    return pair


def fit(
    differences: Tensor,
    validation: Tensor,
    decay: float,
    most_steps: int = 2000,
    patience: int = 50,
) -> tuple[Tensor, int]:
    """The head's weights [hidden], and the steps they took.

    differences: chosen - rejected features [pairs, hidden]. Minimises the mean of
    -log sigmoid(difference . weights) + decay / 2 * |weights|^2 over standardised features, by
    Adam; stops when the held-out loss has not fallen for `patience` steps, and returns to its best.
    """
    scale = differences.std(dim=0).clamp(min=1e-6)
    inputs, held_out = differences / scale, validation / scale
    weights = torch.zeros(inputs.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.003)
    best, best_loss, best_step = weights.detach().clone(), math.inf, 0
    for step in range(most_steps):
        with torch.no_grad():
            loss = -F.logsigmoid(held_out @ weights).mean().item()
        if loss < best_loss:
            best, best_loss, best_step = weights.detach().clone(), loss, step
        if step - best_step >= patience:
            break
        optimizer.zero_grad()
        objective = -F.logsigmoid(inputs @ weights).mean() + decay / 2 * weights.square().sum()
        objective.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return best / scale, best_step


def accuracy(differences: Tensor, weights: Tensor) -> float:
    """The share of pairs whose chosen answer scores higher; ties count half."""
    margins = differences @ weights
    right = (margins > 0).float() + 0.5 * (margins == 0).float()
    return float(right.mean()) if len(margins) else math.nan


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` (Wilson 1927)."""
    if not count:
        return math.nan, math.nan
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = z / (1 + z * z / count)
    spread *= math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - spread, middle + spread


def main() -> None:
    """The command line."""
    arguments = _arguments()
    try:
        report = train(arguments)
    except (BadPairs, OSError, ValueError, SpecrejError) as error:
        raise SystemExit(f"specrej train-reward: {error}") from None
    print(json.dumps(asdict(report)))


def train(arguments: argparse.Namespace) -> Report:
    """Features, fit and report; writes the head and the report into the output directory.

    Raises:
        BadPairs, OSError, ValueError, SpecrejError: the pairs or the backbone cannot be used.
    """
    pairs = read_pairs(arguments.pairs)
    held_out = arguments.validation + arguments.test
    if len(pairs) <= held_out:
        raise BadPairs(f"{arguments.pairs}: {len(pairs)} pairs, {held_out} of them held out")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    found = torch.from_numpy(features(arguments.backbone, pairs, out / FEATURES))
    differences = found[:, 0] - found[:, 1]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(arguments.seed))
    sizes = [len(pairs) - held_out, arguments.validation, arguments.test]
    fitting, validation, test = torch.split(differences[order], sizes)
    weights, steps = fit(fitting, validation, arguments.decay)
    save_file({HEAD_TENSOR: weights}, out / HEAD)
    right = accuracy(test, weights)
    report = Report(
        steps=steps,
        train_pairs=sizes[0],
        validation_pairs=sizes[1],
        test_pairs=sizes[2],
        train_accuracy=round(accuracy(fitting, weights), 4),
        validation_accuracy=round(accuracy(validation, weights), 4),
        test_accuracy=round(right, 4),
        test_interval=wilson(right, len(test)),
    )
    (out / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def features(backbone: Path, pairs: Sequence[Pair], kept: Path) -> NDArray[np.float32]:
    """What the head sees of each pair, [pairs, 2, hidden]; chosen answers first.

    Kept in a file as far as they are computed; those that are there already are read.
    """
    hidden = AutoConfig.from_pretrained(backbone).hidden_size
    shape, digest = (len(pairs), 2, hidden), _digest(backbone, pairs)
    done_file = kept.with_suffix(".done")
    done = 0
    if kept.exists() and done_file.exists():
        known, count = done_file.read_text().split()
        done = int(count) if known == digest else 0
    found = np.lib.format.open_memmap(
        kept, mode="r+" if done else "w+", dtype=np.float32, shape=None if done else shape
    )
    if done == len(pairs):
        return np.asarray(found)
    untrained = kept.with_name("untrained.safetensors")
    save_file({HEAD_TENSOR: torch.zeros(hidden)}, untrained)
    reward = ClassifierReward(backbone, name="training", head=untrained)
    for number in range(done, len(pairs)):
        pair = pairs[number]
        found[number] = reward.features(pair.prompt, [pair.chosen, pair.rejected]).numpy()
        if (number + 1) % _PAIRS_AT_ONCE == 0 or number + 1 == len(pairs):
            found.flush()
            done_file.write_text(f"{digest} {number + 1}")
            print(f"features of {number + 1} of {len(pairs)} pairs", file=sys.stderr, flush=True)
    untrained.unlink()
    return np.asarray(found)


def _digest(backbone: Path, pairs: Sequence[Pair]) -> str:
    """Of all that features depend on."""
    return fingerprint.of_directory(backbone, {"pairs": repr(pairs)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="specrej train-reward",
        description="Fit a Bradley-Terry head on a frozen causal backbone.",
    )
    parser.add_argument("--backbone", type=Path, required=True, help="a local causal model")
    parser.add_argument(
        "--pairs", type=Path, required=True, help="JSON lines of {prompt, chosen, rejected}"
    )
    parser.add_argument("--out", type=Path, required=True, help="where head and features go")
    parser.add_argument("--validation", type=int, default=200, help="pairs that say when to stop")
    parser.add_argument("--test", type=int, default=300, help="pairs that are only reported on")
    parser.add_argument("--decay", type=float, default=0.01, help="weight decay")
    parser.add_argument("--seed", type=int, default=0, help="how pairs are told apart")
    return parser.parse_args()


if __name__ == "__main__":
    main()
