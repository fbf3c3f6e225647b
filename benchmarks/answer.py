"""Reward against seconds and tokens, one curve per system over N: `make bench-answer`.

All systems answer each prompt in turn, at every N, while the others are idle: same model, turns,
sampling, and seeds where a system takes them. One reward chooses answers, complete or not. The
services score prefixes with it while they generate; the same reward service scores the candidates
of peers, within their seconds. A second judge, which no system optimises, scores the answers
afterwards. A peer that cannot be started, fails, or takes more than --limit seconds for an answer
is reported as not available.

Ctrl-C, or a failure, ends with a report of the answers so far; the same command continues with the
missing ones. Statistics are over the prompts that all systems answered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
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

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.engines import Engine, WorkerError, WorkerProcess, answering
from benchmarks.harness import (
    MODEL,
    SETTLE_S,
    log,
    parse_arguments,
    print_table,
    provenance,
    report,
)
from deploy.local.machine import describe_machine
from deploy.local.stack import Ports, Stack
from experiments.prompts import DEFAULT_PROMPTS, Item, read_prompts
from experiments.statistics import mean
from specrej import Client, Message, Prompt, SpecrejError
from specrej.client import RewardClient
from specrej.contracts import Algorithm, Branching, CacheControl, Options
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
PEERS = ("vllm", "its_hub")
# Of the embedded model's chat template, which adds it to a conversation without one. Sent to all
# systems, so that all get the same turns.
SYSTEM_TURN = Message(
    "system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
_CONTEXT_TOKENS = 2048
_TIMEOUT_S = 3600.0
_KEY = ["system", "n"]

# The answer to a prompt with n candidates of at most so many tokens, and all generated tokens.
# Raises WorkerError or SpecrejError: there is none; the text has the reason.
System = Callable[[Item, int, int], Awaitable[tuple[str, int]]]
# Reward and second judge of an answer.
Judge = Callable[[Prompt, str], Awaitable[tuple[float, float]]]


class Peer:
    """A worker process, started before its first answer and again after a failure."""

    def __init__(
        self,
        engine: Engine,
        server: Peer | None,
        limit_s: float,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`server`: the peer whose server this one calls; `versions`: of its earlier answers."""
        self.engine = engine
        self.versions = dict(versions or {})
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
        message: dict[str, Any] = {"turns": turns, "n": n, "max_tokens": max_tokens}
        message["seed"] = item.number
        try:
            reply = await asyncio.to_thread(worker.exchange, message, until)
            while texts := reply.get("score"):
                scores = await rewards.score(item.prompt, texts, reward=reward)
                message = {"scores": [*scores.values]}
                reply = await asyncio.to_thread(worker.exchange, message, until)
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
            log(f"starting {self.engine.name}")
            try:
                self._worker = self.engine.start(len(os.sched_getaffinity(0)))
                versions = await asyncio.to_thread(self._worker.ready)
                if self.versions not in ({}, versions):
                    raise WorkerError(f"{versions} now, {self.versions} in earlier answers")
                self.versions = versions
            except WorkerError as error:
                self.stop()
                self._missing = f"{self.engine.name} does not start: {error}"
                raise WorkerError(self._missing) from error
        return self._worker


@dataclass(slots=True)
class Record:
    """All answers of one file, and the reasons of systems at some N that are not available.

    settings: what all answers have in common. answers: lines with system, n, prompt_id, seconds,
    tokens (all that were generated), reward, second_judge and text.
    """

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    unavailable: dict[tuple[str, int], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def resume(self, settings: Mapping[str, Any]) -> None:
        """Continue the file, if it exists; what was not available is tried again.

        Raises:
            ValueError: it has other settings, or is not JSON.
        """
        self.settings = settings
        if not self.path.exists():
            return
        try:
            stored = json.loads(self.path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON: {error}; move it away") from None
        theirs = stored.get("settings", {})
        if other := [name for name in settings if theirs.get(name) != settings[name]]:
            do = "move it away, or choose another --out"
            raise ValueError(f"{self.path} has answers with another {', '.join(other)}: {do}")
        self.answers += stored["answers"]
        self.versions |= stored["versions"]

    def compared(self) -> pd.DataFrame:
        """The answers to prompts that every available system answered at every N."""
        frame = pd.DataFrame(self.answers, columns=[*self.answers[0]] if self.answers else _KEY)
        keys = [*zip(frame["system"], frame["n"], strict=True)]
        return common([key not in self.unavailable for key in keys], frame)

    def store(self) -> None:
        """Write the result and all answers in one step: an interruption leaves a whole file."""
        content = {
            **self.result(),
            **provenance(),
            "reward": self.settings["reward"],
            "settings": self.settings,
            "versions": self.versions,
            "answers": self.answers,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        new.replace(self.path)

    def result(self) -> dict[str, Any]:
        """The content of the JSON line."""
        compared = self.compared()
        tables = {"points": points(compared), "paired": differences(compared)}
        lines = {name: json.loads(of.to_json(orient="records")) for name, of in tables.items()}
        why = {f"{name} n={n}": reason for (name, n), reason in self.unavailable.items()}
        size = compared.prompt_id.nunique() if len(compared) else 0
        about = {"prompts": size, "max_tokens": self.settings["max_tokens"]}
        return about | lines | {"unavailable": why}


def common(is_kept: Sequence[bool], answers: pd.DataFrame) -> pd.DataFrame:
    """The kept answers to prompts that every system in them answered at every N."""
    kept = answers[is_kept]
    if kept.empty:
        return kept
    num_cases = len(kept[_KEY].drop_duplicates())
    return kept[kept.groupby("prompt_id")["n"].transform("size") == num_cases]


def points(answers: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts by system and N, in order of their first answers."""
    rows = []
    for (system, n), of in answers.groupby(_KEY, sort=False):
        row = {
            **{"system": system, "n": int(n), "prompts": len(of)},
            "seconds": round(of.seconds.mean(), 3),
            "tokens": round(of.tokens.mean(), 1),
            **_interval("reward", of.reward),
            "second_judge": round(of.second_judge.mean(), 5),
            "words": round(of.text.str.split().str.len().mean(), 1),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def differences(answers: pd.DataFrame, base: str = "vllm") -> pd.DataFrame:
    """Each system at each N against the largest N of `base`, paired by prompt; quotients of sums.

    Empty without answers of `base`.
    """
    theirs = answers[answers["system"] == base]
    if theirs.empty:
        return theirs
    most = int(theirs.n.max())
    theirs = theirs[theirs.n == most].set_index("prompt_id")
    rows = []
    for (system, n), of in answers.groupby(_KEY, sort=False):
        own = of.set_index("prompt_id")
        shared = own.index.intersection(theirs.index)
        if (system, n) != (base, most) and len(shared):
            ours, other = own.loc[shared], theirs.loc[shared]
            row = {
                "system": system,
                "n": int(n),
                "base": f"{base} n={most}",
                "prompts": len(shared),
            }
            for judge in ("reward", "second_judge"):
                row |= _interval(judge, ours[judge] - other[judge])
            for cost in ("seconds", "tokens"):
                row[f"{cost}_ratio"] = round(float(ours[cost].sum() / other[cost].sum()), 4)
            rows.append(row)
    return pd.DataFrame(rows)


def _interval(name: str, values: Any) -> dict[str, float]:
    """The mean and its 95 % interval over prompts; NaN for fewer than four."""
    of = mean(values)
    ends = {name: of.value, f"{name}_low": of.low, f"{name}_high": of.high}
    return {key: round(value, 5) for key, value in ends.items()}


@dataclass(slots=True)
class Bench:
    """Answers of all systems at each of their N."""

    systems: Mapping[str, System]
    ns: Mapping[str, Sequence[int]]  # of each system
    judge: Judge
    record: Record
    prepare: Mapping[str, Callable[[Item], Awaitable[None]]] = field(default_factory=dict)
    settle_s: float = SETTLE_S

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
                reward, second = await self.judge(item.prompt, text)
            except (WorkerError, SpecrejError) as error:
                self.record.unavailable[name, n] = str(error)
                log(f"{item.id}: {name} n={n} is not available: {error}")
                continue
            log(f"{item.id}: {name} n={n}: {seconds:.1f} s, {tokens} tokens, {reward:.3f}")
            line = {"system": name, "n": n, "prompt_id": item.id, "seconds": seconds}
            judged = {"tokens": tokens, "reward": reward, "second_judge": second, "text": text}
            self.record.answers.append(line | judged)

    def missing(self, item: Item) -> list[tuple[str, int]]:
        """Available systems and their N which have not answered the prompt."""
        answers = self.record.answers
        answered = {(a["system"], a["n"]) for a in answers if a["prompt_id"] == item.id}
        cases = [(name, n) for name in self.systems for n in self.ns[name]]
        return [case for case in cases if case not in {*self.record.unavailable, *answered}]


def main() -> None:
    """Measure and report; an interruption or a failure ends with a report, too."""
    arguments = parse_arguments(
        __doc__,
        prompts=(100, "most prompts: those of experiments, then those of --more"),
        n=("4,16,64", "candidates, comma-separated"),
        max_tokens=(128, "most new tokens per candidate"),
        systems=(",".join((*OURS, *PEERS)), "comma-separated; vllm=16+64 replaces --n"),
        reward=("relevance", "the reward that chooses; the next one served is the second judge"),
        limit=(120.0, "most seconds for an answer of a peer"),
        more=(Path("../shared/data/alpaca_farm_60.json"), "more prompts, if the file exists"),
        out=(Path("build/answer"), "files to write, without .json and .svg; a file is continued"),
    )
    record = Record(_file(arguments, "json"))
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
        ValueError: a part is not a number in range, or a system is unknown or occurs twice.
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
        if name not in (*OURS, *PEERS):
            raise ValueError(f"unknown system {name}; available: {', '.join((*OURS, *PEERS))}")
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
    """An answer of this project's services, see `System`. Peers choose by the reward alone."""
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
        if len(judges) < 2 or judges[0].name != arguments.reward:
            names = ", ".join(judge.name for judge in judges)
            raise ValueError(f"needs the reward {arguments.reward} and a second one; has {names}")
        if model.model != MODEL.name and not {*PEERS}.isdisjoint(ns):
            raise ValueError(f"services answer with {model.model}, the peers with {MODEL.name}")
        of_judges = [f"{judge.name} {judge.fingerprint}" for judge in judges[:2]]
        record.resume(_settings(arguments, items, f"{model.model} {model.fingerprint}", of_judges))
        peers = _peers(arguments.limit, most, record.versions)
        for peer in peers.values():
            exits.callback(peer.stop)
        systems: dict[str, System] = {
            **{name: partial(_ours, client, own, arguments.reward) for name, own in OURS.items()},
            **{n: partial(peer.answer, rewards, arguments.reward) for n, peer in peers.items()},
        }
        prepare = {n: partial(peer.prepare, rewards, arguments.reward) for n, peer in peers.items()}
        judge = partial(_judge, rewards, [judge.name for judge in judges[:2]])
        bench = Bench({name: systems[name] for name in ns}, ns, judge, record, prepare)
        items = items[: arguments.prompts]
        used = {name for item in items for name, _ in bench.missing(item)}
        first = {name: few[:1] for name, few in ns.items() if name in used}
        warm = Record(record.path, unavailable=record.unavailable)
        warm_up = Bench({name: systems[name] for name in first}, first, judge, warm, prepare)
        await warm_up.answer(items[0], max_tokens=8)
        for item in items:
            await bench.answer(item, arguments.max_tokens)
            record.versions |= {n: peer.versions for n, peer in peers.items() if peer.versions}
            record.store()


def _settings(
    arguments: argparse.Namespace, items: Sequence[Item], model: str, judges: Sequence[str]
) -> dict[str, Any]:
    """What all answers of a file have in common."""
    services = ("SPECREJ_GENERATOR_", "SPECREJ_ORCHESTRATOR_", "SPECREJ_REWARD_")
    environment = [item for item in os.environ.items() if item[0].startswith(services)]
    peers = answering(MODEL, 0, _CONTEXT_TOKENS, most=0)
    return {
        "model": model,
        "max_tokens": arguments.max_tokens,
        "reward": arguments.reward,
        "judges": [*judges],
        "systems": {name: str(own(64, arguments.max_tokens)) for name, own in OURS.items()}
        | {peer.name: peer.settings for peer in peers},
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


def _peers(limit_s: float, most: int, versions: Mapping[str, Mapping[str, str]]) -> dict[str, Peer]:
    """All peers by name, for at most so many candidates; none is started yet."""
    server, *others = answering(MODEL, Ports.free().orchestrator, _CONTEXT_TOKENS, most)
    first = Peer(server, None, limit_s, versions.get(server.name))
    rest = {peer.name: Peer(peer, first, limit_s, versions.get(peer.name)) for peer in others}
    return {server.name: first, **rest}


def _file(arguments: argparse.Namespace, kind: str) -> Path:
    """Not `with_suffix`, which would replace what follows a point in the name."""
    out: Path = arguments.out
    return out.with_name(f"{out.name}.{kind}")


def _report(arguments: argparse.Namespace, record: Record) -> None:
    """Write both files and print the tables."""
    record.store()
    compared = record.compared()
    measured, paired = points(compared), differences(compared)
    result = record.result()
    title = f"{result['prompts']} prompts, {arguments.max_tokens} new tokens, {arguments.reward}"
    if len(measured):
        write_picture(_file(arguments, "svg"), measured, title)
    if len(paired):
        print_table("paired by prompt", [*paired], paired.to_numpy())
    notes = [f"{name} n={n}: {why}" for (name, n), why in record.unavailable.items()]
    report(f"{title}: means per answer", [*measured], measured.to_numpy(), result, notes)


def write_picture(path: Path, measured: pd.DataFrame, title: str) -> None:
    """Write an SVG file: means with 95 % intervals over prompts; every point has its N."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    by_seconds, by_tokens = figure.subplots(1, 2, sharey=True)
    for axes, cost in ((by_seconds, "seconds"), (by_tokens, "tokens")):
        for number, (system, of) in enumerate(measured.groupby("system", sort=False)):
            curve, color = of.sort_values("n"), f"C{number}"
            axes.plot(curve[cost], curve.reward, f"{color}o-", markersize=4, label=system)
            low, high = (curve[f"reward_{end}"].fillna(curve.reward) for end in ("low", "high"))
            axes.vlines(curve[cost], low, high, color, linewidth=1, alpha=0.6)
            for n, at, reward in zip(curve.n, curve[cost], curve.reward, strict=True):
                axes.annotate(f" {n}", (at, reward), color=color, va="top")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(f"{cost} per answer")
        axes.grid(alpha=0.3)
    by_seconds.set_ylabel("reward of the answer")
    by_tokens.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    style: Any = {"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
