"""`specrej train-reward`: a reward from preference pairs, on a causal backbone.

Fits a linear Bradley-Terry head on the frozen backbone's last states. Some pairs are held out to
choose the weight decay. The last pairs of the file are the test set, to compare the reward with
chance and with the untrained backbone's likelihood. The result is the file of a head, for a reward
of kind classifier on that backbone. examples/train_reward trains the whole network instead.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

from reward_service.checkpoint import HEAD_TENSOR, load_model
from reward_service.conversation import Turns, load_conversation
from reward_service.kinds.causal import CausalReward
from reward_service.kinds.classifier import load_classifier
from reward_service.kinds.likelihood import load_likelihood
from reward_service.reward import Reward, score
from reward_service.specs import ClassifierSpec, LikelihoodSpec, Resources
from specrej.contracts import Message, Prompt
from specrej.contracts.errors import InvalidRequest, SpecrejError

HEAD = "head.safetensors"
REPORT = "training.json"

# Weight decays to try.
_DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)

# Pairs between two lines of progress.
_PAIRS_PER_NOTE = 50


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and two answers to it; `where`: the file and the line."""

    prompt: Prompt
    chosen: str
    rejected: str
    where: str = field(default="", repr=False, compare=False)


class _Line(BaseModel):
    chosen: str
    rejected: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of pairs ranked right, with its 95 % interval (Wilson 1927); chance is a half."""

    share: float
    low: float
    high: float

    @classmethod
    def of(cls, margins: Sequence[float]) -> Accuracy:
        """`margins`: scores of the chosen answers less those of the rejected ones, at least one."""
        share, count, z = share_right(margins), len(margins), 1.96
        middle = (share + z * z / (2 * count)) / (1 + z * z / count)
        spread = z / (1 + z * z / count)
        spread *= math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        return cls(round(share, 4), round(middle - spread, 4), round(middle + spread, 4))


@dataclass(frozen=True, slots=True)
class Report:
    """Accuracy on pairs that were not trained on.

    untrained_likelihood: of the backbone's own mean log-likelihood, on the same pairs.
    """

    method: str
    pairs: int
    test_pairs: int
    test: Accuracy
    untrained_likelihood: Accuracy


def main() -> None:
    """The command line."""
    arguments = _arguments()
    try:
        report = train(arguments)
    except (OSError, ValueError, SpecrejError) as error:
        raise SystemExit(f"specrej train-reward: {error}") from None
    print(json.dumps(asdict(report)))


def train(arguments: argparse.Namespace) -> Report:
    """Fit and report; writes the head and the report into the output directory.

    Raises:
        OSError, ValueError, SpecrejError: the pairs or the backbone cannot be used.
    """
    pairs, backbone = read_pairs(arguments.pairs), arguments.backbone
    held_out = arguments.validation + arguments.test
    if len(pairs) <= held_out:
        raise ValueError(f"{arguments.pairs}: {len(pairs)} pairs, {held_out} of them held out")
    _check_prompts(pairs, backbone)
    head: Path = arguments.out / HEAD
    head.parent.mkdir(parents=True, exist_ok=True)
    states = features(backbone, pairs[: len(pairs) - arguments.test])
    differences = states[:, 0] - states[:, 1]
    generator = torch.Generator().manual_seed(arguments.seed)
    order = torch.randperm(len(differences), generator=generator)
    sizes = [arguments.validation, len(differences) - arguments.validation]
    validation, fitting = torch.split(differences[order], sizes)
    weights, decay = fit_head(fitting, validation)
    save_file({HEAD_TENSOR: weights}, head)
    test = pairs[-arguments.test :]
    spec = ClassifierSpec(name="trained", directory=backbone, head_file=head)
    right = Accuracy.of(_margins(load_classifier(spec, Resources()), test, "scores"))
    untrained = load_likelihood(LikelihoodSpec(name="untrained", directory=backbone), Resources())
    baseline = Accuracy.of(_margins(untrained, test, "likelihoods"))
    method = f"head, weight decay {decay}"
    report = Report(method, len(pairs) - arguments.test, len(test), right, baseline)
    (arguments.out / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def note(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _noted(pairs: Sequence[Pair], what: str) -> Iterator[Pair]:
    """The pairs, with lines of progress."""
    for number, pair in enumerate(pairs, 1):
        yield pair
        if number % _PAIRS_PER_NOTE == 0 or number == len(pairs):
            note(f"{what} of {number} of {len(pairs)} pairs")


def read_pairs(path: Path) -> list[Pair]:
    """JSON lines of {prompt or messages, chosen, rejected}, gzipped or not.

    Raises:
        ValueError: a line is something else; names it.
    """
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    lines = enumerate(text.split("\n"), 1)
    return [_pair(line, f"{path}:{number}") for number, line in lines if line.strip()]


def _pair(line: str, where: str) -> Pair:
    try:
        read = _Line.model_validate_json(line)
        if not read.messages and read.prompt is None:
            raise ValueError("neither prompt nor messages")
    except ValueError as error:
        needs = "must be {prompt or messages, chosen, rejected}"
        raise ValueError(f"{where}: {needs}: {error}") from None
    prompt = Prompt(read.messages) if read.messages else Prompt.from_user(read.prompt or "")
    return Pair(prompt, read.chosen, read.rejected, where)


def _check_prompts(pairs: Sequence[Pair], backbone: Path) -> None:
    """Raises ValueError if the backbone does not take a prompt, before hours of training."""
    config = AutoConfig.from_pretrained(backbone, local_files_only=True)
    conversation = load_conversation(ClassifierSpec(name="training", directory=backbone), config)
    for pair in pairs:
        try:
            Turns(conversation, pair.prompt)
        except InvalidRequest as error:
            raise ValueError(f"{pair.where}: {error.message}") from None


def share_right(margins: Sequence[float]) -> float:
    """The share of pairs in which the chosen answer scores higher; ties count half."""
    right = [1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins]
    return sum(right) / len(margins)


def _margins(reward: Reward, pairs: Sequence[Pair], what: str) -> list[float]:
    """Scores of the chosen answers less those of the rejected ones."""
    margins: list[float] = []
    for pair in _noted(pairs, what):
        chosen, rejected = score(reward, pair.prompt, [pair.chosen, pair.rejected]).values
        margins.append(chosen - rejected)
    return margins


def fit_head(differences: Tensor, validation: Tensor) -> tuple[Tensor, float]:
    """The head's weights [hidden], and the weight decay that was chosen.

    The head is the linear map under which it is likeliest that chosen answers beat rejected ones
    (Bradley and Terry 1952). differences: chosen - rejected features [pairs, hidden]. The decay
    is the one with the least held-out loss; with it, all pairs are fitted again.
    """
    scale = torch.cat((differences, validation)).std(dim=0).clamp(min=1e-6)
    losses: dict[float, float] = {}
    for decay in _DECAYS:
        margins = validation / scale @ _fit(differences / scale, decay)
        losses[decay] = -F.logsigmoid(margins).mean().item()
        right = share_right(margins.tolist())
        note(f"decay {decay}: held-out loss {losses[decay]:.4f}, accuracy {right:.3f}")
    decay = min(losses, key=losses.__getitem__)
    return _fit(torch.cat((differences, validation)) / scale, decay) / scale, decay


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


def features(backbone: Path, pairs: Sequence[Pair]) -> Tensor:
    """Hidden states at the last token of each answer, [pairs, 2, hidden]; chosen answers first."""
    spec = ClassifierSpec(name="training", directory=backbone)
    read: list[Tensor] = []  # the states of one pair

    def keep(outputs: Tensor) -> float:
        read.append(outputs[-1])
        return 0.0

    model = load_model(spec, Resources())
    reward = CausalReward(spec, Resources(), "", model, lambda rows, _: rows.float(), keep)
    states: list[Tensor] = []
    for pair in _noted(pairs, "features"):
        read.clear()
        score(reward, pair.prompt, [pair.chosen, pair.rejected])
        states.append(torch.stack([read[0], read[-1]]))  # one if they are equal
    return torch.stack(states)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="specrej train-reward", description="Fit a Bradley-Terry reward on a causal backbone."
    )
    parser.add_argument("--backbone", type=Path, required=True, help="a local causal model")
    text = "JSON lines of {prompt or messages, chosen, rejected}, gzipped or not"
    parser.add_argument("--pairs", type=Path, required=True, help=text)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--validation", type=_count, default=200, help="pairs to choose by")
    parser.add_argument("--test", type=_count, default=300, help="last pairs, only reported on")
    parser.add_argument("--seed", type=int, default=0, help="selects the pairs to choose by")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
