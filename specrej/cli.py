"""The command line: ask, describe and score, and run the whole service on this machine.

Answers go to stdout and nothing else does; progress and errors go to stderr. Exit codes: 0 done,
2 bad usage or request, 3 no server there or not ready, 4 deadline exceeded, 5 overloaded,
6 no token or one that is not for this, 130 interrupted, 1 anything else.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specrej import demo as demonstration
from specrej import wire
from specrej.cli_credentials import takes_credentials
from specrej.cli_experiment import experiment
from specrej.cli_health import health
from specrej.cli_run import note, print_json, run_to_end
from specrej.cli_telemetry import top, trace
from specrej.client import Client, Options, RewardClient
from specrej.contracts import (
    Algorithm,
    CacheControl,
    Generation,
    Message,
    Normalization,
    Prompt,
    Schedule,
    Scores,
    ServiceDescription,
    WeightedReward,
)
from specrej.credentials import Credentials, credentials_from
from specrej.rounds_view import watch
from specrej.security import Role, append_line, new_token
from specrej.stack import Ports, Stack

app = typer.Typer(
    help="Best-of-N answers at a fraction of their cost: Speculative Rejection as a service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console entry."""
    app()


def parse_schedule(text: str) -> Schedule:
    """`memory`, `geometric`, `geometric:FIRST`, `geometric:FIRST,FACTOR` or `tokens:T,T,...`."""
    kind, _, rest = text.partition(":")
    values = rest.split(",") if rest else []
    try:
        if kind == "memory" and not values:
            return Schedule(kind="memory")
        if kind == "tokens" and values:
            return Schedule(kind="tokens", tokens=tuple(int(value) for value in values))
        if kind == "geometric" and len(values) <= 2:
            default = Schedule()
            first = int(values[0]) if values else default.first
            factor = float(values[1]) if len(values) == 2 else default.factor
            return Schedule(first=first, factor=factor)
    except ValueError:
        pass
    raise typer.BadParameter(
        f"{text!r}: use memory, geometric:16,2 (first, factor) or tokens:16,32,64"
    )


_REWARD_SYNTAX = "NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]"


def parse_reward(text: str) -> WeightedReward:
    """`NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]`, all but the name in any order."""
    first, *rest = text.split(",")
    name, _, weight = first.partition("=")
    given = dict(_key_and_value(part) for part in rest)
    try:
        if len(given) < len(rest):
            raise ValueError("something is there twice")
        veto = given.pop("veto", None)
        return WeightedReward(
            name,
            float(weight or 1),
            _normalization(given),
            None if veto is None else float(veto),
        )
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use {_REWARD_SYNTAX}") from None


def _key_and_value(part: str) -> tuple[str, str]:
    key, _, value = part.partition("=")
    return key, value


def _normalization(given: Mapping[str, str]) -> Normalization:
    match sorted(given.items()):
        case []:
            return Normalization()
        case [("batch", "")]:
            return Normalization("batch")
        case [("deviation", deviation), ("mean", mean)]:
            return Normalization("fixed", float(mean), float(deviation))
        case _:
            raise ValueError("no such normalization")


# Flags. What is not given is None and stays absent on the wire: defaults are the server's.
_Address = Annotated[
    str, typer.Option(envvar="SPECREJ_ADDRESS", help="The orchestrator, as HOST:PORT.")
]
_RewardAddress = Annotated[
    str, typer.Option(envvar="SPECREJ_REWARD_ADDRESS", help="The reward service, as HOST:PORT.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Timeout = Annotated[float, typer.Option(min=0, help="Seconds until the call's deadline.")]
_Prompt = Annotated[str, typer.Argument(help="What to answer; - reads it from stdin.")]
_System = Annotated[str, typer.Option(help="A system turn before the prompt.")]
_N = Annotated[int | None, typer.Option("--n", "-n", help="Candidates; 0: as many as fit.")]
_Alpha = Annotated[float | None, typer.Option(help="Fraction rejected at each decision token.")]
_Schedule = Annotated[
    Schedule | None,
    typer.Option(
        parser=parse_schedule,
        metavar="SCHEDULE",
        help="Decision tokens: memory, geometric:FIRST,FACTOR or tokens:T,T,...",
    ),
]
_Algorithm = Annotated[Algorithm | None, typer.Option(help="How the best is found.")]
_Rewards = Annotated[
    list[str] | None,
    typer.Option(
        metavar=_REWARD_SYNTAX,
        help="What is best; repeatable: a weighted sum. Values below veto reject their candidate; "
        "mean and deviation, or those of the batch, normalise them.",
    ),
]
_MaxTokens = Annotated[int | None, typer.Option(help="Most new tokens per candidate.")]
_Temperature = Annotated[float | None, typer.Option(help="0 is greedy and needs n = 1.")]
_TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest; 0: from all.")]
_TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest with this sum.")]
_Stop = Annotated[list[str] | None, typer.Option(help="Text that ends a candidate; repeatable.")]
_Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.")]
_IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end.")]
_MinTokens = Annotated[int | None, typer.Option(help="No candidate ends before so many tokens.")]
_Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="Token ids and log-probabilities, shown with --json.")
]
_Cache = Annotated[CacheControl | None, typer.Option(help="What the cache may do.")]
_AllowDegraded = Annotated[
    bool, typer.Option("--allow-degraded", help="Something weaker is better than an error.")
]
_Returned = Annotated[int | None, typer.Option(help="How many of the best to return.")]


@app.command()
@takes_credentials
def generate(
    prompt: _Prompt,
    address: _Address = "127.0.0.1:50050",
    system: _System = "",
    n: _N = None,
    alpha: _Alpha = None,
    schedule: _Schedule = None,
    algorithm: _Algorithm = None,
    reward: _Rewards = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    stop: _Stop = None,
    seed: _Seed = None,
    ignore_eos: _IgnoreEos = False,
    min_tokens: _MinTokens = None,
    logprobs: _Logprobs = False,
    cache: _Cache = None,
    return_candidates: _Returned = None,
    allow_degraded: _AllowDegraded = False,
    timeout: _Timeout = 300.0,
    as_json: _Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Answer PROMPT with the best of many candidates."""
    given = {
        "n": n,
        "alpha": alpha,
        "schedule": schedule,
        "algorithm": algorithm,
        "rewards": [parse_reward(text) for text in reward or ()] or None,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
        "min_tokens": min_tokens,
        "logprobs": logprobs or None,
        "cache": cache,
        "return_candidates": return_candidates,
        "allow_degraded": allow_degraded or None,
    }
    options = cast(Options, {name: value for name, value in given.items() if value is not None})
    run_to_end(_generate(address, _prompt(system, prompt), options, timeout, as_json, credentials))


async def _generate(
    address: str,
    prompt: Prompt,
    options: Options,
    timeout_s: float,
    as_json: bool,
    credentials: Credentials,
) -> None:
    async with Client(address, timeout_s=timeout_s, **credentials) as client:
        events = client.stream(prompt, **options)
        generation = await watch(events, Console(stderr=True))
    note(f"request {generation.request_id}")
    if as_json:
        print_json(wire.to_plain(wire.generation_to_wire(generation)))
    else:
        _print_answers(generation)


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
    run_to_end(_describe(address, timeout, as_json, credentials))


async def _describe(
    address: str, timeout_s: float, as_json: bool, credentials: Credentials
) -> None:
    async with Client(address, timeout_s=timeout_s, **credentials) as client:
        description = await client.describe()
    if as_json:
        print_json(wire.to_plain(wire.service_to_wire(description)))
    else:
        Console().print(_description_table(description))


@app.command()
@takes_credentials
def score(
    responses: Annotated[list[str], typer.Argument(metavar="RESPONSE...")],
    prompt: Annotated[str, typer.Option(help="What was asked; - reads it from stdin.")],
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
    client = partial(RewardClient, address, timeout_s=timeout, **credentials)
    asked = _prompt("", prompt)
    run_to_end(_score(client, asked, responses, reward, unfinished=unfinished, as_json=as_json))


async def _score(
    connect: Callable[[], RewardClient],
    prompt: Prompt,
    responses: list[str],
    reward: str,
    *,
    unfinished: bool,
    as_json: bool,
) -> None:
    async with connect() as client:
        scores: Scores = await client.score(prompt, responses, reward=reward, unfinished=unfinished)
    if as_json:
        print_json({"scores": scores.values, "computed_tokens": scores.computed_tokens})
        return
    for value, response in zip(scores.values, responses, strict=True):
        typer.echo(f"{value:8.4f}  {' '.join(response.split())}")


@app.command()
def up(
    port: Annotated[int, typer.Option(help="The orchestrator's port.")] = Ports().orchestrator,
    generator_port: Annotated[int, typer.Option()] = Ports().generator,
    reward_port: Annotated[int, typer.Option()] = Ports().reward,
    redis_port: Annotated[int, typer.Option()] = Ports().redis,
    metrics_port: Annotated[
        int, typer.Option(help="The first of three: orchestrator, generator, reward service.")
    ] = Ports().metrics_orchestrator,
    orchestrators: Annotated[
        int, typer.Option(min=1, help="How many; all but the first at free ports.")
    ] = 1,
    generators: Annotated[int, typer.Option(min=1, help="How many, in the same way.")] = 1,
    reward_services: Annotated[int, typer.Option(min=1, help="How many, in the same way.")] = 1,
    log_dir: Annotated[Path | None, typer.Option(help="Keep logs here.")] = None,
) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    of_metrics = (metrics_port + number for number in range(3))
    ports = Ports(port, generator_port, reward_port, redis_port, *of_metrics)
    stack = Stack(
        ports,
        log_dir=log_dir,
        credentials=credentials_from(os.environ),
        orchestrators=orchestrators,
        generators=generators,
        reward_services=reward_services,
    )
    run_to_end(_up(stack))


async def _up(stack: Stack) -> None:
    note("starting valkey, generator, reward service and orchestrator")
    async with stack:
        note(
            f"orchestrator  {stack.orchestrator_addresses}\n"
            f"generator     {stack.generator_addresses}\n"
            f"reward        {stack.reward_addresses}\n"
            f"redis         {stack.redis_url}\n"
            f"metrics       {' '.join(stack.metrics_urls)}\n"
            f"logs          {stack.log_dir}\n"
            "\n"
            f'specrej generate --address {stack.orchestrator_address} "Why is the sky blue?"\n'
            f"specrej describe --address {stack.orchestrator_address}\n"
            f"specrej top --metrics-url {','.join(stack.metrics_urls)}\n"
            "\n"
            "Ctrl-C stops everything"
        )
        try:
            await stack.keep_alive(note)
        except asyncio.CancelledError:
            # Ctrl-C or SIGTERM: how this command is meant to end.
            note("stopping")


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Option(envvar="SPECREJ_PROMPT", help="What to answer.")
    ] = demonstration.PROMPT,
) -> None:
    """Start everything on free ports, answer one prompt, stop everything."""
    run_to_end(demonstration.run(prompt, Console()))


@app.command()
def token(
    tenant: Annotated[str, typer.Argument(help="Whose requests it marks.")],
    role: Annotated[
        list[Role] | None,
        typer.Option(
            help="What it is for; repeatable. generate (the default), gateway (generate for the "
            "tenants that the metadata specrej-tenant names) or admin (describe only)."
        ),
    ] = None,
    append: Annotated[
        Path | None, typer.Option(help="Append the line to this tokens file instead.")
    ] = None,
) -> None:
    """Make a token for TENANT.

    The token goes to stdout and is kept nowhere; the line that lets it in, which holds only its
    SHA-256, to stderr, or into the services' tokens file:

    specrej token acme --append tokens.jsonl > acme.token
    """
    if not tenant:
        raise typer.BadParameter("TENANT must be a name")
    made, line = new_token(tenant, role or ())
    if append is None:
        note(line)
    else:
        try:
            append_line(append, line)
        except OSError as error:
            note(f"specrej: {error}")
            raise typer.Exit(1) from None
    typer.echo(made)


@app.command(
    "train-reward",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def train_reward(context: typer.Context) -> None:
    """Fit a reward on pairs of answers (--help says more)."""
    # In a process of its own, as every part that holds a model is.
    command = [sys.executable, "-m", "reward_service.training", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command(
    "cache",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def cache(context: typer.Context) -> None:
    """Look into the answer cache, or empty it (--help says more)."""
    # In a process of its own: this package knows no Redis.
    command = [sys.executable, "-m", "orchestrator.cache_admin", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(experiment)
for _command in (trace, top, health):
    app.command()(_command)


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
    facts = {
        "model": f"{generator.model} ({generator.device})",
        "fingerprint": generator.fingerprint,
        "context": f"{generator.context_tokens:,} tokens",
        "candidates": f"at most {generator.max_candidates:,}",
        "slots": f"{slots.owned:,} of {slots.capacity:,} owned, {slots.cached:,} cached",
        "rewards": ", ".join(description.rewards),
        "schedule": schedule_text(description.default_schedule),
        "cache": "available" if description.cache_available else "not available",
        "requests": f"{description.running} running, {description.queued} queued",
        "answers": f"{description.num_answers:,} made, {description.num_degraded:,} degraded,"
        f" {description.num_hurried:,} hurried",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def schedule_text(schedule: Schedule) -> str:
    """The flag that asks for this schedule."""
    match schedule.kind:
        case "memory":
            return "memory"
        case "tokens":
            return f"tokens:{','.join(str(token) for token in schedule.tokens)}"
        case _:
            return f"geometric:{schedule.first},{schedule.factor:g}"


if __name__ == "__main__":
    main()
