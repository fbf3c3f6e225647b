"""What scoring costs a causal reward model, by rounds and by texts: `python -m benchmarks.scoring`.

A classifier of the embedded backbone's shape (its own weights, a random head) scores growing
candidates of one prompt, round after round: incrementally, and from scratch with transformers,
which reads prompt and prefix of every candidate again. Then 64 finished texts once, with ours, with
transformers' pipeline and with vLLM's pooling runner (`--texts` does only this). Interleaved;
seconds are medians; 15 minutes. The last line on stdout is one JSON object.
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
from benchmarks.workers.engines import vllm_pooling
from reward_service.batching import pad, plan
from reward_service.causal_reward import CausalReward, Options
from reward_service.classifier import load_classifier
from reward_service.reward import score, score_batch
from specrej.contracts import Candidate, Prompt

_BACKBONE = Path(".models/SmolLM2-135M-Instruct")
_PROMPT = Prompt.from_user("Explain to a curious child why the sky is blue, step by step.")
_TOKEN_BUDGET = 2048
_N = 64

# Decision tokens and the part of the candidates that each cut rejects.
_SCHEDULES = {
    "16, 32, 64, 128": ((16, 32, 64, 128), 0.5),
    "24 rounds of 8": (tuple(range(8, 8 * 24 + 1, 8)), 0.1),
}

# OpenMP's threads wait busily, for a fifth of a second at most, before they sleep.
_SETTLE_S = 0.3

# Per round, the text of each candidate that is left.
Rounds = list[dict[int, str]]

# Scores, and the tokens computed for them.
Outcome = tuple[list[float], int]


def main() -> None:
    """Measure, print a table and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", action="store_true", help="only the 64 finished texts")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        make_classifier(directory)
        ours = load_classifier(Options("bt", directory, token_budget=_TOKEN_BUDGET))
        for name, (decision_tokens, alpha) in {} if arguments.texts else _SCHEDULES.items():
            plain = Plain(directory, ours)
            found = _compare_rounds(ours, plain, decision_tokens, alpha, arguments.rounds)
            results[f"{name}: from scratch"] = found
            print(f"{name}: {found}", file=sys.stderr, flush=True)
        results |= _compare_texts(ours, directory, arguments.rounds)
    table = Table(title=f"scoring, N={_N}: ours as a share of theirs")
    for heading in ("what", "tokens", "seconds", "largest difference of scores"):
        table.add_column(heading)
    for name, found in results.items():
        tokens = f"{found['tokens_ratio']:.3f}" if "tokens_ratio" in found else "-"
        difference = f"{found['difference']:.1e}" if "difference" in found else "< 1e-3"
        table.add_row(name, tokens, f"{found['seconds_ratio']:.3f}", difference)
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

    def __init__(self, directory: Path, reward: CausalReward) -> None:
        self._conversation = reward.conversation
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()

    @torch.inference_mode()
    def score(self, texts: Sequence[str]) -> tuple[list[float], int]:
        sequences = self._conversation.encode(self._conversation.render(_PROMPT, texts))
        scores = [0.0] * len(sequences)
        for indices in plan([len(sequence) for sequence in sequences], _TOKEN_BUDGET):
            logits = self._logits([sequences[index] for index in indices])
            for index, logit in zip(indices, logits, strict=True):
                scores[index] = logit
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
    ours: CausalReward,
    plain: Plain,
    decision_tokens: Sequence[int],
    alpha: float,
    repeats: int,
) -> dict[str, float]:
    rounds = make_rounds(ours.conversation.tokenizer, decision_tokens, alpha)

    def incrementally() -> Outcome:
        session = ours.open(_PROMPT)
        scores: list[float] = []
        num_tokens = 0
        for texts in rounds:
            batch = [Candidate(key, text, 0, 0.0) for key, text in texts.items()]
            found = score_batch(session, ours, batch)
            scores += found.values
            num_tokens += found.computed_tokens
        session.close()
        return scores, num_tokens

    def from_scratch() -> Outcome:
        parts = [plain.score(list(texts.values())) for texts in rounds]
        return [score for scores, _ in parts for score in scores], sum(count for _, count in parts)

    return _compare(incrementally, {"from scratch": from_scratch}, repeats)["from scratch"]


def _compare_texts(
    ours: CausalReward, directory: Path, repeats: int
) -> dict[str, dict[str, float]]:
    """Against transformers' pipeline, in batches of 16, the fastest found; and vLLM's pooling."""
    texts = list(make_rounds(ours.conversation.tokenizer, (128,), 0.5)[0].values())
    rendered = ours.conversation.render(_PROMPT, texts)
    token_ids = ours.conversation.encode(rendered)
    num_tokens = sum(map(len, token_ids))
    scorer: Any = pipeline("text-classification", model=str(directory), device="cpu")
    scorer.tokenizer.pad_token = scorer.tokenizer.eos_token
    scorer.model.config.pad_token_id = scorer.tokenizer.pad_token_id
    right = list(score(ours, _PROMPT, texts).values)
    spec = vllm_pooling(directory, context_tokens=512)
    spec.install()
    vllm = spec.start(torch.get_num_threads())

    def by_ours() -> Outcome:
        found = score(ours, _PROMPT, texts)
        return list(found.values), found.computed_tokens

    def by_pipeline() -> Outcome:
        outputs = scorer(
            rendered, function_to_apply="none", batch_size=16, add_special_tokens=False
        )
        return [output["score"] for output in outputs], num_tokens

    def by_vllm() -> float:
        # It compares the scores itself, and fails where they differ by a thousandth.
        return vllm.ask({"token_ids": token_ids, "scores": right})

    try:
        print(f"vLLM: {vllm.ready()}", file=sys.stderr, flush=True)
        others: dict[str, Callable[[], Outcome | float]] = {
            "transformers pipeline": by_pipeline,
            "vLLM pooling": by_vllm,
        }
        found = _compare(by_ours, others, repeats)
    finally:
        vllm.stop()
    return {f"64 texts: {name}": result for name, result in found.items()}


def _compare(
    ours: Callable[[], Outcome], others: dict[str, Callable[[], Outcome | float]], repeats: int
) -> dict[str, dict[str, float]]:
    """Ours and the others in turn; the first round warms up. Who times itself returns seconds."""
    seconds: dict[str, list[float]] = {"ours": [], **{name: [] for name in others}}
    outcomes: dict[str, Outcome] = {}
    runs: dict[str, Callable[[], Outcome | float]] = {"ours": ours, **others}
    for number in range(repeats + 1):
        for name, measured in runs.items():
            time.sleep(_SETTLE_S)
            began = time.perf_counter()
            found = measured()
            taken = found if isinstance(found, float) else time.perf_counter() - began
            if not isinstance(found, float):
                outcomes[name] = found
            if number:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {name: _result(medians, outcomes, name) for name in others}


def _result(medians: dict[str, float], outcomes: dict[str, Outcome], name: str) -> dict[str, float]:
    """Of who times itself, seconds are all that is known."""
    result = {
        "seconds_ratio": round(medians["ours"] / medians[name], 3),
        "seconds": round(medians["ours"], 3),
        "their_seconds": round(medians[name], 3),
    }
    if theirs := outcomes.get(name):
        scores, num_tokens = outcomes["ours"]
        result |= {
            "tokens_ratio": round(num_tokens / theirs[1], 3),
            "tokens": num_tokens,
            "their_tokens": theirs[1],
            "difference": _largest(scores, theirs[0]),
        }
    return result


def _largest(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
