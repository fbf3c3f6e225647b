"""Reward against seconds and tokens, one curve per system over N: `make bench-answer`.

All systems answer each prompt in turn, at every N, while the others are idle: same model, turns,
sampling, and seeds where a system takes them. One reward chooses answers, complete or not. The
services score prefixes with it while they generate; the same reward service scores the candidates
of peers, within their seconds. optillm chooses by ratings of its own. A second judge, which no
system optimises, scores the answers afterwards. A peer that cannot be installed or started, fails,
or takes more than --limit seconds for an answer is reported as not available.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.answer_points import HEADINGS, Answer, Case, points, table_rows, write_picture
from benchmarks.harness import MODEL, SETTLE_S, log, parse_arguments, report
from benchmarks.workers.engines import EngineSpec, answering_engines
from benchmarks.workers.process import WorkerError, WorkerProcess
from deploy.local.machine import describe_machine
from deploy.local.stack import Ports, Stack
from experiments.prompts import DEFAULT_PROMPTS, Item, read_prompts
from specrej import Client, Message, Prompt, SpecrejError
from specrej.client import Options, RewardClient
from specrej.contracts import Algorithm, Branching, CacheControl
from specrej.limits import MAX_BATCH

# Systems of this project: the options of their requests, by N.
OURS: Mapping[str, Callable[[int], Options]] = {
    "specrej": lambda n: Options(),
    # An eighth of N goes on at a decision token, with forks up to half of N.
    "specrej-branching": lambda n: Options(branching=Branching(max(2, n // 2), max(1, n // 8))),
    "specrej-best-of-n": lambda n: Options(algorithm=Algorithm.BEST_OF_N),
}
PEERS = ("vllm", "its_hub", "optillm", "transformers")
# Peers that take minutes for an answer; they answer one prompt in --sparse.
SLOW = ("optillm", "transformers")
# Of the embedded model's chat template, which adds it to a conversation without one. Sent to all
# systems, since optillm always sends a system turn.
SYSTEM_TURN = Message(
    "system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
# optillm's ratings add a candidate, 256 tokens and some text to the longest prompt.
_CONTEXT_TOKENS = 2048
_TIMEOUT_S = 3600.0

# The answer to a prompt with n candidates of at most so many tokens, and all generated tokens.
# Raises WorkerError: there is none; the text has the reason.
System = Callable[[Item, int, int], Awaitable[tuple[str, int]]]
# Reward and second judge of an answer.
Judge = Callable[[Prompt, str], Awaitable[tuple[float, float]]]


class Peer:
    """A worker process, started before its first answer and again after a failure."""

    def __init__(self, spec: EngineSpec, server: Peer | None, limit_s: float) -> None:
        """`server`: the peer whose server this one calls."""
        self.spec = spec
        self.versions: dict[str, str] = {}
        self._server = server
        self._limit_s = limit_s
        self._worker: WorkerProcess | None = None
        self._missing = ""  # the reason

    async def answer(
        self, rewards: RewardClient, reward: str, item: Item, n: int, max_tokens: int
    ) -> tuple[str, int]:
        """See `System`; `reward` chooses."""
        worker = await self._ready()
        until = time.monotonic() + self._limit_s
        turns = [asdict(turn) for turn in item.prompt.turns]
        request = {"turns": turns, "n": n, "max_tokens": max_tokens, "seed": item.number}
        try:
            reply = await asyncio.to_thread(worker.exchange, request, until)
            while texts := reply.get("score"):
                scores = await rewards.score(item.prompt, texts, reward=reward)
                reply = await asyncio.to_thread(
                    worker.exchange, {"scores": [*scores.values]}, until
                )
        except (WorkerError, SpecrejError) as error:
            self.stop()
            raise WorkerError(f"{error}") from error
        return reply["text"], reply["tokens"]

    async def prepare(self, rewards: RewardClient, reward: str, item: Item) -> None:
        """Start and warm up what does not run, so that it is not part of the next answer's seconds.

        Raises:
            WorkerError: it cannot be started, or fails.
        """
        if self._server:
            await self._server.prepare(rewards, reward, item)
        if self._worker is None:
            await self.answer(rewards, reward, item, 1, max_tokens=8)

    def stop(self) -> None:
        """Kill the process, if there is one."""
        if self._worker:
            self._worker.stop()
            self._worker = None

    async def _ready(self) -> WorkerProcess:
        if self._missing:
            raise WorkerError(self._missing)
        if self._worker is None:
            log(f"starting {self.spec.name}")
            try:
                self._worker = self.spec.start(len(os.sched_getaffinity(0)))
                self.versions = await asyncio.to_thread(self._worker.ready)
            except WorkerError as error:
                self.stop()
                self._missing = f"{self.spec.name} does not start: {error}"
                raise WorkerError(self._missing) from error
        return self._worker


@dataclass(slots=True)
class Bench:
    """Answers of all systems at each of their N, and the reasons of those not available."""

    systems: Mapping[str, System]
    ns: Mapping[str, Sequence[int]]  # of each system
    judge: Judge
    every: Mapping[str, int] = field(default_factory=dict)  # answers one prompt in so many
    prepare: Mapping[str, Callable[[Item], Awaitable[None]]] = field(default_factory=dict)
    settle_s: float = SETTLE_S
    answers: list[Answer] = field(default_factory=list)
    unavailable: dict[Case, str] = field(default_factory=dict)

    async def answer(self, item: Item, max_tokens: int) -> None:
        """Add an answer of every system whose turn it is, at every N that is available."""
        for name, system in self.systems.items():
            for n in self.ns[name]:
                if (name, n) in self.unavailable or item.number % self.every.get(name, 1):
                    continue
                try:
                    if name in self.prepare:
                        await self.prepare[name](item)
                    await asyncio.sleep(self.settle_s)
                    started = time.perf_counter()
                    text, tokens = await system(item, n, max_tokens)
                    seconds = time.perf_counter() - started
                    judges = await self.judge(item.prompt, text)
                except (WorkerError, SpecrejError) as error:
                    self.unavailable[name, n] = str(error)
                    log(f"{item.id}: {name} n={n} is not available: {error}")
                    continue
                log(f"{item.id}: {name} n={n}: {seconds:.1f} s, {tokens} tokens, {judges[0]:.3f}")
                self.answers.append(Answer(name, n, item.id, seconds, tokens, *judges, text))


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        prompts=(100, "most prompts: those of experiments, then those of --more"),
        n=("4,16,64", "candidates, comma-separated"),
        max_tokens=(128, "most new tokens per candidate"),
        systems=(
            ",".join((*OURS, *PEERS)),
            "comma-separated; vllm=16+64 replaces --n",
        ),
        reward=("relevance", "the reward that chooses; the next one served is the second judge"),
        limit=(120.0, "most seconds for an answer of a peer"),
        sparse=(8, f"{' and '.join(SLOW)} answer one prompt in so many"),
        more=(Path("../shared/data/alpaca_farm_60.json"), "more prompts, if the file exists"),
        out=(Path("build/answer"), "files to write, without .json and .svg"),
    )
    try:
        items = read_items([DEFAULT_PROMPTS, arguments.more], arguments.prompts)
        bench = asyncio.run(_run(arguments, items))
    except ValueError as error:
        sys.exit(f"bench-answer: {error}")
    measured = points(bench.answers, bench.unavailable)
    title = f"{len(items)} prompts, {arguments.max_tokens} new tokens, reward {arguments.reward}"
    write_picture(_file(arguments, "svg"), measured, title)
    specs = answering_engines(MODEL, 0, _CONTEXT_TOKENS, most=0)
    rows = table_rows(measured, {spec.name: spec.settings for spec in specs}, bench.unavailable)
    report(f"{title}: means per answer", HEADINGS, rows, _result(arguments, len(items), bench))
    sys.exit(int(any(name in OURS for name, _ in bench.unavailable)))


def read_items(files: Sequence[Path], most: int) -> list[Item]:
    """The first prompts of the files that exist, each with a system turn.

    Raises:
        ValueError: a file is not valid.
    """
    items = []
    for item in read_prompts([path for path in files if path.exists()], most):
        turns = item.prompt.turns
        system = () if turns[0].role == "system" else (SYSTEM_TURN,)
        items.append(replace(item, prompt=Prompt(messages=(*system, *turns))))
    return items


def parse_systems(systems: str, n: str) -> dict[str, list[int]]:
    """Ascending N of each system: its own, or those of --n.

    Raises:
        ValueError: a part is no number in range, or a system occurs twice.
    """
    chosen: dict[str, list[int]] = {}
    for system in systems.split(","):
        name, _, own = system.partition("=")
        parts = own.split("+") if own else n.split(",")
        if not all(part.isdecimal() and 1 <= int(part) <= MAX_BATCH for part in parts):
            text = f"--systems {system}" if own else f"--n {n}"
            raise ValueError(f"{text}: each number of candidates must be 1 .. {MAX_BATCH}")
        if name in chosen:
            raise ValueError(f"--systems: {name} occurs twice; join its numbers by +")
        chosen[name] = sorted({int(part) for part in parts})
    return chosen


async def _ours(
    client: Client, own: Callable[[int], Options], reward: str, item: Item, n: int, max_tokens: int
) -> tuple[str, int]:
    """An answer of this project's services, see `System`. Peers choose by the reward alone.

    Raises:
        SpecrejError: there is none.
    """
    request: Options = {
        **own(n),
        "rewards": {reward: 1.0},
        "prefer_complete": False,
        "n": n,
        "max_tokens": max_tokens,
        "seed": item.number,
        "cache": CacheControl.BYPASS,
    }
    generation = await client.generate(item.prompt, **request)
    return generation.best.text, generation.usage.generated_tokens


async def _run(arguments: argparse.Namespace, items: Sequence[Item]) -> Bench:
    """Start the services, let all systems answer all prompts, store answers after each prompt."""
    ns = parse_systems(arguments.systems, arguments.n)
    most = max(map(max, ns.values()))
    slots = most * arguments.max_tokens + 8 * _CONTEXT_TOKENS
    environment = {"SPECREJ_GENERATOR_KV_SLOTS": str(slots)}
    async with (
        Stack(environment=environment) as stack,
        Client(stack.orchestrator_address, timeout_s=_TIMEOUT_S) as client,
        RewardClient(stack.reward_address, timeout_s=_TIMEOUT_S) as rewards,
        AsyncExitStack() as exits,
    ):
        peers = _peers(arguments.limit, most)
        for peer in peers.values():
            exits.callback(peer.stop)
        judges = [reward.name for reward in await rewards.describe()]
        judges.sort(key=lambda name: name != arguments.reward)  # stable: it is the first
        systems = _systems(client, rewards, arguments.reward, peers)
        for given, known in (([*ns], [*systems]), ([arguments.reward], judges)):
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"{unknown[0]}: must be one of {', '.join(known)}")
        if len(judges) < 2:
            raise ValueError("the services must serve two rewards: the second one judges")
        model = (await client.describe()).generator.model
        if model != MODEL.name and not ns.keys().isdisjoint(PEERS):
            raise ValueError(f"the services answer with {model}, the peers with {MODEL.name}")

        async def judge(prompt: Prompt, text: str) -> tuple[float, float]:
            both = [await rewards.score(prompt, [text], reward=name) for name in judges[:2]]
            return both[0].values[0], both[1].values[0]

        chosen = {name: systems[name] for name in ns}
        prepare = {
            name: partial(peer.prepare, rewards, arguments.reward) for name, peer in peers.items()
        }
        warm_up = Bench(chosen, {name: few[:1] for name, few in ns.items()}, judge, prepare=prepare)
        await warm_up.answer(items[0], max_tokens=8)
        every = dict.fromkeys(SLOW, arguments.sparse)
        bench = Bench(chosen, ns, judge, every, prepare, unavailable=warm_up.unavailable)
        for number, item in enumerate(items, start=1):
            await bench.answer(item, arguments.max_tokens)
            _store(arguments, number, bench, peers)
    return bench


def _peers(limit_s: float, most: int) -> dict[str, Peer]:
    """All peers by name, for at most so many candidates; none is started yet."""
    server, *others = answering_engines(MODEL, Ports.free().orchestrator, _CONTEXT_TOKENS, most)
    peers = {server.name: Peer(server, None, limit_s)}
    for spec in others:
        called = peers[server.name] if "url" in spec.options else None
        peers[spec.name] = Peer(spec, called, limit_s)
    return peers


def _systems(
    client: Client, rewards: RewardClient, reward: str, peers: Mapping[str, Peer]
) -> dict[str, System]:
    return {
        **{name: partial(_ours, client, own, reward) for name, own in OURS.items()},
        **{name: partial(peer.answer, rewards, reward) for name, peer in peers.items()},
    }


def _result(arguments: argparse.Namespace, num_prompts: int, bench: Bench) -> dict[str, Any]:
    """The content of the JSON line."""
    measured = points(bench.answers, bench.unavailable)
    size = {"prompts": num_prompts, "max_tokens": arguments.max_tokens}
    unavailable = {f"{name} n={n}": why for (name, n), why in bench.unavailable.items()}
    return {
        **size,
        "points": [asdict(point) for point in measured],
        "unavailable": unavailable,
    }


def _file(arguments: argparse.Namespace, kind: str) -> Path:
    """Not `with_suffix`, which would replace what follows a point in the name."""
    out: Path = arguments.out
    return out.with_name(f"{out.name}.{kind}")


def _store(
    arguments: argparse.Namespace, num_prompts: int, bench: Bench, peers: Mapping[str, Peer]
) -> None:
    """Write the result so far, with all answers."""
    result = {
        **_result(arguments, num_prompts, bench),
        **describe_machine(),
        "reward": arguments.reward,
        "versions": {name: peer.versions for name, peer in peers.items()},
        "answers": [asdict(answer) for answer in bench.answers],
    }
    path = _file(arguments, "json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
