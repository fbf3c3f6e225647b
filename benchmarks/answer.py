"""Reward against seconds and tokens, one curve per system over N: `make bench-answer`.

All systems answer each prompt in turn, at every N, while the others are idle: same model, turns,
sampling, and seeds where a system takes them. One reward chooses answers, complete or not. The
services score prefixes with it while they generate; the same reward service scores the candidates
of peers, within their seconds. optillm chooses by ratings of its own. A second judge, which no
system optimises, scores the answers afterwards. A peer that cannot be installed or started, fails,
or takes more than --limit seconds for an answer is reported as not available.

Ctrl-C, or a failure, ends with a report of the answers so far; the same command continues with the
missing ones. Statistics are over the prompts that all systems answered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.answer_points import (
    HEADINGS,
    PAIRED_HEADINGS,
    Answer,
    Case,
    differences,
    paired_rows,
    points,
    table_rows,
    write_picture,
)
from benchmarks.answer_record import Record
from benchmarks.harness import MODEL, SETTLE_S, log, parse_arguments, print_table, report
from benchmarks.workers.engines import EngineSpec, answering_engines
from benchmarks.workers.process import WorkerError, WorkerProcess
from deploy.local.machine import describe_machine
from deploy.local.stack import Ports, Stack
from experiments.prompts import DEFAULT_PROMPTS, Item, read_prompts
from specrej import Client, Message, Prompt, SpecrejError
from specrej.client import RewardClient
from specrej.contracts import (
    Algorithm,
    Branching,
    CacheControl,
    GeneratorDescription,
    Options,
    RewardDescription,
)
from specrej.contracts.validation import MAX_BATCH

_LONG_TOKENS = 512


def _branching(n: int, max_tokens: int) -> Options:
    """Settings that docs/branching.md recommends for the length of the answers.

    An eighth of N goes on at a decision token, with forks up to half of N; for long answers a
    twelfth, with forks up to N that become fewer as rounds become longer.
    """
    if max_tokens >= _LONG_TOKENS:
        return Options(branching=Branching(n, max(1, n // 12), taper=1.0))
    return Options(branching=Branching(max(2, n // 2), max(1, n // 8)))


# Systems of this project: the options of their requests, by N and max_tokens.
OURS: Mapping[str, Callable[[int, int], Options]] = {
    "specrej": lambda *_: Options(),
    "specrej-branching": _branching,
    "specrej-best-of-n": lambda *_: Options(algorithm=Algorithm.BEST_OF_N),
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

    def __init__(
        self,
        spec: EngineSpec,
        server: Peer | None,
        limit_s: float,
        versions: dict[str, str] | None = None,
    ) -> None:
        """`server`: the peer whose server this one calls; `versions`: of its earlier answers."""
        self.spec = spec
        self.versions = {} if versions is None else versions
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
                versions = await asyncio.to_thread(self._worker.ready)
                if self.versions not in ({}, versions):
                    raise WorkerError(f"{versions} now, {self.versions} in earlier answers")
                self.versions.update(versions)
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
        """Add the missing answers to a prompt."""
        for name, n in self.missing(item):
            try:
                if name in self.prepare:
                    await self.prepare[name](item)
                await asyncio.sleep(self.settle_s)
                started = time.perf_counter()
                text, tokens = await self.systems[name](item, n, max_tokens)
                seconds = time.perf_counter() - started
                judges = await self.judge(item.prompt, text)
            except (WorkerError, SpecrejError) as error:
                self.unavailable[name, n] = str(error)
                log(f"{item.id}: {name} n={n} is not available: {error}")
                continue
            log(f"{item.id}: {name} n={n}: {seconds:.1f} s, {tokens} tokens, {judges[0]:.3f}")
            self.answers.append(Answer(name, n, item.id, seconds, tokens, *judges, text))

    def missing(self, item: Item) -> list[Case]:
        """Available cases whose turn it is, and which have not answered the prompt."""
        answered = {(a.system, a.n) for a in self.answers if a.prompt_id == item.id}
        return [
            (name, n)
            for name in self.systems
            if item.number % self.every.get(name, 1) == 0
            for n in self.ns[name]
            if (name, n) not in self.unavailable and (name, n) not in answered
        ]


def main() -> None:
    """Measure and report; an interruption or a failure ends with a report, too."""
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
        out=(Path("build/answer"), "files to write, without .json and .svg; a file is continued"),
    )
    sparse = SLOW if arguments.sparse > 1 else ()
    record = Record(_file(arguments, "json"), sparse)
    interrupted = False
    try:
        asyncio.run(_run(arguments, read_items([DEFAULT_PROMPTS, arguments.more]), record))
    except ValueError as error:
        sys.exit(f"bench-answer: {error}")
    except KeyboardInterrupt:
        interrupted = True
        log("interrupted: the same command continues")
    finally:
        if record.answers or record.unavailable:
            _report(arguments, record)
    sys.exit(130 if interrupted else int(any(name in OURS for name, _ in record.unavailable)))


def read_items(files: Sequence[Path]) -> list[Item]:
    """All prompts of the files that exist, each with a system turn.

    Raises:
        ValueError: a file is not valid.
    """
    items = []
    for item in read_prompts([path for path in files if path.exists()]):
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
    client: Client,
    own: Callable[[int, int], Options],
    reward: str,
    item: Item,
    n: int,
    max_tokens: int,
) -> tuple[str, int]:
    """An answer of this project's services, see `System`. Peers choose by the reward alone.

    Raises:
        SpecrejError: there is none.
    """
    request: Options = {
        **own(n, max_tokens),
        "rewards": {reward: 1.0},
        "prefer_complete": False,
        "n": n,
        "max_tokens": max_tokens,
        "seed": item.number,
        "cache": CacheControl.BYPASS,
    }
    generation = await client.generate(item.prompt, **request)
    return generation.best.text, generation.usage.generated_tokens


async def _run(arguments: argparse.Namespace, items: Sequence[Item], record: Record) -> None:
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
        # Stable: the reward that chooses is the first, the next one judges.
        judges = sorted(await rewards.describe(), key=lambda one: one.name != arguments.reward)
        model = (await client.describe()).generator
        _check_names(arguments, ns, judges, model)
        record.resume(_settings(arguments, items, model, judges))
        peers = _peers(arguments.limit, most, record)
        for peer in peers.values():
            exits.callback(peer.stop)
        systems = _systems(client, rewards, arguments.reward, peers)
        prepare = {
            name: partial(peer.prepare, rewards, arguments.reward) for name, peer in peers.items()
        }
        bench = Bench(
            {name: systems[name] for name in ns},
            ns,
            partial(_judge, rewards, [judge.name for judge in judges[:2]]),
            dict.fromkeys(SLOW, arguments.sparse),
            prepare,
            answers=record.answers,
            unavailable=record.unavailable,
        )
        items = items[: arguments.prompts]
        used = {name for item in items for name, _ in bench.missing(item)}
        first = {name: few[:1] for name, few in ns.items() if name in used}
        chosen = {name: systems[name] for name in first}
        warm_up = Bench(chosen, first, bench.judge, {}, prepare, unavailable=record.unavailable)
        await warm_up.answer(items[0], max_tokens=8)
        for item in items:
            await bench.answer(item, arguments.max_tokens)
            record.store()


def _check_names(
    arguments: argparse.Namespace,
    systems: Iterable[str],
    judges: Sequence[RewardDescription],
    model: GeneratorDescription,
) -> None:
    """Raises ValueError if a system, the reward, a second judge or the peers' model is missing."""
    rewards = [judge.name for judge in judges]
    for given, names in (([*systems], [*OURS, *PEERS]), ([arguments.reward], rewards)):
        if unknown := [name for name in given if name not in names]:
            raise ValueError(f"{unknown[0]}: must be one of {', '.join(names)}")
    if len(judges) < 2:
        raise ValueError("the services must serve two rewards: the second one judges")
    if model.model != MODEL.name and not set(PEERS).isdisjoint(systems):
        raise ValueError(f"the services answer with {model.model}, the peers with {MODEL.name}")


def _settings(
    arguments: argparse.Namespace,
    items: Sequence[Item],
    model: GeneratorDescription,
    judges: Sequence[RewardDescription],
) -> dict[str, Any]:
    """What all answers of a file have in common."""
    services = ("SPECREJ_GENERATOR_", "SPECREJ_ORCHESTRATOR_", "SPECREJ_REWARD_")
    environment = [item for item in os.environ.items() if item[0].startswith(services)]
    specs = answering_engines(MODEL, 0, _CONTEXT_TOKENS, most=0)
    return {
        "model": f"{model.model} {model.fingerprint}",
        "max_tokens": arguments.max_tokens,
        "reward": arguments.reward,
        "judges": [f"{judge.name} {judge.fingerprint}" for judge in judges[:2]],
        "systems": {name: str(own(64, arguments.max_tokens)) for name, own in OURS.items()}
        | {spec.name: spec.settings for spec in specs},
        "prompts": _digest(items),
        "environment": _digest(sorted(environment)),
        "machine": describe_machine(),
    }


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(repr([*values]).encode()).hexdigest()[:16]


async def _judge(
    rewards: RewardClient, names: Sequence[str], prompt: Prompt, text: str
) -> tuple[float, float]:
    """See `Judge`."""
    first, second = [await rewards.score(prompt, [text], reward=name) for name in names]
    return first.values[0], second.values[0]


def _peers(limit_s: float, most: int, record: Record) -> dict[str, Peer]:
    """All peers by name, for at most so many candidates; none is started yet."""
    server, *others = answering_engines(MODEL, Ports.free().orchestrator, _CONTEXT_TOKENS, most)
    versions = {spec.name: record.versions.setdefault(spec.name, {}) for spec in (server, *others)}
    peers = {server.name: Peer(server, None, limit_s, versions[server.name])}
    for spec in others:
        called = peers[server.name] if "url" in spec.options else None
        peers[spec.name] = Peer(spec, called, limit_s, versions[spec.name])
    return peers


def _systems(
    client: Client, rewards: RewardClient, reward: str, peers: Mapping[str, Peer]
) -> dict[str, System]:
    return {
        **{name: partial(_ours, client, own, reward) for name, own in OURS.items()},
        **{name: partial(peer.answer, rewards, reward) for name, peer in peers.items()},
    }


def _file(arguments: argparse.Namespace, kind: str) -> Path:
    """Not `with_suffix`, which would replace what follows a point in the name."""
    out: Path = arguments.out
    return out.with_name(f"{out.name}.{kind}")


def _report(arguments: argparse.Namespace, record: Record) -> None:
    """Write both files and print the tables."""
    record.store()
    result = record.result()
    measured, paired = points(record.compared), differences(record.compared)
    size = f"{result['prompts']} prompts, {arguments.max_tokens} new tokens"
    title = f"{size}, reward {arguments.reward}"
    write_picture(_file(arguments, "svg"), measured, title)
    if paired:
        against = f"difference from {paired[0].base}, paired by prompt"
        print_table(against, PAIRED_HEADINGS, paired_rows(paired))
    specs = answering_engines(MODEL, 0, _CONTEXT_TOKENS, most=0)
    settings = {spec.name: spec.settings for spec in specs}
    rows = table_rows(measured, settings, record.unavailable)
    report(f"{title}: means per answer", HEADINGS, rows, result)


if __name__ == "__main__":
    main()
