"""The picture of slots in README and docs/concepts.md, a part of `make pictures`.

docs/memory.svg shows one request in a quarter of the slots that all its candidates would need:
rounds end when the slots are full, the cut frees half of them, and the survivors grow on (the first
figure of the paper, arXiv 2410.20290).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness import full_length, parse_arguments, report, round_of, running
from specrej import Schedule
from specrej.contracts import Finished, RoundCompleted, RoundTrace

_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def main() -> None:
    """Run the request, draw and report."""
    arguments = parse_arguments(
        __doc__,
        picture=(Path("docs/memory.svg"), "SVG file to write"),
        n=(64, "candidates"),
        new=(256, "new tokens per candidate"),
    )
    capacity_slots = arguments.n * arguments.new // 4
    prompt_slots, rounds = asyncio.run(_run(arguments, capacity_slots))
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"})
    figure = _draw(prompt_slots, rounds, capacity_slots)
    figure.suptitle(f"N={arguments.n}, {arguments.new} tokens, a quarter of the slots, alpha 0.5")
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.picture, metadata={"Date": None})
    rows = [round_of(trace) for trace in rounds]
    report(
        "rounds",
        list(rows[0]),
        [list(row.values()) for row in rows],
        {
            "n": arguments.n,
            "max_tokens": arguments.new,
            "capacity_slots": capacity_slots,
            "most_slots": max(trace.session_slots for trace in rounds),
            "rounds": rows,
        },
    )


async def _run(arguments: argparse.Namespace, capacity_slots: int) -> tuple[int, list[RoundTrace]]:
    """The slots of the prompt, and all rounds of the request."""
    options = full_length(arguments.n, arguments.new, seed=1)
    options["schedule"] = Schedule("memory")
    prompt_slots, rounds = 0, []
    environment = {"SPECREJ_GENERATOR_KV_SLOTS": str(capacity_slots)}
    async with running(environment) as (_, client):
        async for event in client.stream(_PROMPT, **options):
            if isinstance(event, RoundCompleted):
                rounds.append(event.trace)
            elif isinstance(event, Finished):
                prompt_slots = event.generation.usage.prompt_tokens
    return prompt_slots, rounds


def _draw(prompt_slots: int, rounds: Sequence[RoundTrace], capacity_slots: int) -> Figure:
    """Slots, live candidates and rewards against tokens.

    No candidate ends before the last token, so slots grow linearly within a round.
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    slots, candidates, rewards = figure.subplots(3, 1, sharex=True)
    tokens, owned = [0], [prompt_slots]
    for trace in rounds:
        stored = trace.decision_token - 1  # the newest token has no keys and values yet
        tokens += [trace.decision_token] * 2
        owned += [prompt_slots + count * stored for count in (trace.num_started, trace.num_live)]
    slots.plot(tokens, owned, color="tab:blue")
    slots.axhline(capacity_slots, color="tab:red", linestyle="--", linewidth=1)
    slots.annotate(f"capacity {capacity_slots}", (0, capacity_slots), color="tab:red", va="bottom")
    slots.set(ylabel="KV slots in use", ylim=(0, capacity_slots * 1.15))
    started = [trace.num_started for trace in rounds]
    edges = [0, *(trace.decision_token for trace in rounds)]
    candidates.stairs(started, edges, baseline=None, color="tab:green")
    candidates.set(ylabel="candidates alive", ylim=(0, None))
    for trace in rounds:
        at = [trace.decision_token] * len(trace.scores)
        kept = trace.num_live or 1
        rewards.scatter(at[kept:], trace.scores[kept:], s=8, color="lightgray")
        rewards.scatter(at[:kept], trace.scores[:kept], s=8, color="tab:blue")
    rewards.set(ylabel="reward at decision tokens", xlabel="new tokens per candidate")
    rewards.legend(["rejected", "kept"], loc="lower right")
    return figure


if __name__ == "__main__":
    main()
