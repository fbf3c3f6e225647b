"""Growth while scores are computed elsewhere: `make bench-overlap`.

A reward that takes a fixed time per batch and no processor time simulates one on another machine.
The same requests run in this process in three ways by turns: "free" has no scoring time, "waiting"
waits for the scores, "overlapping" generates on meanwhile. The bar: "overlapping" takes at most the
time of "free" plus a quarter of the scoring time, and discards at most a tenth of its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

from benchmarks.harness import PROMPTS, medians, parse_arguments, report
from experiments.models import Models, generation_of, in_process, unique_salt
from orchestrator.loop.run import run
from specrej.contracts import (
    Candidate,
    Generation,
    GenerationRequest,
    Prompt,
    Sampling,
    Scores,
    ScoringSession,
    Selection,
)


class DelayedReward:
    """A reward that returns the likelihood after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @asynccontextmanager
    async def __call__(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        await asyncio.sleep(self._seconds)
        return Scores(tuple(candidate.mean_logprob for candidate in candidates))


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        n=(64, "candidates"),
        new=(128, "most new tokens per candidate"),
        score_ms=(200.0, "milliseconds that a batch of scores takes"),
        rounds=(3, "requests of each kind per prompt"),
    )
    asyncio.run(_measure(arguments.n, arguments.new, arguments.score_ms / 1e3, arguments.rounds))


async def _measure(n: int, new: int, score_s: float, rounds: int) -> None:
    kinds = {"free": (0.0, False), "waiting": (score_s, False), "overlapping": (score_s, True)}
    made: dict[str, list[Generation]] = {kind: [] for kind in kinds}
    async with in_process(()) as models:
        await _answer(models, PROMPTS[0], n, 8, 0, (0.0, False))
        for number in range(rounds):
            for seed, prompt in enumerate(PROMPTS):
                for kind, how in kinds.items():
                    answer = await _answer(models, prompt, n, new, 100 * number + seed, how)
                    made[kind].append(answer)
    seconds = medians({kind: [g.timings.total_ms / 1e3 for g in of] for kind, of in made.items()})
    scoring_s = medians({"": [score_s * len(g.rounds) for g in made["waiting"]]})[""]
    overlapped = made["overlapping"]
    discarded = sum(g.usage.discarded_tokens for g in overlapped)
    discarded_part = discarded / sum(g.usage.generated_tokens for g in overlapped)
    # Of each request, since prompts have answers of other lengths.
    extra = median(
        (other.timings.total_ms - free.timings.total_ms) / (1e3 * score_s * len(other.rounds))
        for free, other in zip(made["free"], overlapped, strict=True)
    )
    same = [g.best.text for g in made["free"]] == [g.best.text for g in overlapped]
    report(
        f"N={n}, {new} new tokens, {1e3 * score_s:.0f} ms per batch of scores",
        ("scores", "seconds (median)"),
        [(kind, f"{value:.2f}") for kind, value in seconds.items()],
        {
            "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
            "scoring_s": round(scoring_s, 3),
            "extra_of_scoring": round(extra, 4),  # bar: 0.25
            "discarded_of_tokens": round(discarded_part, 4),  # bar: 0.1
            "same_answers": same,
        },
    )


async def _answer(
    models: Models, prompt: str, n: int, new: int, seed: int, how: tuple[float, bool]
) -> Generation:
    sampling = Sampling(max_tokens=new, seed=seed)
    request = GenerationRequest(Prompt.from_user(prompt), sampling, Selection(n=n))
    scores_s, overlaps = how
    reward, salt = DelayedReward(scores_s), unique_salt()
    return await generation_of(run(request, models.generator, reward, salt, overlaps=overlaps))


if __name__ == "__main__":
    main()
