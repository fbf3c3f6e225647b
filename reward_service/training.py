"""Fits a Bradley-Terry head on a frozen causal backbone: `specrej train-reward`.

A pair of answers is right if the chosen one scores higher than the rejected one; the head is the
linear map that makes that likeliest (Bradley and Terry 1952), with weight decay, from the hidden
states at the last token of each conversation. These are computed once and kept beside the head:
a run that was stopped goes on where it was. Some pairs are held out to choose the weight decay,
the last ones of the file to report on.
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

# Weight decays to try, strong to weak.
_DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)

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

    decay: float
    pairs: int
    accuracy: float  # on the pairs it was fitted on
    test_pairs: int
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


def fit(differences: Tensor, validation: Tensor) -> tuple[Tensor, float]:
    """The head's weights [hidden], and the weight decay that they were found with.

    differences: chosen - rejected features [pairs, hidden]. Decays are tried from strong to weak,
    until the held-out loss has risen twice; with the best of them, all pairs are fitted again.
    """
    scale = torch.cat((differences, validation)).std(dim=0).clamp(min=1e-6)
    best_decay, best_loss, rises = _DECAYS[0], math.inf, 0
    for decay in _DECAYS:
        weights = _fit(differences / scale, decay)
        loss = -F.logsigmoid(validation / scale @ weights).mean().item()
        right = accuracy(validation / scale, weights)
        note(f"decay {decay}: held-out loss {loss:.4f}, accuracy {right:.3f}")
        if loss < best_loss:
            best_decay, best_loss = decay, loss
        else:
            rises += 1
        if rises == 2:
            break
    return _fit(torch.cat((differences, validation)) / scale, best_decay) / scale, best_decay


def _fit(inputs: Tensor, decay: float) -> Tensor:
    """Minimises mean(-log sigmoid(inputs . weights)) + decay / 2 * |weights|^2, by L-BFGS."""
    weights = torch.zeros(inputs.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def objective() -> float:
        optimizer.zero_grad()
        loss = -F.logsigmoid(inputs @ weights).mean() + decay / 2 * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weights.detach()


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
    differences, test = differences[: len(pairs) - arguments.test], differences[-arguments.test :]
    order = torch.randperm(
        len(differences), generator=torch.Generator().manual_seed(arguments.seed)
    )
    sizes = [arguments.validation, len(pairs) - held_out]
    validation, fitting = torch.split(differences[order], sizes)
    weights, decay = fit(fitting, validation)
    save_file({HEAD_TENSOR: weights}, out / HEAD)
    right = accuracy(test, weights)
    report = Report(
        decay=decay,
        pairs=len(differences),
        accuracy=round(accuracy(differences, weights), 4),
        test_pairs=len(test),
        test_accuracy=round(right, 4),
        test_interval=wilson(right, len(test)),
    )
    (out / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def features(backbone: Path, pairs: Sequence[Pair], kept: Path) -> NDArray[np.float32]:
    """What the head sees of each pair, [pairs, 2, hidden]; chosen answers first.

    Kept in a file as far as they are computed; those that are there already are read.
    """
    hidden = AutoConfig.from_pretrained(backbone, local_files_only=True).hidden_size
    shape, digest = (len(pairs), 2, hidden), _digest(backbone, pairs)
    done_file = kept.with_suffix(".done")
    done = 0
    if kept.exists() and done_file.exists():
        known, count = done_file.read_text().split()
        done = int(count) if known == digest else 0
    if not done:  # nothing may vouch for what is overwritten now
        done_file.unlink(missing_ok=True)
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
            note(f"features of {number + 1} of {len(pairs)} pairs")
    untrained.unlink()
    return np.asarray(found)


def note(text: str) -> None:
    """Progress, for who waits."""
    print(text, file=sys.stderr, flush=True)


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
    parser.add_argument("--validation", type=_count, default=200, help="pairs to choose decay by")
    parser.add_argument("--test", type=_count, default=300, help="last pairs, only reported on")
    parser.add_argument("--seed", type=int, default=0, help="chooses the pairs to choose decay by")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
