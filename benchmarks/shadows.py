"""What shadows estimate against what is true: `python -m benchmarks.shadows`.

Every prompt is answered twice by the same services with the same seed: with cuts, whose shadows are
then run to their end, and without any, so that the end of every candidate is known. The last line
on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from loadtest.prompts import read_prompts
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel
from orchestrator.shadow import (
    ALPHAS,
    Kind,
    Notes,
    Pairs,
    Statistics,
    added,
    ended_in_run,
    kind_of,
    observe,
    pairs,
    tau_b,
)
from orchestrator.shadowing import Shadows
from specrej.channel import open_channel
from specrej.contracts import (
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    Prompt,
    Sampling,
    Schedule,
    Selection,
    WeightedReward,
)
from specrej.stack import Stack


class Measurement:
    """The same requests as shadows see them, and as they are."""

    def __init__(self, generator: Generator, panel: Panel, target_regret: float) -> None:
        self._generator = generator
        self._panel = panel
        self._shadows = Shadows(1.0, target_regret=target_regret, rng=random.Random(0))
        self.estimated = self._shadows.statistics
        self.true = Statistics(target_regret)
        self.told_apart: dict[int, list[Pairs]] = {}  # true, by decision token
        self.num_lost = 0  # requests whose cuts rejected the best candidate
        self.tokens = {"run": 0, "best_of_n": 0}
        self.shadow_s = 0.0

    async def add(self, request: GenerationRequest) -> None:
        """One prompt with one seed."""
        watched = self._shadows.watch(request, self._generator, self._panel, "")
        assert watched
        generation = await self._run(request, watched.notes)
        began = time.perf_counter()
        await self._shadows.learn_from(watched, generation.n)
        self.shadow_s += time.perf_counter() - began
        everybody = Notes(random.Random(0))
        whole = await self._run(_without_cuts(request), everybody)
        rewards = request.selection.rewards
        self.true.admit(watched.kind)
        self.true.add(watched.kind, observe(ended_in_run(everybody), everybody.decisions, rewards))
        for token, told_apart in _pairs_told_apart(watched.notes, everybody):
            self.told_apart.setdefault(token, []).append(told_apart)
        self.num_lost += whole.best.id != generation.best.id
        self.tokens["run"] += generation.usage.generated_tokens
        self.tokens["best_of_n"] += whole.usage.generated_tokens

    async def _run(self, request: GenerationRequest, notes: Notes) -> Generation:
        async with aclosing(run(request, self._generator, self._panel, notes=notes)) as events:
            *_, last = [event async for event in events]
        assert isinstance(last, Finished)
        return last.generation


def _pairs_told_apart(notes: Notes, everybody: Notes) -> Iterator[tuple[int, Pairs]]:
    """By decision token, all pairs but those that were rejected in one round."""
    rejected_in = _rejected_in(notes)
    for decision in everybody.decisions:
        rows = {
            number: (1.0, partial, everybody.ends[number].values[0])
            for number, (partial,) in decision.values.items()
        }
        together = [pairs(rows[number] for number in group & rows.keys()) for group in rejected_in]
        differences = zip(pairs(rows.values()), added(together), strict=True)
        yield decision.token, Pairs(*(every - some for every, some in differences))


def _rejected_in(notes: Notes) -> list[set[int]]:
    """By round: who grew on to its cut, and neither beyond it nor to an end."""
    grew = [decision.values.keys() for decision in notes.decisions]
    return [
        set(here - beyond - notes.ends.keys())
        for here, beyond in zip(grew, [*grew[1:], set()], strict=True)
    ]


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    print(json.dumps(asyncio.run(_measure(arguments)) | describe_machine()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=32, help="candidates")
    parser.add_argument("--new", type=int, default=64, help="most new tokens per candidate")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--first", type=int, default=16, help="first decision token, then doubling")
    parser.add_argument("--reward", default="relevance", help="or likelihood")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="per prompt")
    parser.add_argument("--target-regret", type=float, default=0.05, help="of the alpha to find")
    return parser.parse_args()


async def _measure(arguments: argparse.Namespace) -> dict[str, object]:
    requests = _requests(arguments)
    async with (
        Stack() as stack,
        open_channel(stack.generator_address, retries=False) as to_generator,
        open_channel(stack.reward_address, retries=False) as to_rewards,
    ):
        name = arguments.reward
        by_name = RemoteRewards(to_rewards).scorer
        scorer = LikelihoodScorer() if name == "likelihood" else by_name(name)
        measured = Measurement(
            RemoteGenerator(to_generator), Panel([scorer]), arguments.target_regret
        )
        for request in requests:
            await measured.add(request)
    selection = requests[0].selection
    return _report(measured, kind_of(selection.schedule, selection.rewards), len(requests))


def _requests(arguments: argparse.Namespace) -> list[GenerationRequest]:
    selection = Selection(
        arguments.n,
        arguments.alpha,
        Schedule(first=arguments.first),
        rewards=(WeightedReward(arguments.reward),),
    )
    return [
        GenerationRequest(Prompt.from_user(text), Sampling(arguments.new, seed=seed), selection)
        for seed in range(1, arguments.seeds + 1)
        for text in read_prompts()[: arguments.prompts]
    ]


def _without_cuts(request: GenerationRequest) -> GenerationRequest:
    """With the same decision tokens, at which nobody is rejected."""
    return replace(request, selection=replace(request.selection, alpha=0.0))


def _report(measured: Measurement, kind: Kind, num_requests: int) -> dict[str, object]:
    estimated, true = (_figures(each, kind) for each in (measured.estimated, measured.true))
    table = Table("", "shadows say", "is true", title=f"{num_requests} requests, {kind.reward}")
    all_pairs = {key: true[key] for key in true if key.startswith("correlation")}
    for token, told_apart in measured.told_apart.items():
        true[f"correlation at {token}"] = round(tau_b(added(told_apart)) or 0.0, 4)
    for row in estimated:
        table.add_row(row, f"{estimated[row]:.2f}", f"{true[row]:.2f}")
    for row, tau in all_pairs.items():
        table.add_row(f"{row}, of all pairs", "", f"{tau:.2f}")
    lost, regret = measured.num_lost / num_requests, measured.estimated.regret(kind)
    table.add_row("best rejected", f"{regret.value:.2f} ± {regret.error:.2f}", f"{lost:.2f}")
    Console(width=100).print(table)
    told = {"regret": round(regret.value, 4), "regret_error": round(regret.error, 4)}
    return {
        "requests": num_requests,
        "kind": kind._asdict(),
        "estimated": estimated | told,
        "true": true | {"regret": round(lost, 4)},
        "true_of_all_pairs": all_pairs,
        "recommended_alpha": measured.estimated.recommended_alpha(kind),
        "true_recommended_alpha": measured.true.recommended_alpha(kind),
        "tokens": measured.tokens,
        "shadow_seconds": round(measured.shadow_s, 1),
    }


def _figures(known: Statistics, kind: Kind) -> dict[str, float]:
    correlations = known.correlations(kind)
    regrets = zip(ALPHAS, known.regrets_by_alpha(kind), strict=True)
    return {
        **{f"correlation at {token}": round(tau, 4) for token, tau in correlations},
        **{f"regret at alpha {alpha}": round(regret.value, 4) for alpha, regret in regrets},
    }


if __name__ == "__main__":
    main()
