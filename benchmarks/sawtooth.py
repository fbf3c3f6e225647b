"""Draws a memory-driven run, slots by slots: `python -m benchmarks.sawtooth docs/memory.svg`.

One request in a quarter of the slots that all its candidates would need. Rounds end when the slots
are full, the cut frees half of them, and the survivors go on in the freed room: the first figure of
the paper (arXiv 2410.20290). Every point is read off the engine in the run; the last line on stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.machine import describe_machine
from benchmarks.services import RELEVANCE
from generator_service.loading import load_generator
from generator_service.model import CausalLM
from generator_service.settings import GeneratorSettings
from inference.attention import DecodeSegment, Segment
from orchestrator.run import run
from reward_service.relevance import RelevanceReward
from reward_service.worker import Worker
from specrej.contracts import (
    Finished,
    GenerationRequest,
    Prompt,
    RoundCompleted,
    RoundTrace,
    Sampling,
    Schedule,
    Selection,
    WeightedReward,
)

_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


@dataclass(slots=True)
class Steps:
    """What each decode step saw: tokens per candidate, candidates, slots owned."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, segment: DecodeSegment) -> None:
        """One decode step of the only session, before its tokens are stored."""
        live, length = segment.suffix.live, segment.suffix.length
        self.tokens.append(length + 1)
        self.candidates.append(live)
        self.slots.append(segment.position - length + live * length)


def main() -> None:
    """Run, draw, print a JSON object."""
    arguments = _arguments()
    steps, rounds = asyncio.run(_measure(arguments))
    _draw(arguments, steps, rounds)
    result = {
        "n": arguments.n,
        "max_tokens": arguments.new,
        "capacity_slots": arguments.n * arguments.new // 4,
        "most_slots": max(steps.slots),
        "rounds": [
            {
                "tokens": trace.decision_token,
                "ended_by": trace.ended_by.value,
                "started": trace.num_started,
                "live": trace.num_live,
                "slots": trace.session_slots,
                "freed": trace.freed_slots,
            }
            for trace in rounds
        ],
        **describe_machine(),
    }
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--n", type=int, default=64, help="candidates")
    parser.add_argument("--new", type=int, default=256, help="most new tokens per candidate")
    return parser.parse_args()


async def _measure(arguments: argparse.Namespace) -> tuple[Steps, list[RoundTrace]]:
    steps, rounds = Steps(), list[RoundTrace]()
    _watch(steps)
    settings = GeneratorSettings(kv_slots=arguments.n * arguments.new // 4)
    generator = await asyncio.to_thread(load_generator, settings)
    scorer = await Worker.start(lambda: RelevanceReward(RELEVANCE))
    request = GenerationRequest(
        prompt=Prompt.from_user(_PROMPT),
        sampling=Sampling(max_tokens=arguments.new, seed=1, ignore_eos=True),
        selection=Selection(
            n=arguments.n,
            schedule=Schedule(kind="memory"),
            rewards=(WeightedReward("relevance"),),
        ),
    )
    del steps.tokens[:], steps.candidates[:], steps.slots[:]  # of the warm-up
    async with aclosing(run(request, generator, scorer)) as events:
        async for event in events:
            if isinstance(event, RoundCompleted):
                rounds.append(event.trace)
            elif isinstance(event, Finished):
                print(event.generation.best.text)
    return steps, rounds


def _watch(steps: Steps) -> None:
    """Note every decode step that any model makes from now on."""
    forward = CausalLM.forward

    def watched(
        self: CausalLM,
        token_ids: list[int],
        positions: list[int],
        segments: list[Segment],
        last: list[int],
    ) -> Tensor:
        for segment in segments:
            if isinstance(segment, DecodeSegment):
                steps.add(segment)
        return forward(self, token_ids, positions, segments, last)

    CausalLM.forward = watched  # type: ignore[method-assign]


def _draw(arguments: argparse.Namespace, steps: Steps, rounds: Sequence[RoundTrace]) -> None:
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"})
    figure = Figure(figsize=(8, 7), layout="constrained")
    slots, batch, rewards = figure.subplots(3, 1, sharex=True)
    capacity = arguments.n * arguments.new // 4
    slots.plot(steps.tokens, steps.slots, color="tab:blue")
    slots.axhline(capacity, color="tab:red", linestyle="--", linewidth=1)
    slots.annotate(f"capacity {capacity}", (0, capacity), color="tab:red", va="bottom")
    slots.set(ylabel="KV slots in use", ylim=(0, capacity * 1.15))
    batch.step(steps.tokens, steps.candidates, where="post", color="tab:green")
    batch.set(ylabel="candidates alive", ylim=(0, None))
    for trace in rounds:
        at = [trace.decision_token] * len(trace.scores)
        kept = trace.num_live or 1
        rewards.scatter(at[kept:], trace.scores[kept:], s=8, color="lightgray")
        rewards.scatter(at[:kept], trace.scores[:kept], s=8, color="tab:blue")
    rewards.set(ylabel="reward at decision tokens", xlabel="new tokens per candidate")
    rewards.legend(["rejected", "kept"], loc="lower right")
    title = f"N={arguments.n}, up to {arguments.new} tokens, room for a quarter, alpha 0.5"
    figure.suptitle(title)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
