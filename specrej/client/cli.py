"""The command line: generate, score, describe, and run the whole service on this machine.

Only answers go to stdout; progress and errors go to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TextIO

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej import contracts as c
from specrej.client import Client, view
from specrej.client.channel import check_address, open_channel
from specrej.client.options import add_credentials, add_options, credentials_of, options_of
from specrej.contracts import errors, wire
from specrej.contracts.status import has_details
from specrej.security import Role, new_token, time_of

_EXIT_CODES: dict[type[errors.SpecrejError], int] = {
    errors.InvalidRequest: 2,
    errors.NotFound: 2,
    errors.Unavailable: 3,
    errors.DeadlineExceeded: 4,
    errors.Overloaded: 5,
    errors.Unauthenticated: 6,
    errors.PermissionDenied: 6,
}
_INTERRUPTED, _TERMINATED = 130, 143
_PORT = 50050  # of the orchestrator
_EPILOG = """Exit codes: 0 done, 2 bad usage or request, 3 server unavailable, 4 deadline exceeded,
5 overloaded, 6 missing or refused token, 130 interrupted, 143 terminated, 1 any other error."""

# Commands of `python -m MODULE ...`: the module's arguments, and a help text.
_FORWARDED: dict[str, tuple[tuple[str, ...], str]] = {
    "up": (("deploy.local", "up"), "run the whole service until Ctrl-C"),
    "demo": (("deploy.local", "demo"), "start everything and answer one prompt"),
    "pull": (("specrej_models.hub",), "fetch models of a hub by their names"),
}


_Command = Callable[[argparse.Namespace], Coroutine[Any, Any, None] | None]


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry point: run one command.

    Raises:
        SystemExit: the command failed.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in _FORWARDED:
        _forward(words[0], words[1:])
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with _reported():
        parsed = _parser().parse_args(words)
        if getattr(parsed, "prompt", "") == "-":  # not on the event loop: reads block signals
            parsed.prompt = _stdin()
        work = parsed.command(parsed)
    if work is not None:
        run_to_end(work)


def _forward(name: str, arguments: Sequence[str]) -> None:
    """Replace this process with `python -m MODULE`, for commands outside of this package."""
    (module, *rest), _ = _FORWARDED[name]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        _fail(f"specrej {name} is not installed: pip install 'specrej-server[cpu]'")
    os.execv(sys.executable, (sys.executable, "-m", module, *rest, *arguments))


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end; errors and signals become one line on stderr and an exit code."""
    with _reported():
        asyncio.run(_with_sigterm(work))


@contextmanager
def _reported() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # also where stdout is closed
    except errors.SpecrejError as error:
        text = " ".join(error.message.split()) or error.reason
        failure, is_away = error.__cause__, isinstance(error, errors.Unavailable)
        if is_away and isinstance(failure, grpc.aio.AioRpcError) and not has_details(failure):
            text += "; is a service at this --address? specrej up starts all on this machine"
        _fail(text, _EXIT_CODES.get(type(error), 1))
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(1) from None
        _fail(str(error) or type(error).__name__)
    except asyncio.CancelledError:
        raise SystemExit(_TERMINATED) from None


async def _with_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM cancels the work, as Ctrl-C does, so that its contexts are left in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def note(text: str) -> None:
    """Print to stderr, if it is open."""
    try:
        if sys.stderr:  # else `print` would write to stdout
            print(text, file=sys.stderr)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop what the stream cannot write: Python would try again at exit."""
    if stream:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(text: str, code: int = 1) -> NoReturn:
    note(f"specrej: {text}")
    raise SystemExit(code) from None


def _print_json(plain: Mapping[str, object]) -> None:
    is_unicode = sys.stdout and sys.stdout.encoding.lower().startswith("utf")
    print(json.dumps(plain, ensure_ascii=not is_unicode, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej",
        description="Best-of-N answers at a fraction of their cost: Speculative Rejection as a"
        " service.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=version("specrej"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: _Command, text: str) -> argparse.ArgumentParser:
        """Add a command; `text` is its description, and its first sentence the help text."""
        summary = text.partition(".")[0]
        added: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=text)
        added.set_defaults(command=run)
        return added

    text = "Answer PROMPT with the best of many candidates."
    _add_generate(add("generate", _generate, text))

    _add_score(add("score", _score, "Score RESPONSEs to a prompt; higher is better."))

    _add_call(add("describe", _describe, "Show models, rewards, limits and load."), 10.0)

    text = "Check a service's health: exit code 0 if it is SERVING, else 1."
    command = add("health", _health, text)
    command.add_argument(
        "address", type=_address, metavar="HOST[:PORT]", help="any of the services"
    )
    command.add_argument(
        "--service", default="", help="a service's name, or liveness; empty: readiness"
    )
    command.add_argument("--timeout", type=_seconds, default=5.0, help="maximum seconds to wait")
    add_credentials(command)

    text = """Make a token for TENANT. Its line for a tokens file, with only its SHA-256, is printed
        to stdout, and the token to stderr: specrej token acme >> tokens.jsonl 2> acme.token."""
    _add_token(add("token", _token, text))

    for name, (_, text) in _FORWARDED.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.usage = "specrej generate [OPTIONS] PROMPT"
    command.add_argument("prompt", metavar="PROMPT", help="what to answer; - reads it from stdin")
    command.add_argument("--system", default="", help="a system turn before the prompt")
    group = command.add_argument_group("request")
    add_options(group)
    group.add_argument(
        "--reward-data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="JSON that the reward NAME compares answers with; repeatable; one needs no NAME",
    )
    _add_call(command, 300.0)


def _add_score(command: argparse.ArgumentParser) -> None:
    command.add_argument("responses", metavar="RESPONSE", nargs="+")
    command.add_argument("--prompt", required=True, help="the prompt; - reads it from stdin")
    command.add_argument("--reward", default="", help="the reward's name; empty: the default")
    command.add_argument(
        "--unfinished", action="store_true", help="the responses are beginnings of answers"
    )
    command.add_argument(
        "--reward-data", type=Path, metavar="FILE", help="JSON that the reward compares them with"
    )
    _add_call(command, 60.0)


def _add_token(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `specrej token`."""
    command.add_argument("tenant", metavar="TENANT", help="the tenant that the token identifies")
    command.add_argument(
        "--role",
        type=Role,
        action="append",
        choices=list(Role),
        help="what the token permits; repeatable: generate (the default), gateway (generate for the"
        " tenants that the metadata specrej-tenant names) or admin (describe only)",
    )
    command.add_argument(
        "--expires", default="", help="end of its validity, as 2030-12-31T23:59:59Z; default: none"
    )


def _add_call(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Add the flags of a call to the orchestrator."""
    parser.add_argument(
        "--address",
        type=_address,
        default=os.environ.get("SPECREJ_ADDRESS") or f"127.0.0.1:{_PORT}",
        metavar="HOST[:PORT]",
        help=f"the orchestrator [SPECREJ_ADDRESS; 127.0.0.1:{_PORT}]",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=timeout_s, help="seconds until the call's deadline"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_credentials(parser)


def _address(text: str) -> str:
    """An address of gRPC, with the orchestrator's port if it has none."""
    try:
        check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{text}:{_PORT}" if re.fullmatch(r"[\w.-]+|\[[\w:]+\]", text) else text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: use 0 or more")
    return seconds


def _client(given: argparse.Namespace) -> Client:
    return Client(given.address, timeout_s=given.timeout, **credentials_of(given))


async def _generate(given: argparse.Namespace) -> None:
    options = options_of(given)
    if given.reward_data:
        options["rewards"] = _with_data(options.get("rewards", []), given.reward_data)
    async with _client(given) as client:
        prompt = _prompt(given.system, given.prompt)
        generation = await view.follow(client.stream(prompt, **options), note)
    note(f"request {generation.request_id}")
    if given.json:
        _print_json(wire.to_plain(generation))
    else:
        _print_answers(generation)


def _with_data(rewards: Sequence[c.WeightedReward], given: Sequence[str]) -> list[c.WeightedReward]:
    """The rewards with their data, each `[NAME=]FILE`.

    Raises:
        OSError: a file cannot be read.
        InvalidRequest: a reward is not named, or a file is no text.
    """
    data: dict[str, str] = {}
    names = [reward.name for reward in rewards]
    for text in given:
        name, is_named, file = text.partition("=")
        if not is_named or name not in names:
            name, file = (names[0], text) if len(names) == 1 else ("", text)
        if not name or name in data:
            problem = f"{text}: use NAME=FILE, once for each --reward: {', '.join(names) or 'none'}"
            raise errors.InvalidRequest([errors.Violation("--reward-data", problem)])
        data[name] = _text_of(Path(file))
    return [replace(reward, data=data.get(reward.name, "")) for reward in rewards]


def _text_of(path: Path | None) -> str:
    try:
        return path.read_text() if path else ""
    except UnicodeDecodeError:
        violation = errors.Violation("--reward-data", f"{path} is no text")
        raise errors.InvalidRequest([violation]) from None


async def _describe(given: argparse.Namespace) -> None:
    async with _client(given) as client:
        description = wire.to_plain(await client.describe())
    if given.json:
        _print_json(description)
    else:
        print(*view.fact_lines(description), sep="\n")


async def _score(given: argparse.Namespace) -> None:
    async with _client(given) as client:
        scores = await client.score(
            _prompt("", given.prompt),
            given.responses,
            reward=given.reward,
            unfinished=given.unfinished,
            data=_text_of(given.reward_data),
        )
    if given.json:
        _print_json({"scores": scores.values, "computed_tokens": scores.computed_tokens})
        return
    for value, response in zip(scores.values, given.responses, strict=True):
        print(f"{value:8.4f}  {' '.join(response.split())}")


async def _health(given: argparse.Namespace) -> None:
    request = health_pb2.HealthCheckRequest(service=given.service)
    try:
        async with open_channel(given.address, **credentials_of(given)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            # grpc has no infinite timeout.
            answer = await stub.Check(request, timeout=min(given.timeout, 1e6))
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    except grpc.aio.AioRpcError as error:
        state = f"{error.code().name} {error.details()}"
    except (OSError, ValueError) as error:  # of the credentials
        state = str(error)
    if state != "SERVING":
        _fail(state)


def _token(given: argparse.Namespace) -> None:
    if not given.tenant:
        _fail("TENANT must not be empty", 2)
    if given.expires:
        try:
            time_of(given.expires)
        except ValueError as error:
            _fail(f"--{error}", 2)
    made, line = new_token(given.tenant, given.role or (), given.expires)
    print(line, flush=True)  # no token whose line is lost
    note(made)


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise errors.InvalidRequest([errors.Violation("stdin", f"is no text: {error}")]) from None


def _prompt(system: str, text: str) -> c.Prompt:
    turns = [c.Message("system", system)] if system else []
    return c.Prompt(messages=(*turns, c.Message("user", text)))


def _print_answers(generation: c.Generation) -> None:
    if len(generation.candidates) == 1:
        if (parts := generation.best.parts) and parts.reasoning:
            note(parts.reasoning)
        print(_shown(generation.best))
        return
    for ranked in generation.candidates:
        vote = "" if ranked.vote is None else f", votes {ranked.vote}"
        vetoed = ", vetoed" if ranked.vetoed else ""
        print(f"[{ranked.score:.4f}, candidate {ranked.id}{vote}{vetoed}] {_shown(ranked)}")


def _shown(ranked: c.RankedCandidate) -> str:
    """What is for the user: the text without its reasoning, and a line for each call."""
    if not (parts := ranked.parts):
        return ranked.text
    calls = (f"{call.name}({call.arguments})" for call in parts.tool_calls)
    return "\n".join(filter(None, (parts.content, *calls)))


if __name__ == "__main__":
    main()
