"""The picture of slots in README and docs/concepts.md: `python -m experiments.memory`.

docs/memory.svg shows one request in a quarter of the slots that all its candidates would need:
rounds end when the slots are full, the cut frees half of them, and the survivors grow on (the first
figure of the paper, arXiv 2410.20290).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from deploy.local.stack import Stack
from specrej import Client
from specrej.client.options import parse_schedule
from specrej.contracts import CacheControl, Finished, RoundCompleted, RoundTrace

_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_N, _MAX_TOKENS = 64, 256
_CAPACITY_SLOTS = _N * _MAX_TOKENS // 4


def main(path: Path = Path("docs/memory.svg")) -> None:
    """Run the request and draw it."""
    prompt_slots, rounds = asyncio.run(_run())
    style: Any = {"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        draw(prompt_slots, rounds, _CAPACITY_SLOTS).savefig(path, metadata={"Date": None})


async def _run() -> tuple[int, list[RoundTrace]]:
    """The slots of the prompt, and all rounds of the request."""
    prompt_slots, rounds = 0, []
    environment = {"SPECREJ_GENERATOR_KV_SLOTS": str(_CAPACITY_SLOTS)}
    async with (
        Stack(environment=environment) as stack,
        Client(stack.orchestrator_address, timeout_s=600) as client,
    ):
        async for event in client.stream(
            _PROMPT,
            n=_N,
            max_tokens=_MAX_TOKENS,
            schedule=parse_schedule("memory"),
            ignore_eos=True,
            seed=1,
            cache=CacheControl.BYPASS,
        ):
            if isinstance(event, RoundCompleted):
                rounds.append(event.trace)
            elif isinstance(event, Finished):
                prompt_slots = event.generation.usage.prompt_tokens
    return prompt_slots, rounds


def draw(prompt_slots: int, rounds: Sequence[RoundTrace], capacity_slots: int) -> Figure:
    """Slots, live candidates and rewards against tokens.

    No candidate ends before the last token, so slots grow linearly within a round.
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    figure.suptitle(f"{rounds[0].num_started} candidates, capacity {capacity_slots}, alpha 0.5")
    slots, candidates, rewards = figure.subplots(3, 1, sharex=True)
    tokens, owned = [0], [prompt_slots]
    for trace in rounds:
        stored = trace.decision_token - 1  # the newest token has no keys and values yet
        tokens += [trace.decision_token] * 2
        owned += [prompt_slots + count * stored for count in (trace.num_started, trace.num_live)]
    slots.plot(tokens, owned, color="tab:blue")
    slots.axhline(capacity_slots, color="tab:red", linestyle="--", linewidth=1)
    slots.set(ylabel="KV slots in use", ylim=(0, capacity_slots * 1.15))
    edges = [0, *(trace.decision_token for trace in rounds)]
    started = [trace.num_started for trace in rounds]
    candidates.stairs(started, edges, baseline=None, color="tab:green")
    candidates.set(ylabel="candidates alive", ylim=(0, None))
    for trace in rounds:
        scores = [traced.score for traced in trace.candidates]
        at, kept = [trace.decision_token] * len(scores), trace.num_live or 1
        rewards.scatter(at[kept:], scores[kept:], s=8, color="lightgray")
        rewards.scatter(at[:kept], scores[:kept], s=8, color="tab:blue")
    rewards.set(ylabel="reward at decision tokens", xlabel="new tokens per candidate")
    rewards.legend(["rejected", "kept"], loc="lower right")
    return figure


if __name__ == "__main__":
    main()
