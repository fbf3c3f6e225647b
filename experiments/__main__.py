"""Reproduce the paper's studies, and find the best settings for your models."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from experiments import commands
from experiments.collect import DEFAULT_CHUNK, CollectError
from experiments.prompts import DEFAULT_PROMPTS
from experiments.studies.plans import DOUBLING
from orchestrator.loop.composition import LIKELIHOOD
from specrej import threads
from specrej.client.options import parse_branching, parse_schedule
from specrej.contracts import Branching
from specrej.contracts.errors import SpecrejError

_ROOT = Path("build/experiments")
_TRAJECTORIES = _ROOT / "trajectories"
_RESUME = "Stop it at any time: the same command continues with what is missing."


def main() -> None:
    """Run one command; an error is one line on stderr."""
    parser = argparse.ArgumentParser(prog="specrej experiment", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_run, _collect, _replay, _recommend, _live, _branching):
        add(subparsers)
    arguments = parser.parse_args()
    threads.bound_spinning()
    try:
        asyncio.run(arguments.command(arguments))
    except (CollectError, SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"specrej experiment: {error}\n")
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        parser.exit(130)


def _run(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="collect what is missing, replay all settings, and write the report",
        description=_RESUME,
    )
    _add_collection(parser, _ROOT)
    parser.add_argument(
        "--lengths",
        type=_numbers,
        default=(),
        help="also study these smaller token limits, by comma: the same answers, cut off",
    )
    parser.add_argument("--live", type=Path, help="output of live: seconds of real requests")
    parser.set_defaults(command=commands.run_all)


def _collect(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "collect", help="generate and score all answers of every prompt", description=_RESUME
    )
    _add_collection(parser, _TRAJECTORIES)
    parser.set_defaults(command=commands.collect)


def _replay(subparsers: Any) -> None:
    parser = subparsers.add_parser("replay", help="one setting on all prompts, without a model")
    _add_source(parser)
    parser.add_argument("--n", type=int, default=0, help="candidates; 0: all that were generated")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--schedule", type=parse_schedule, default=DOUBLING, help="as of generate")
    parser.add_argument("--slots", type=int, default=0, help="KV slots; 0: unlimited")
    parser.add_argument(
        "--snap",
        action="store_true",
        help="where full slots end a round off the grid, end it at the position before",
    )
    _add_objective(parser)
    parser.set_defaults(command=commands.replay)


def _recommend(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "recommend",
        help="the best settings by budget, and whether they are ahead of Best-of-N",
        description="Settings are chosen on one half of the prompts and judged on the other.",
    )
    _add_source(parser)
    _add_objective(parser)
    parser.set_defaults(command=commands.recommend)


def _live(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "live", help="time real requests, and compare them with replays", description=_RESUME
    )
    parser.add_argument("--trajectories", type=Path, default=_TRAJECTORIES)
    parser.add_argument("--out", type=Path, default=_ROOT / "live.jsonl")
    parser.add_argument("--limit", type=int, default=3, help="number of prompts; 0: all")
    parser.add_argument("--n", type=_numbers, default=(8, 64), help="numbers, by comma")
    parser.add_argument("--alpha", type=float, action="append", help="repeatable; default 0.5")
    parser.add_argument(
        "--schedule",
        type=parse_schedule,
        action="append",
        help="repeatable; default geometric:16,2",
    )
    _add_objective(parser)
    _add_models(parser)
    parser.set_defaults(command=commands.live)


def _branching(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "branching",
        help="tokens, seconds and rewards of forks against rejection alone, on live requests",
        description=_RESUME,
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "branching.jsonl")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS])
    parser.add_argument("--limit", type=int, default=0, help="number of prompts; 0: all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rewards", default="relevance,harmless", help="by comma")
    parser.add_argument("--n", type=_numbers, default=(16, 32, 64, 128), help="of rejection alone")
    parser.add_argument("--start", type=int, default=32, help="candidates before the first forks")
    parser.add_argument("--branching", type=parse_branching, nargs="+", default=[Branching()])
    parser.add_argument("--seed", type=int, default=1, help="of prompt 0; prompt i adds i")
    _add_models(parser)
    parser.set_defaults(command=commands.branching)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trajectories", type=Path, default=_TRAJECTORIES, help="directory")
    parser.add_argument("--reward", default=LIKELIHOOD)


def _add_objective(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reward-alone", action="store_true", help="do not prefer complete answers"
    )


def _add_collection(parser: argparse.ArgumentParser, out: Path) -> None:
    parser.add_argument("--out", type=Path, default=out, help="directory")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS], help="JSON or JSON lines"
    )
    parser.add_argument("--limit", type=int, default=0, help="number of prompts; 0: all")
    parser.add_argument("--n", type=int, default=512, help="candidates per prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens per candidate")
    parser.add_argument("--grid", type=_numbers, help="token positions at which to score prefixes")
    parser.add_argument(
        "--rewards", default="relevance,harmless", help="by comma; likelihood is added"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer")
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of prompt 0; prompt i adds i")
    parser.add_argument("--chunk", type=int, default=DEFAULT_CHUNK, help="candidates per session")
    _add_models(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-slots", type=int, default=0, help="in-process; 0: from memory")
    parser.add_argument("--generator-address", default="", help="HOST:PORT; default: in-process")
    parser.add_argument("--reward-address", default="127.0.0.1:50052")


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers of at least 1, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError("must be numbers of 1 or more, separated by commas")
    return tuple(map(int, parts))


if __name__ == "__main__":
    main()
