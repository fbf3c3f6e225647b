"""The cost of scoring with a causal reward model: `make bench-scoring`.

A classifier with the embedded backbone and a random head scores growing candidates of one prompt,
round after round: incrementally, and from scratch with transformers, which reads prompt and prefix
of every candidate again. Then 64 finished texts are scored once, by ours, by transformers' pipeline
and by vLLM's pooling runner (`--texts` does only this). All take turns; seconds are medians. Takes
15 minutes.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from benchmarks.harness import (
    MODEL,
    SETTLE_S,
    interleave,
    log,
    medians,
    parse_arguments,
    report,
)
from benchmarks.workers.engines import vllm_pooling
from benchmarks.workers.process import WorkerError
from reward_service.causal_reward import CausalReward
from reward_service.classifier import load_classifier
from reward_service.encoder import plan
from reward_service.reward import score, score_batch
from reward_service.specs import ClassifierSpec, Resources
from specrej.contracts import Candidate, Prompt

_PROMPT = Prompt.from_user("Explain to a curious child why the sky is blue, step by step.")
_TOKEN_BUDGET = 2048
_N = 64

# Decision tokens, and the fraction of the candidates that each cut rejects.
_SCHEDULES = {
    "16, 32, 64, 128": ((16, 32, 64, 128), 0.5),
    "24 rounds of 8": (tuple(range(8, 8 * 24 + 1, 8)), 0.1),
}
_VOCABULARY = "sky blue light red sun air scatters waves short because small eye we see it the"

# Per round, the text of each candidate that is left.
Rounds = list[dict[int, str]]

# Scores, and the tokens computed for them.
Outcome = tuple[list[float], int]


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        rounds=(3, "measured rounds"),
        texts=(False, "only the 64 finished texts"),
    )
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        make_classifier(directory)
        spec = ClassifierSpec(name="bt", directory=directory)
        ours = load_classifier(spec, Resources(token_budget=_TOKEN_BUDGET))
        for name, (decision_tokens, alpha) in {} if arguments.texts else _SCHEDULES.items():
            rounds = make_rounds(ours.conversation.tokenizer, decision_tokens, alpha)
            plain = Plain(directory, ours)
            runs: dict[str, Callable[[], Outcome]] = {
                "ours": partial(_incrementally, ours, rounds),
                "theirs": partial(_from_scratch, plain, rounds),
            }
            results[f"{name}: from scratch"] = _compare(runs, arguments.rounds)["theirs"]
            log(f"{name}: {results[f'{name}: from scratch']}")
        for name, result in _compare_texts(ours, directory, arguments.rounds).items():
            results[f"64 texts: {name}"] = result
    report(
        f"scoring, N={_N}: ours as a share of theirs",
        ("what", "tokens", "seconds", "largest difference of scores"),
        [_row(name, result) for name, result in results.items()],
        {"results": results},
    )


def make_classifier(directory: Path) -> None:
    """The embedded backbone with a random head."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1)
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.save_pretrained(directory)


class Plain:
    """The same model in plain transformers: whole sequences in padded micro-batches."""

    def __init__(self, directory: Path, reward: CausalReward) -> None:
        self._conversation = reward.conversation
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()

    @torch.inference_mode()
    def score(self, texts: Sequence[str]) -> Outcome:
        sequences = self._conversation.encode(self._conversation.render(_PROMPT, texts))
        scores = [0.0] * len(sequences)
        for indices in plan([len(sequence) for sequence in sequences], _TOKEN_BUDGET):
            logits = self._logits([sequences[index] for index in indices])
            for index, logit in zip(indices, logits, strict=True):
                scores[index] = logit
        return scores, sum(map(len, sequences))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        tokens = [torch.tensor(row) for row in rows]
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        hidden = self._model.base_model(
            input_ids=pad_sequence(tokens, batch_first=True), attention_mask=mask, use_cache=False
        ).last_hidden_state
        states = hidden[torch.arange(len(rows)), mask.sum(dim=1) - 1]
        logits: list[float] = self._model.score(states).squeeze(-1).tolist()
        return logits


def make_rounds(tokenizer: Any, decision_tokens: Sequence[int], alpha: float) -> Rounds:
    """Random words, cut to each round's decision token."""
    rng = random.Random(0)
    words = _VOCABULARY.split()
    whole = [tokenizer.encode(" ".join(rng.choice(words) for _ in range(400))) for _ in range(_N)]
    left = list(range(_N))
    rounds = []
    for count in decision_tokens:
        rounds.append({key: tokenizer.decode(whole[key][:count]) for key in left})
        left = sorted(rng.sample(left, max(1, round((1 - alpha) * len(left)))))
    return rounds


def _incrementally(reward: CausalReward, rounds: Rounds) -> Outcome:
    session = reward.open(_PROMPT)
    scores: list[float] = []
    num_tokens = 0
    for texts in rounds:
        batch = [Candidate(key, text, 0, 0.0) for key, text in texts.items()]
        scored = score_batch(session, reward, batch)
        scores += scored.values
        num_tokens += scored.computed_tokens
    session.close()
    return scores, num_tokens


def _from_scratch(plain: Plain, rounds: Rounds) -> Outcome:
    outcomes = [plain.score(list(texts.values())) for texts in rounds]
    return [value for scores, _ in outcomes for value in scores], sum(n for _, n in outcomes)


def _compare_texts(ours: CausalReward, directory: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Ours, transformers' pipeline in batches of 16 (its fastest), and vLLM if it is there."""
    texts = list(make_rounds(ours.conversation.tokenizer, (128,), 0.5)[0].values())
    rendered = ours.conversation.render(_PROMPT, texts)
    token_ids = ours.conversation.encode(rendered)
    num_tokens = sum(map(len, token_ids))
    scorer: Any = pipeline("text-classification", model=str(directory), device="cpu")
    scorer.tokenizer.pad_token = scorer.tokenizer.eos_token
    scorer.model.config.pad_token_id = scorer.tokenizer.pad_token_id

    def by_ours() -> Outcome:
        scored = score(ours, _PROMPT, texts)
        return list(scored.values), scored.computed_tokens

    def by_pipeline() -> Outcome:
        outputs = scorer(
            rendered, function_to_apply="none", batch_size=16, add_special_tokens=False
        )
        return [output["score"] for output in outputs], num_tokens

    runs: dict[str, Callable[[], Outcome | float]] = {
        "ours": by_ours,
        "transformers pipeline": by_pipeline,
    }
    spec = vllm_pooling(directory, context_tokens=512)
    worker = None
    try:
        worker = spec.start(torch.get_num_threads())
        log(f"vLLM: {worker.ready()}")
        # The worker compares the scores and fails if they differ by a thousandth.
        request = {"token_ids": token_ids, "scores": by_ours()[0]}
        worker.measure(request)
        runs["vLLM pooling"] = partial(worker.measure, request)
    except WorkerError as error:
        log(f"vLLM is missing: {error}")
    try:
        return _compare(runs, rounds)
    finally:
        if worker:
            worker.stop()


def _compare(
    runs: Mapping[str, Callable[[], Outcome | float]], rounds: int
) -> dict[str, dict[str, float]]:
    """Every other run against "ours", by name. A run that returns a float measured its seconds."""
    outcomes: dict[str, Outcome] = {}

    def measured(name: str) -> float:
        started = time.perf_counter()
        outcome = runs[name]()
        seconds = time.perf_counter() - started
        if isinstance(outcome, float):
            return outcome
        outcomes[name] = outcome
        return seconds

    median = medians(interleave({name: partial(measured, name) for name in runs}, rounds, SETTLE_S))
    return {
        name: {
            "seconds_ratio": round(median["ours"] / median[name], 3),
            "seconds": round(median["ours"], 3),
            "their_seconds": round(median[name], 3),
            **(_differences(outcomes["ours"], outcomes[name]) if name in outcomes else {}),
        }
        for name in runs
        if name != "ours"
    }


def _differences(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    (scores, num_tokens), (their_scores, their_tokens) = ours, theirs
    return {
        "tokens_ratio": round(num_tokens / their_tokens, 3),
        "tokens": num_tokens,
        "their_tokens": their_tokens,
        "difference": max(abs(a - b) for a, b in zip(scores, their_scores, strict=True)),
    }


def _row(name: str, result: Mapping[str, float]) -> Sequence[object]:
    tokens = f"{result['tokens_ratio']:.3f}" if "tokens_ratio" in result else "-"
    difference = f"{result['difference']:.1e}" if "difference" in result else "< 1e-3"
    return (name, tokens, f"{result['seconds_ratio']:.3f}", difference)


if __name__ == "__main__":
    main()
