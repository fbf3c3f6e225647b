"""The command line: generate, score, describe, trace, and run the whole service on this machine.

Only answers go to stdout; progress and errors go to stderr. Exit codes: 0 done, 2 bad usage or
request, 3 server unavailable, 4 deadline exceeded, 5 overloaded, 6 missing or refused token,
130 interrupted, 143 terminated, 1 any other error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specrej import errors, wire
from specrej.channel import open_channel
from specrej.cli_options import takes_credentials, takes_options
from specrej.client import Client, RewardClient
from specrej.contracts import Generation, Message, Options, Prompt, ServiceDescription
from specrej.credentials import Credentials
from specrej.rounds_view import watch
from specrej.security import Role, append_line, new_token, time_of
from specrej.trace_view import drawing

_EXIT_CODES: dict[type[errors.SpecrejError], int] = {
    errors.InvalidRequest: 2,
    errors.SlotsExceeded: 2,
    errors.NotFound: 2,
    errors.Unavailable: 3,
    errors.DeadlineExceeded: 4,
    errors.Overloaded: 5,
    errors.Unauthenticated: 6,
    errors.PermissionDenied: 6,
}
_INTERRUPTED = 130
_TERMINATED = 143

app = typer.Typer(
    help="Best-of-N answers at a fraction of their cost: Speculative Rejection as a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Address = Annotated[
    str, typer.Option(envvar="SPECREJ_ADDRESS", help="The orchestrator, as HOST:PORT.")
]
_RewardAddress = Annotated[
    str, typer.Option(envvar="SPECREJ_REWARD_ADDRESS", help="The reward service, as HOST:PORT.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Timeout = Annotated[float, typer.Option(min=0, help="Seconds until the call's deadline.")]


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end; errors and signals become one line on stderr and an exit code."""
    try:
        asyncio.run(_with_sigterm(work))
    except errors.SpecrejError as error:
        note(f"specrej: {' '.join(error.message.split()) or error.reason}")
        raise typer.Exit(_EXIT_CODES.get(type(error), 1)) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except asyncio.CancelledError:
        raise typer.Exit(_TERMINATED) from None


async def _with_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM cancels the work, as Ctrl-C does, so that its contexts are left in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def note(text: str) -> None:
    """Print to stderr."""
    typer.echo(text, err=True)


def _print_json(plain: Mapping[str, object]) -> None:
    typer.echo(json.dumps(plain, ensure_ascii=False, indent=2))


@app.command()
@takes_credentials
@takes_options
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")],
    address: _Address = "127.0.0.1:50050",
    system: Annotated[str, typer.Option(help="A system turn before the prompt.")] = "",
    timeout: _Timeout = 300.0,
    as_json: _Json = False,
    *,
    options: Options,
    credentials: Credentials,
) -> None:
    """Answer PROMPT with the best of many candidates."""

    async def run() -> None:
        async with Client(address, timeout_s=timeout, **credentials) as client:
            events = client.stream(_prompt(system, prompt), **options)
            generation = await watch(events, Console(stderr=True))
        note(f"request {generation.request_id}")
        if as_json:
            _print_json(wire.to_plain(generation))
        else:
            _print_answers(generation)

    run_to_end(run())


@app.command()
@takes_credentials
def describe(
    address: _Address = "127.0.0.1:50050",
    timeout: _Timeout = 10.0,
    as_json: _Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Show models, rewards, limits and load."""

    async def run() -> None:
        async with Client(address, timeout_s=timeout, **credentials) as client:
            description = await client.describe()
        if as_json:
            _print_json(wire.to_plain(description))
        else:
            Console().print(_description_table(description))

    run_to_end(run())


@app.command()
@takes_credentials
def trace(
    request: Annotated[str, typer.Argument(help="Its id, as generate prints it.")],
    address: _Address = "127.0.0.1:50050",
    timeout: _Timeout = 10.0,
    as_json: _Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Show the phases of a REQUEST, its rounds and its candidates' rewards.

    The orchestrator keeps records of its latest requests, running ones included; see
    journal_requests in python -m orchestrator --help.
    """

    async def run() -> None:
        async with Client(address, timeout_s=timeout, **credentials) as client:
            record = await client.record(request)
        if as_json:
            _print_json(wire.to_plain(record))
        else:
            Console().print(drawing(record))

    run_to_end(run())


@app.command()
@takes_credentials
def score(
    responses: Annotated[list[str], typer.Argument(metavar="RESPONSE...")],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from stdin.")],
    reward: Annotated[str, typer.Option(help="The reward's name; empty: the default.")] = "",
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="The responses are beginnings of answers.")
    ] = False,
    address: _RewardAddress = "127.0.0.1:50052",
    timeout: _Timeout = 60.0,
    as_json: _Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Score RESPONSEs to a prompt; higher is better."""

    async def run() -> None:
        async with RewardClient(address, timeout_s=timeout, **credentials) as client:
            scores = await client.score(
                _prompt("", prompt), responses, reward=reward, unfinished=unfinished
            )
        if as_json:
            _print_json({"scores": scores.values, "computed_tokens": scores.computed_tokens})
            return
        for value, response in zip(scores.values, responses, strict=True):
            typer.echo(f"{value:8.4f}  {' '.join(response.split())}")

    run_to_end(run())


@app.command()
@takes_credentials
def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Any of the services.")],
    service: Annotated[
        str, typer.Option(help="A service's name, or liveness; empty: readiness.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Maximum seconds to wait.")] = 5.0,
    *,
    credentials: Credentials,
) -> None:
    """Check a service's health: exit code 0 if it is SERVING, else 1."""

    async def check() -> str:
        async with open_channel(address, retries=False, **credentials) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await stub.Check(request, timeout=timeout)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    try:
        state = asyncio.run(check())
    except grpc.aio.AioRpcError as error:
        state = f"{error.code().name} {error.details()}"
    except (OSError, ValueError) as error:  # of the credentials
        state = str(error)
    if state != "SERVING":
        note(f"specrej: {state}")
        raise typer.Exit(1)


@app.command()
def token(
    tenant: Annotated[str, typer.Argument(help="The tenant that the token identifies.")],
    role: Annotated[
        list[Role] | None,
        typer.Option(
            help="What the token permits; repeatable. generate (the default), gateway (generate "
            "for the tenants that the metadata specrej-tenant names) or admin (describe only)."
        ),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="End of its validity, as 2030-12-31T23:59:59Z; default: none.")
    ] = "",
    append: Annotated[
        Path | None, typer.Option(help="Append the line to this tokens file instead.")
    ] = None,
) -> None:
    """Make a token for TENANT.

    The token is printed to stdout and not stored. Its line for a tokens file, with only its
    SHA-256, goes to stderr or is appended to a file:

    specrej token acme --append tokens.jsonl > acme.token
    """
    if not tenant:
        raise typer.BadParameter("TENANT must not be empty")
    if expires:
        try:
            time_of(expires)
        except ValueError as error:
            raise typer.BadParameter(f"--expires {error}") from None
    made, line = new_token(tenant, role or (), expires)
    if append is None:
        note(line)
    else:
        try:
            append_line(append, line)
        except OSError as error:
            note(f"specrej: {error}")
            raise typer.Exit(1) from None
    typer.echo(made)


def _forward(name: str, help_text: str, *command: str) -> None:
    """Add a command that becomes `python -m COMMAND ...`: it needs more than this package."""

    def run(context: typer.Context) -> None:
        package = command[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            note(f"specrej: {package} is not installed; run this command in the repository")
            raise typer.Exit(1)
        os.execv(sys.executable, (sys.executable, "-m", *command, *context.args))

    run.__doc__ = help_text
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, context_settings=settings, add_help_option=False)(run)


_forward("up", "Run the whole service on this machine until Ctrl-C.", "deploy.local", "up")
_forward("demo", "Start everything on free ports and answer one prompt.", "deploy.local", "demo")
_forward("plan", "Compute slots, N and settings from a model's config.", "generator_service.plan")
_forward("train-reward", "Fit a reward on pairs of answers.", "reward_service.training")
_forward("cache", "Inspect or empty the answer cache.", "orchestrator.cache.admin")
_forward("experiment", "Reproduce the paper on your models.", "experiments")


def _prompt(system: str, text: str) -> Prompt:
    turns = [Message("system", system)] if system else []
    content = sys.stdin.read() if text == "-" else text
    return Prompt(messages=(*turns, Message("user", content)))


def _print_answers(generation: Generation) -> None:
    if len(generation.candidates) == 1:
        typer.echo(generation.best.text)
        return
    for ranked in generation.candidates:
        vetoed = ", vetoed" if ranked.vetoed else ""
        typer.echo(f"[{ranked.score:.4f}, candidate {ranked.id}{vetoed}] {ranked.text}")


def _description_table(description: ServiceDescription) -> Table:
    generator, slots = description.generator, description.generator.slots
    rows = {
        "model": f"{generator.model} ({generator.device})",
        "fingerprint": generator.fingerprint,
        "context": f"{generator.context_tokens:,} tokens",
        "candidates": f"at most {generator.max_candidates:,}",
        "slots": f"{slots.owned:,} of {slots.capacity:,} owned, {slots.cached:,} cached",
        "rewards": ", ".join(description.rewards),
        "schedule": str(description.default_schedule),
        "cache": "available" if description.cache_available else "not available",
        "requests": f"{description.running} running, {description.queued} queued",
        "answers": f"{description.num_answers:,} made, {description.num_degraded:,} degraded,"
        f" {description.num_hurried:,} hurried",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def main() -> None:
    """The console entry point."""
    app()


if __name__ == "__main__":
    main()
