"""`specrej up` and `specrej demo`: the whole service on this machine, for development."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from deploy.local import models
from deploy.local.processes import ProcessError
from deploy.local.stack import Ports, Stack
from specrej.client import Client
from specrej.client.cli import note, run_to_end
from specrej.client.view import follow
from specrej.contracts import Options
from specrej.contracts.errors import InternalError, SpecrejError
from specrej.security import credentials_from

_PROMPT = "How do plants make their food?"
_OPTIONS = Options(n=32, max_tokens=256, temperature=0.7, seed=1)
_STARTING = "starting valkey, generator, reward service, orchestrator and gateway"
_DEFAULT = Ports()
_MEASURED = ("orchestrator", "generator", "reward", "gateway")  # have metrics
_MAX_PORT = 65_532  # the last of four for metrics is 65535


def main() -> None:
    """Run one of the two commands.

    Raises:
        SystemExit: it failed.
    """
    parser = argparse.ArgumentParser(prog="specrej")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    text = (
        "Start everything on free ports, answer one prompt, stop everything; on a terminal, keep"
        " its replay until Ctrl-C."
    )
    shown = commands.add_parser("demo", help=text, description=text)
    prompt = os.environ.get("SPECREJ_PROMPT") or _PROMPT
    shown.add_argument("--prompt", default=prompt, help="what to answer [SPECREJ_PROMPT]")
    shown.add_argument(
        "--hold",
        action=argparse.BooleanOptionalAction,
        help="keep the page that replays it until Ctrl-C; default: on a terminal",
    )
    shown.set_defaults(work=_demo)
    given = parser.parse_args()
    # Of the services, which read these settings; they win over the environment.
    if getattr(given, "model", ""):
        os.environ["SPECREJ_GENERATOR_MODEL"] = given.model
    if getattr(given, "rewards", ()):
        os.environ["SPECREJ_REWARD_REWARDS"] = json.dumps(given.rewards)
    try:
        models.prepare(note)
        run_to_end(given.work(given))
    except ProcessError as error:
        note(f"specrej: {error}")
        raise SystemExit(1) from None


def _add_up(commands: Any) -> None:
    text = "Run the whole service on this machine until Ctrl-C."
    parser = commands.add_parser("up", help=text, description=text)
    text = "the generator: a directory or a hub's org/name[@revision]"
    parser.add_argument("--model", help=f"{text} [SPECREJ_GENERATOR_MODEL]")
    text = "a sequence classifier's directory or name, or a reward as JSON (docs/rewards.md)"
    text = f"{text}; may be repeated, the first is the default [SPECREJ_REWARD_REWARDS]"
    options = {"type": _reward, "action": "append", "default": [], "metavar": "MODEL"}
    parser.add_argument("--reward", dest="rewards", help=text, **options)
    gateway_port = os.environ.get("SPECREJ_GATEWAY_PORT") or _DEFAULT.gateway
    for flag, name, port, text in (
        ("--port", "orchestrator", _DEFAULT.orchestrator, "of the orchestrator"),
        ("--generator-port", "generator", _DEFAULT.generator, "of the generator"),
        ("--reward-port", "reward", _DEFAULT.reward, "of the reward service"),
        ("--redis-port", "redis", _DEFAULT.redis, "of the cache"),
        ("--gateway-port", "gateway", gateway_port, "of OpenAI's API [SPECREJ_GATEWAY_PORT]"),
    ):
        text = f"{text}; default {port}"
        parser.add_argument(flag, dest=name, type=_port, default=port, metavar="PORT", help=text)
    first = _DEFAULT.metrics_orchestrator
    text = f"the first of four, in the order {', '.join(_MEASURED)}; default {first}"
    parser.add_argument("--metrics-port", type=_port, default=first, metavar="PORT", help=text)
    for flag in ("--orchestrators", "--generators", "--reward-services"):
        text = "number of processes, 1 to 9; all but the first on free ports"
        parser.add_argument(flag, type=int, choices=range(1, 10), default=1, metavar="N", help=text)
    text = "Envoy before the orchestrator and the gateway, at their ports (docs/security.md)"
    parser.add_argument("--edge", action="store_true", help=text)
    parser.add_argument("--log-dir", type=Path, help="keep logs in this directory")
    parser.set_defaults(work=_up)


def _reward(text: str) -> dict[str, Any]:
    """A reward of the setting `rewards`; one that is named by its model alone is a classifier."""
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(text.partition("@")[0]).name.lower()).lstrip("._-")
    return {"name": name[:64] or "reward", "kind": "classifier", "directory": text}


def _port(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"must be 1 .. {_MAX_PORT}")
    return int(text)


async def _demo(given: argparse.Namespace) -> None:
    """Answer a prompt, and the same prompt again from the cache.

    Raises:
        ProcessError: the stack did not start.
        SpecrejError: the request failed, or the second answer did not come from the cache.
    """
    console = Console()
    holds = console.is_terminal if given.hold is None else given.hold
    started = time.monotonic()
    console.print(_STARTING, style="dim")
    credentials = credentials_from(os.environ)
    async with Stack(credentials=credentials, gateway=True, report=note) as stack:
        took_s = time.monotonic() - started
        console.print(f"ready in {took_s:.1f} s at {stack.orchestrator_address}\n", style="dim")
        try:
            async with Client(stack.orchestrator_address, **credentials) as client:
                await _answer_twice(client, given.prompt, console)
        except SpecrejError:
            console.print(stack.log_tails(), style="dim", markup=False, highlight=False)
            raise
        hint = "" if holds else " (with specrej demo --hold)"
        page = Text.assemble(("page      ", "dim"), f"{stack.gateway_url}/{hint}")
        console.print(page, soft_wrap=True)
        if holds:
            console.print("\nCtrl-C stops everything", style="dim")
            with suppress(asyncio.CancelledError):  # the normal end of this command
                await asyncio.Event().wait()
    console.print("everything is stopped", style="dim")


async def _answer_twice(client: Client, prompt: str, console: Console) -> None:
    console.print(Text.assemble(("prompt    ", "dim"), prompt))
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    generation = await follow(client.stream(prompt, **_OPTIONS), show)
    console.print(Padding(Text(generation.best.text.strip(), "bold"), (1, 2), expand=False))
    sent = time.monotonic()
    second = await client.generate(prompt, **_OPTIONS)
    took_ms = 1000 * (time.monotonic() - sent)
    if not second.cached or second.best != generation.best:
        raise InternalError("the second request was not answered from the cache")
    repeated = f"the same answer, from the cache, in {took_ms:.0f} ms"
    console.print(Text.assemble(("repeated  ", "dim"), repeated))


async def _up(given: argparse.Namespace) -> None:
    fixed = {name: getattr(given, name) for name in ("redis", *_MEASURED)}
    measured = {f"metrics_{name}": given.metrics_port + i for i, name in enumerate(_MEASURED)}
    stack = Stack(
        Ports(**fixed, **measured),
        log_dir=given.log_dir,
        credentials=credentials_from(os.environ),
        orchestrators=given.orchestrators,
        generators=given.generators,
        reward_services=given.reward_services,
        gateway=True,
        edge=given.edge,
        report=note,
    )
    note(_STARTING)
    async with stack:
        edge = f"edge          {stack.orchestrator_address}\n" if given.edge else ""
        note(
            f"{edge}"
            f"orchestrator  {stack.orchestrator_addresses}\n"
            f"generator     {stack.generator_addresses}\n"
            f"reward        {stack.reward_addresses}\n"
            f"redis         {stack.redis_url}\n"
            f"gateway       {stack.gateway_url}/v1 (OpenAI's API)\n"
            f"page          {stack.gateway_url}/ (watch requests)\n"
            f"metrics       {' '.join(stack.metrics_urls)}\n"
            f"logs          {stack.log_dir}\n\n"
            f'specrej generate --address {stack.orchestrator_address} "Why is the sky blue?"\n'
            f"specrej describe --address {stack.orchestrator_address}\n"
            "\n"
            "Ctrl-C stops everything"
        )
        try:
            await stack.keep_alive()
        except asyncio.CancelledError:
            note("stopping")  # Ctrl-C and SIGTERM are the normal end of this command


if __name__ == "__main__":
    main()
