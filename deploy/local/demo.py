"""`make demo`: start everything on free ports, answer one prompt, stop everything.

The prompt is sent twice; the second answer comes from the cache. With `holds`, everything runs on,
so that the page can replay the request.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from deploy.local.stack import Stack
from specrej.client import Client
from specrej.client.view import saved_text, watch
from specrej.contracts import Generation, Options, Schedule
from specrej.contracts.errors import InternalError, SpecrejError
from specrej.security import Credentials, credentials_from

PROMPT = "Give three tips for staying focused while studying."
OPTIONS = Options(
    n=32, max_tokens=256, temperature=0.7, alpha=0.5, schedule=Schedule(first=16), seed=1
)


async def run(prompt: str, console: Console, *, holds: bool = False) -> None:
    """Run the demo on `console`; with `holds`, until it is cancelled.

    Raises:
        ProcessError: the stack did not start.
        SpecrejError: the request failed, or the second answer did not come from the cache.
    """
    started = time.monotonic()
    console.print(
        "starting valkey, generator, reward service, orchestrator and gateway", style="dim"
    )
    credentials = credentials_from(os.environ)
    async with Stack(credentials=credentials, gateway=True) as stack:
        took_s = time.monotonic() - started
        console.print(f"ready in {took_s:.1f} s at {stack.orchestrator_address}\n", style="dim")
        try:
            address = stack.orchestrator_address
            generation = await _generate(address, credentials, prompt, console)
        except SpecrejError:
            console.print(stack.log_tails(), style="dim", markup=False, highlight=False)
            raise
        page = f"{stack.gateway_url}/#record={generation.request_id}"
        _fact(console, "replay", page if holds else f"{page} (with specrej demo --hold)")
        if holds:
            console.print("\nCtrl-C stops everything", style="dim")
            with suppress(asyncio.CancelledError):  # the normal end of this command
                await asyncio.Event().wait()
    console.print("everything is stopped", style="dim")


async def _generate(
    address: str, credentials: Credentials, prompt: str, console: Console
) -> Generation:
    async with Client(address, **credentials) as client:
        console.print(Text.assemble(("prompt  ", "dim"), prompt))
        generation = await watch(client.stream(prompt, **OPTIONS), console)
        show_answer(generation, console)
        await _repeat(client, prompt, generation, console)
        return generation


def show_answer(generation: Generation, console: Console) -> None:
    """The best answer, its reward and what it cost."""
    best, usage, timings = generation.best, generation.usage, generation.timings
    console.print(Padding(Text(best.text.strip(), "bold"), (1, 2), expand=False))
    phases = {
        "waiting": timings.queue_ms + timings.open_ms,
        "making tokens": timings.extend_ms,
        "scoring": timings.score_ms,
        "pruning": timings.prune_ms,
    }
    spent = ", ".join(f"{name} {ms / 1000:.2f} s" for name, ms in phases.items())
    _fact(console, "reward", f"{best.score:.3f}, the best of {generation.n} candidates")
    _fact(console, "tokens", f"{usage.generated_tokens:,} made")
    estimate = f"about {usage.best_of_n_tokens_estimate:,}{saved_text(usage)}"
    _fact(console, f"best-of-{generation.n}", estimate)
    _fact(console, "time", f"{timings.total_ms / 1000:.2f} s: {spent}")


async def _repeat(client: Client, prompt: str, first: Generation, console: Console) -> None:
    sent = time.monotonic()
    second = await client.generate(prompt, **OPTIONS)
    took_ms = 1000 * (time.monotonic() - sent)
    if not second.cached or second.best != first.best:
        raise InternalError("the second request was not answered from the cache")
    _fact(console, "repeated", f"the same answer, from the cache, in {took_ms:.0f} ms")


def _fact(console: Console, name: str, value: str) -> None:
    console.print(Text.assemble((f"{name:<13}", "dim"), value), soft_wrap=True)
