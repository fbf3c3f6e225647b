"""`specrej train-reward`: a reward from preference pairs, on a causal backbone.

A head alone (head.py), or with it an adapter for the whole network (lora_fit.py). Some pairs are
held out to choose by, the last ones of the file to report on: against chance, and against the
backbone's own likelihood, untrained. What is written is a directory that a reward of kind
classifier loads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from reward_service import head
from reward_service.causal_reward import CausalReward, Options
from reward_service.classifier import HEAD_TENSOR, MANIFEST, load_classifier
from reward_service.likelihood import Likelihood, load_likelihood
from reward_service.pairs import BadPairs, Pair, read_pairs, share_right, wilson
from reward_service.reward import Reward, score
from specrej import fingerprint
from specrej.errors import SpecrejError

HEAD = "head.safetensors"
ADAPTER = "adapter"
REPORT = "training.json"
FEATURES = "features.npy"

_PAIRS_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of pairs ranked right, with its 95 % interval (Wilson); chance is a half."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, margins: Sequence[float]) -> Accuracy:
        share = share_right(margins)
        low, high = wilson(share, len(margins))
        return cls(round(share, 4), round(low, 4), round(high, 4))


@dataclass(frozen=True, slots=True)
class Report:
    """How good the reward is on pairs that it was not trained on.

    untrained_likelihood: of the backbone's own mean log-likelihood, on the same pairs.
    """

    method: str
    pairs: int
    test_pairs: int
    test: Accuracy
    untrained_likelihood: Accuracy | None


def main() -> None:
    """The command line."""
    arguments = _arguments()
    try:
        report = train(arguments)
    except (BadPairs, OSError, ValueError, SpecrejError) as error:
        raise SystemExit(f"specrej train-reward: {error}") from None
    print(json.dumps(asdict(report)))


def train(arguments: argparse.Namespace) -> Report:
    """Fit and report; writes the reward and the report into the output directory.

    Raises:
        BadPairs, OSError, ValueError, SpecrejError: the pairs or the backbone cannot be used.
    """
    pairs = read_pairs(arguments.pairs)
    held_out = arguments.validation + arguments.test
    if len(pairs) <= held_out:
        raise BadPairs(f"{arguments.pairs}: {len(pairs)} pairs, {held_out} of them held out")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    fit = _fit_lora if arguments.lora else _fit_head
    method = fit(arguments, pairs)
    _write_manifest(arguments.backbone, out, with_adapter=bool(arguments.lora))
    test = pairs[-arguments.test :]
    trained = load_classifier(Options("trained", out))
    baseline = None
    right = Accuracy.of(_margins(trained, test, "scored"))
    if not arguments.no_baseline:
        untrained = load_likelihood(
            Options("untrained", arguments.backbone), likelihood=Likelihood(mean=True)
        )
        baseline = Accuracy.of(_margins(untrained, test, "likelihoods"))
    report = Report(method, len(pairs) - arguments.test, len(test), right, baseline)
    (out / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def note(text: str) -> None:
    """Progress, for who waits."""
    print(text, file=sys.stderr, flush=True)


def _fit_head(arguments: argparse.Namespace, pairs: Sequence[Pair]) -> str:
    """Writes the head; returns how it was found."""
    found = torch.from_numpy(
        head.features(arguments.backbone, pairs, arguments.out / FEATURES, note)
    )
    differences = (found[:, 0] - found[:, 1])[: len(pairs) - arguments.test]
    order = torch.randperm(
        len(differences), generator=torch.Generator().manual_seed(arguments.seed)
    )
    sizes = [arguments.validation, len(differences) - arguments.validation]
    validation, fitting = torch.split(differences[order], sizes)
    weights, decay = head.fit_head(fitting, validation, note)
    save_file({HEAD_TENSOR: weights}, arguments.out / HEAD)
    return f"head, weight decay {decay}"


def _fit_lora(arguments: argparse.Namespace, pairs: Sequence[Pair]) -> str:
    """Writes head and adapter; returns how they were found."""
    # Peft takes a second to load, and only this needs it.
    from reward_service.lora_fit import LoraFit, Schedule

    schedule = Schedule(rank=arguments.lora, epochs=arguments.epochs, seed=arguments.seed)
    known = list(pairs[: len(pairs) - arguments.test])
    random.Random(arguments.seed).shuffle(known)
    digest = fingerprint.of_directory(arguments.backbone, {"pairs": repr(known)})
    fit = LoraFit(arguments.backbone, arguments.out, schedule, digest, note)
    fit.run(known[arguments.validation :], known[: arguments.validation])
    return f"head and adapter of rank {schedule.rank}"


def _write_manifest(backbone: Path, out: Path, *, with_adapter: bool) -> None:
    """Paths are relative to the directory, so that both can be moved together."""
    manifest = {"backbone": os.path.relpath(backbone, out), "head": HEAD}
    if with_adapter:
        manifest |= {"adapter": ADAPTER, "head": f"{ADAPTER}/{HEAD}"}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _margins(reward: Reward | CausalReward, pairs: Sequence[Pair], what: str) -> list[float]:
    """How far each chosen answer is ahead."""
    margins = []
    for number, pair in enumerate(pairs, 1):
        chosen, rejected = score(reward, pair.prompt, [pair.chosen, pair.rejected]).values
        margins.append(chosen - rejected)
        if number % _PAIRS_AT_ONCE == 0 or number == len(pairs):
            note(f"{what}: {number} of {len(pairs)} test pairs")
    return margins


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="specrej train-reward",
        description="Fit a Bradley-Terry reward on a causal backbone.",
    )
    parser.add_argument("--backbone", type=Path, required=True, help="a local causal model")
    parser.add_argument(
        "--pairs", type=Path, required=True, help="JSON lines of {prompt, chosen, rejected}"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the reward goes")
    parser.add_argument("--validation", type=_count, default=200, help="pairs to choose by")
    parser.add_argument("--test", type=_count, default=300, help="last pairs, only reported on")
    parser.add_argument("--seed", type=int, default=0, help="chooses the pairs to choose by")
    parser.add_argument(
        "--lora", type=_count, metavar="RANK", help="train an adapter as well, of this rank"
    )
    parser.add_argument("--epochs", type=_count, default=3, help="most of the adapter's training")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not compare with the backbone's likelihood"
    )
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
