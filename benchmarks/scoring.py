"""The cost of scoring with a causal reward model: `make bench-scoring`.

A classifier with the embedded backbone and a random head scores growing candidates of one prompt,
round after round: incrementally, and from scratch with transformers, which reads prompt and prefix
of every candidate again. Then 64 finished texts are scored at once, against transformers' pipeline
and against vLLM's pooling runner (`--texts` does only this). Both sides take turns; seconds are
medians. Takes 15 minutes.
"""

from __future__ import annotations

import random
import sys
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
    run_cases,
)
from benchmarks.workers.engines import vllm_pooling
from reward_service.kinds.causal import CausalReward
from reward_service.kinds.classifier import load_classifier
from reward_service.kinds.encoder import plan
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
    """Measure and report; a comparison that fails is reported, and the others are measured."""
    arguments = parse_arguments(
        __doc__,
        rounds=(3, "measured rounds"),
        texts=(False, "only the 64 finished texts"),
    )
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        make_classifier(directory)
        spec = ClassifierSpec(name="bt", directory=directory)
        ours = load_classifier(spec, Resources(token_budget=_TOKEN_BUDGET))
        cases: dict[str, Callable[[], dict[str, float]]] = {
            f"{name}: from scratch": partial(_growing, ours, directory, schedule, rounds)
            for name, schedule in ({} if arguments.texts else _SCHEDULES).items()
        }
        texts = list(make_rounds(ours.conversation.tokenizer, (128,), 0.5)[0].values())
        for name, case in (("transformers pipeline", _pipeline), ("vLLM pooling", _pooling)):
            cases[f"64 texts: {name}"] = partial(case, ours, directory, texts, rounds)
        results, failed = run_cases(cases)
    report(
        f"scoring, N={_N}: ours as a share of theirs",
        ("what", "tokens", "seconds", "largest difference of scores"),
        [_row(name, result) for name, result in results.items()],
        {"results": results, "failed": failed},
        notes=[f"{name} failed: {reason}" for name, reason in failed.items()],
    )
    sys.exit(any("vLLM" not in name for name in failed))  # vLLM may be missing


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
    reward.free(session)
    return scores, num_tokens


def _from_scratch(plain: Plain, rounds: Rounds) -> Outcome:
    outcomes = [plain.score(list(texts.values())) for texts in rounds]
    return [value for scores, _ in outcomes for value in scores], sum(n for _, n in outcomes)


def _at_once(reward: CausalReward, texts: Sequence[str]) -> Outcome:
    scored = score(reward, _PROMPT, texts)
    return list(scored.values), scored.computed_tokens


def _growing(
    ours: CausalReward, directory: Path, schedule: tuple[Sequence[int], float], rounds: int
) -> dict[str, float]:
    """Candidates of a schedule, against the model in plain transformers."""
    growing = make_rounds(ours.conversation.tokenizer, *schedule)
    theirs = partial(_from_scratch, Plain(directory, ours), growing)
    return _compare(partial(_incrementally, ours, growing), theirs, rounds)


def _pipeline(
    ours: CausalReward, directory: Path, texts: Sequence[str], rounds: int
) -> dict[str, float]:
    """Finished texts, against transformers' pipeline in batches of 16, its fastest."""
    rendered = ours.conversation.render(_PROMPT, texts)
    num_tokens = sum(map(len, ours.conversation.encode(rendered)))
    scorer: Any = pipeline("text-classification", model=str(directory), device="cpu")
    scorer.tokenizer.pad_token = scorer.tokenizer.eos_token
    scorer.model.config.pad_token_id = scorer.tokenizer.pad_token_id

    def theirs() -> Outcome:
        outputs = scorer(
            rendered, function_to_apply="none", batch_size=16, add_special_tokens=False
        )
        return [output["score"] for output in outputs], num_tokens

    return _compare(partial(_at_once, ours, texts), theirs, rounds)


def _pooling(
    ours: CausalReward, directory: Path, texts: Sequence[str], rounds: int
) -> dict[str, float]:
    """Finished texts, against vLLM's pooling runner.

    Raises:
        WorkerError: vLLM is missing, or its scores differ.
    """
    worker = vllm_pooling(directory, context_tokens=512).start(torch.get_num_threads())
    try:
        log(f"vLLM: {worker.ready()}")
        # The worker compares the scores and fails if they differ by a thousandth.
        token_ids = ours.conversation.encode(ours.conversation.render(_PROMPT, texts))
        request = {"token_ids": token_ids, "scores": _at_once(ours, texts)[0]}
        worker.measure(request)
        return _compare(partial(_at_once, ours, texts), partial(worker.measure, request), rounds)
    finally:
        worker.stop()


def _compare(
    ours: Callable[[], Outcome], theirs: Callable[[], Outcome | float], rounds: int
) -> dict[str, float]:
    """Ours against theirs, which may measure its seconds itself and return them."""
    outcomes: dict[str, Outcome] = {}

    def measured(name: str, run: Callable[[], Outcome | float]) -> float:
        started = time.perf_counter()
        outcome = run()
        seconds = time.perf_counter() - started
        if isinstance(outcome, float):
            return outcome
        outcomes[name] = outcome
        return seconds

    runs = {"ours": partial(measured, "ours", ours), "theirs": partial(measured, "theirs", theirs)}
    median = medians(interleave(runs, rounds, SETTLE_S))
    return {
        "seconds_ratio": round(median["ours"] / median["theirs"], 3),
        "seconds": round(median["ours"], 3),
        "their_seconds": round(median["theirs"], 3),
        **(_differences(**outcomes) if "theirs" in outcomes else {}),
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
