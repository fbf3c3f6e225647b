"""`specrej experiment collect`: the options of a collection, and who does it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from experiments.backends import Backends, embedded, remote
from experiments.collect import DEFAULT_CHUNK, collect, missing
from experiments.progress import shown
from experiments.prompts import SHIPPED, read_prompts
from experiments.settings import Settings, default_grid
from experiments.trajectories import Store
from orchestrator.composition import LIKELIHOOD

DEFAULT_DIRECTORY = Path("build/experiments/trajectories")


def add_to(commands: Any) -> None:
    """The command."""
    parser = commands.add_parser(
        "collect",
        help="write and score all answers of every prompt",
        description="Stop it at any time: the same command goes on with the prompts that miss.",
    )
    add_options(parser)
    parser.set_defaults(command=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """All that decides what is collected, and by whom."""
    numbers = comma_separated
    parser.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="directory")
    parser.add_argument("--prompts", type=Path, default=SHIPPED, help="JSON or JSON lines")
    parser.add_argument("--limit", type=int, default=0, help="only so many prompts; 0: all")
    parser.add_argument("--n", type=int, default=512, help="candidates per prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens per candidate")
    parser.add_argument("--grid", type=numbers, help="token positions to score prefixes at")
    parser.add_argument(
        "--rewards", default="relevance", help="names, by comma; the likelihood is always there"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer")
    parser.add_argument("--min-tokens", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of the first prompt; others follow")
    parser.add_argument(
        "--chunk", type=int, default=DEFAULT_CHUNK, help="candidates per session of the generator"
    )
    add_backends(parser)


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Who writes and who judges."""
    parser.add_argument("--kv-slots", type=int, default=0, help="in this process; 0: from memory")
    parser.add_argument(
        "--generator-address", default="", help="HOST:PORT of a running stack's; else in-process"
    )
    parser.add_argument("--reward-address", default="127.0.0.1:50052")


def comma_separated(text: str) -> tuple[int, ...]:
    """Numbers by comma.

    Raises:
        ValueError: they are none.
    """
    return tuple(int(part) for part in text.split(","))


async def run(arguments: argparse.Namespace) -> None:
    """Collect what is missing."""
    settings = settings_of(arguments)
    items = read_prompts(arguments.prompts, arguments.limit)
    store = Store(arguments.out)
    left = missing(store, settings, items)
    if not left:
        return
    async with backends_of(arguments, settings.rewards) as backends:
        with shown(len(left), settings.n * settings.max_tokens) as watcher:
            await collect(store, settings, items, backends, watcher, arguments.chunk)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags ask for.

    Raises:
        ValueError: they are wrong.
    """
    rewards = (name.strip() for name in arguments.rewards.split(","))
    return Settings(
        n=arguments.n,
        max_tokens=arguments.max_tokens,
        grid=arguments.grid or default_grid(arguments.max_tokens),
        rewards=tuple(name for name in rewards if name and name != LIKELIHOOD),
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        stop=tuple(arguments.stop),
        min_tokens=arguments.min_tokens,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.seed,
    )


def backends_of(
    arguments: argparse.Namespace, rewards: Sequence[str]
) -> AbstractAsyncContextManager[Backends]:
    """Of the flags of `add_backends`."""
    if arguments.generator_address:
        return remote(rewards, arguments.generator_address, arguments.reward_address)
    return embedded(rewards, arguments.kv_slots)
