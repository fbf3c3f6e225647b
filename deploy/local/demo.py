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
from specrej.client.view import watch
from specrej.contracts import Generation, Options, Schedule
from specrej.contracts.errors import InternalError, SpecrejError
from specrej.security import credentials_from

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
            async with Client(stack.orchestrator_address, **credentials) as client:
                generation = await _answer_twice(client, prompt, console)
        except SpecrejError:
            console.print(stack.log_tails(), style="dim", markup=False, highlight=False)
            raise
        page = f"{stack.gateway_url}/#record={generation.request_id}"
        note = "" if holds else " (with specrej demo --hold)"
        console.print(Text.assemble(("replay    ", "dim"), f"{page}{note}"), soft_wrap=True)
        if holds:
            console.print("\nCtrl-C stops everything", style="dim")
            with suppress(asyncio.CancelledError):  # the normal end of this command
                await asyncio.Event().wait()
    console.print("everything is stopped", style="dim")


async def _answer_twice(client: Client, prompt: str, console: Console) -> Generation:
    console.print(Text.assemble(("prompt    ", "dim"), prompt))
    generation = await watch(client.stream(prompt, **OPTIONS), console)
    console.print(Padding(Text(generation.best.text.strip(), "bold"), (1, 2), expand=False))
    sent = time.monotonic()
    second = await client.generate(prompt, **OPTIONS)
    took_ms = 1000 * (time.monotonic() - sent)
    if not second.cached or second.best != generation.best:
        raise InternalError("the second request was not answered from the cache")
    repeated = f"the same answer, from the cache, in {took_ms:.0f} ms"
    console.print(Text.assemble(("repeated  ", "dim"), repeated))
    return generation
