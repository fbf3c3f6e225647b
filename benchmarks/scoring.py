"""What scoring costs a causal reward model, by rounds and by texts: `python -m benchmarks.scoring`.

A classifier of the embedded backbone's shape (its own weights, a random head) scores growing
candidates of one prompt, round after round: incrementally, and from scratch with transformers,
which reads prompt and prefix of every candidate again. Then 64 finished texts once, with ours and
with transformers' pipeline. Interleaved; seconds are medians; 15 minutes. The last line on stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from benchmarks.machine import describe_machine
from reward_service.batching import in_micro_batches, pad
from reward_service.classifier import ClassifierReward
from specrej.contracts import Candidate, Prompt

_BACKBONE = Path(".models/SmolLM2-135M-Instruct")
_PROMPT = Prompt.from_user("Explain to a curious child why the sky is blue, step by step.")
_TOKEN_BUDGET = 8192
_N = 64

# Decision tokens and the part of the candidates that each cut rejects.
_SCHEDULES = {
    "16, 32, 64, 128": ((16, 32, 64, 128), 0.5),
    "24 rounds of 8": (tuple(range(8, 8 * 24 + 1, 8)), 0.1),
}

# Per round, the text of each candidate that is left.
Rounds = list[dict[int, str]]


def main() -> None:
    """Measure, print a table and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    repeats = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        make_classifier(Path(directory))
        ours = ClassifierReward(Path(directory), name="bt", token_budget=_TOKEN_BUDGET)
        plain = Plain(Path(directory), ours)
        results: dict[str, dict[str, float]] = {}
        for name, (decision_tokens, alpha) in _SCHEDULES.items():
            results[name] = _compare_rounds(ours, plain, decision_tokens, alpha, repeats)
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
        results["64 texts"] = _compare_texts(ours, Path(directory), repeats)
    table = Table(title=f"scoring, N={_N}: ours / transformers")
    for heading in ("what", "tokens", "seconds", "largest difference of scores"):
        table.add_column(heading)
    for name, found in results.items():
        tokens = f"{found['tokens_ratio']:.3f}"
        table.add_row(name, tokens, f"{found['seconds_ratio']:.3f}", f"{found['difference']:.1e}")
    Console(width=100).print(table)
    print(json.dumps({"results": results, **describe_machine()}))


def make_classifier(directory: Path) -> None:
    """The embedded backbone with a random head."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(_BACKBONE, num_labels=1)
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(_BACKBONE)
    tokenizer.save_pretrained(directory)


class Plain:
    """The same model in plain transformers: whole sequences in padded micro-batches."""

    def __init__(self, directory: Path, reward: ClassifierReward) -> None:
        self._reward = reward
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()

    @torch.inference_mode()
    def score(self, texts: Sequence[str]) -> tuple[list[float], int]:
        sequences = self._reward.encode(self._reward.render(_PROMPT, texts))
        scores = in_micro_batches(sequences, _TOKEN_BUDGET, self._logits)
        return scores, sum(map(len, sequences))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        mask = torch.tensor(pad([[1] * len(row) for row in rows]))
        hidden = self._model.base_model(
            input_ids=torch.tensor(pad(rows)), attention_mask=mask, use_cache=False
        ).last_hidden_state
        states = hidden[torch.arange(len(rows)), mask.sum(dim=1) - 1]
        logits: list[float] = self._model.score(states).squeeze(-1).tolist()
        return logits


def make_rounds(tokenizer: Any, decision_tokens: Sequence[int], alpha: float) -> Rounds:
    """Random words, cut to as many tokens as each round's decision token says."""
    rng = random.Random(0)
    words = [
        "sky",
        "blue",
        "light",
        "red",
        "sun",
        "air",
        "scatters",
        "waves",
        "short",
        "because",
        "small",
        "eye",
        "we",
        "see",
        "it",
        "the",
    ]
    whole = [tokenizer.encode(" ".join(rng.choice(words) for _ in range(400))) for _ in range(_N)]
    left = list(range(_N))
    rounds = []
    for count in decision_tokens:
        rounds.append({key: tokenizer.decode(whole[key][:count]) for key in left})
        left = sorted(rng.sample(left, max(1, round((1 - alpha) * len(left)))))
    return rounds


def _compare_rounds(
    ours: ClassifierReward,
    plain: Plain,
    decision_tokens: Sequence[int],
    alpha: float,
    repeats: int,
) -> dict[str, float]:
    rounds = make_rounds(ours.tokenizer, decision_tokens, alpha)

    def incrementally() -> tuple[list[float], int]:
        session = ours.open(_PROMPT)
        scores: list[float] = []
        num_tokens = 0
        for texts in rounds:
            found = session.score([Candidate(key, text, 0, 0.0) for key, text in texts.items()])
            scores += found.values
            num_tokens += found.computed_tokens
        session.close()
        return scores, num_tokens

    def from_scratch() -> tuple[list[float], int]:
        parts = [plain.score(list(texts.values())) for texts in rounds]
        return [score for scores, _ in parts for score in scores], sum(count for _, count in parts)

    return _compare(incrementally, from_scratch, repeats)


def _compare_texts(ours: ClassifierReward, directory: Path, repeats: int) -> dict[str, float]:
    """Against transformers' pipeline, in batches of 16, the fastest found."""
    texts = list(make_rounds(ours.tokenizer, (128,), 0.5)[0].values())
    scorer: Any = pipeline("text-classification", model=str(directory), device="cpu")
    scorer.tokenizer.pad_token = scorer.tokenizer.eos_token
    scorer.model.config.pad_token_id = scorer.tokenizer.pad_token_id

    def by_ours() -> tuple[list[float], int]:
        found = ours.score(_PROMPT, texts)
        return list(found.values), found.computed_tokens

    def by_pipeline() -> tuple[list[float], int]:
        rendered = ours.render(_PROMPT, texts)
        outputs = scorer(
            rendered, function_to_apply="none", batch_size=16, add_special_tokens=False
        )
        return [output["score"] for output in outputs], sum(map(len, ours.encode(rendered)))

    return _compare(by_ours, by_pipeline, repeats)


def _compare(
    ours: Callable[[], tuple[list[float], int]],
    theirs: Callable[[], tuple[list[float], int]],
    repeats: int,
) -> dict[str, float]:
    seconds: list[tuple[float, float]] = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        our_scores, our_tokens = ours()
        between = time.perf_counter()
        their_scores, their_tokens = theirs()
        if number:  # the first round warms up
            seconds.append((between - began, time.perf_counter() - between))
    mine, plain = (statistics.median(column) for column in zip(*seconds, strict=True))
    differences = [abs(a - b) for a, b in zip(our_scores, their_scores, strict=True)]
    return {
        "tokens_ratio": round(our_tokens / their_tokens, 3),
        "seconds_ratio": round(mine / plain, 3),
        "tokens": our_tokens,
        "their_tokens": their_tokens,
        "seconds": round(mine, 3),
        "their_seconds": round(plain, 3),
        "difference": max(differences),
    }


if __name__ == "__main__":
    main()
