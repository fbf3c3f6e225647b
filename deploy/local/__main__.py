"""`specrej up` and `specrej demo`: the whole service on this machine, for development."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.local import demo as demonstration
from deploy.local.processes import ProcessError
from deploy.local.stack import Ports, Stack
from specrej.cli import note, run_to_end
from specrej.credentials import credentials_from

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_DEFAULT = Ports()


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        run_to_end(work)
    except ProcessError as error:
        note(f"specrej: {error}")
        raise typer.Exit(1) from None


@app.command()
def up(
    port: Annotated[int, typer.Option(help="The orchestrator's port.")] = _DEFAULT.orchestrator,
    generator_port: Annotated[int, typer.Option()] = _DEFAULT.generator,
    reward_port: Annotated[int, typer.Option()] = _DEFAULT.reward,
    redis_port: Annotated[int, typer.Option()] = _DEFAULT.redis,
    gateway_port: Annotated[
        int, typer.Option(envvar="SPECREJ_GATEWAY_PORT", help="The port of OpenAI's API.")
    ] = _DEFAULT.gateway,
    metrics_port: Annotated[
        int,
        typer.Option(help="The first of four: orchestrator, generator, reward service, gateway."),
    ] = _DEFAULT.metrics_orchestrator,
    orchestrators: Annotated[
        int, typer.Option(min=1, help="Number of orchestrators; all but the first on free ports.")
    ] = 1,
    generators: Annotated[int, typer.Option(min=1, help="Number of generators, likewise.")] = 1,
    reward_services: Annotated[
        int, typer.Option(min=1, help="Number of reward services, likewise.")
    ] = 1,
    log_dir: Annotated[Path | None, typer.Option(help="Keep logs in this directory.")] = None,
) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    metrics = range(metrics_port, metrics_port + 4)
    ports = (port, generator_port, reward_port, redis_port, *metrics[:3], gateway_port, metrics[3])
    stack = Stack(
        Ports(*ports),
        log_dir=log_dir,
        credentials=credentials_from(os.environ),
        orchestrators=orchestrators,
        generators=generators,
        reward_services=reward_services,
        gateway=True,
    )
    _run(_up(stack))


async def _up(stack: Stack) -> None:
    note("starting valkey, generator, reward service, orchestrator and gateway")
    async with stack:
        note(
            f"orchestrator  {stack.orchestrator_addresses}\n"
            f"generator     {stack.generator_addresses}\n"
            f"reward        {stack.reward_addresses}\n"
            f"redis         {stack.redis_url}\n"
            f"gateway       {stack.gateway_url}/v1 (OpenAI's API)\n"
            f"page          {stack.gateway_url}/ (watch requests)\n"
            f"metrics       {' '.join(stack.metrics_urls)}\n"
            f"logs          {stack.log_dir}\n"
            "\n"
            f'specrej generate --address {stack.orchestrator_address} "Why is the sky blue?"\n'
            f"specrej describe --address {stack.orchestrator_address}\n"
            "\n"
            "Ctrl-C stops everything"
        )
        try:
            await stack.keep_alive(note)
        except asyncio.CancelledError:
            note("stopping")  # Ctrl-C and SIGTERM are the normal end of this command


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Option(envvar="SPECREJ_PROMPT", help="What to answer.")
    ] = demonstration.PROMPT,
    hold: Annotated[
        bool | None,
        typer.Option(help="Keep the page that replays it until Ctrl-C; default: on a terminal."),
    ] = None,
) -> None:
    """Start everything on free ports, answer one prompt, stop everything."""
    console = Console()
    _run(demonstration.run(prompt, console, holds=console.is_terminal if hold is None else hold))


if __name__ == "__main__":
    app(prog_name="specrej")
