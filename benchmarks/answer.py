"""Reward against seconds and tokens, one curve per system over N: `make bench-answer`.

All systems answer each prompt in turn, at every N, while the others are idle: same model, turns,
sampling, and seeds where a system takes them. One reward chooses answers, complete or not. The
services score prefixes with it while they generate; the same reward service scores the candidates
of a peer's server, vLLM's or llama.cpp's, within its seconds. A second judge, which no system
optimises, scores the answers afterwards. With --callers it measures answers per second instead,
while so many callers wait for answers at the same time.

Ctrl-C, or a failure, ends with a report of the answers so far; the same command continues with the
missing ones. Statistics are over the prompts that all systems answered.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pandas as pd

from benchmarks.harness import log, parse_arguments, print_table, provenance, report
from deploy.local.machine import describe_machine
from deploy.local.stack import Stack
from experiments.pictures import draw
from experiments.statistics import Estimate, mean
from orchestrator.loop.composition import LIKELIHOOD
from specrej import Client, Message, Prompt
from specrej.contracts import Algorithm, Branching, CacheControl, Options
from tests.servers.starting import MODEL, llama_server, vllm_server

PROMPTS = Path("experiments/prompts.jsonl")
_BUILD = Path("build/answer-vllm").absolute()
_VLLM_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(_BUILD / "vllm"),
    "TORCHINDUCTOR_CACHE_DIR": str(_BUILD / "inductor"),
    # One process: with two, the idle one polls while other systems are measured.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # This version cannot load what it stores.
    "VLLM_USE_AOT_COMPILE": "0",
    # Recommended by vLLM's manual, with the settings of its own launcher. Idle threads sleep after
    # 5 ms and take no time from the next system.
    "LD_PRELOAD": str(Path(".vllm/lib/libiomp5.so").absolute()),
    "KMP_BLOCKTIME": "5",
    "KMP_TPAUSE": "0",
}
# Rows of a step in vLLM at least; with more candidates all are in one step, as in ours.
_VLLM_ROWS = 256
# OpenMP's threads spin for up to a fifth of a second after work before they sleep.
_SETTLE_S = 0.3
_LONG_TOKENS = 512


def _branching(n: int, max_tokens: int) -> Options:
    """Settings that docs/choosing.md#branching recommends for the length of the answers.

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
# The same with the peer's server behind the generator.
ENDPOINT = {name.replace("specrej", "specrej-endpoint", 1): name for name in OURS}
PEERS = ("vllm", "llama.cpp")
# Of the embedded model's chat template, which adds it to a conversation without one. Sent to all
# systems, so that all get the same turns.
SYSTEM_TURN = Message(
    "system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
_CONTEXT_TOKENS = 2048
_TIMEOUT_S = 3600.0
_KEY = ["system", "n"]
ENDS = ("", "_low", "_high")  # of a mean and its interval

# Reward and second judge of an answer.
Judge = Callable[[Prompt, str], Awaitable[tuple[float, float]]]


class Item(NamedTuple):
    """A prompt; `number` is its index, and the seed."""

    id: str
    number: int
    prompt: Prompt


class Answer(NamedTuple):
    """The best candidate, all generated tokens, and prompt tokens that were computed, if known."""

    text: str
    tokens: int
    prefilled: int = 0


# The best of n candidates of at most max_tokens, of a prompt, n and max_tokens.
System = Callable[[Item, int, int], Awaitable[Answer]]


async def ask_services(
    client: Client,
    options: Callable[[int, int], Options],
    reward: str,
    item: Item,
    n: int,
    max_tokens: int,
) -> Answer:
    """A `System`: the services of this project; by default they choose as the peer does."""
    request: Options = {
        **options(n, max_tokens),
        "rewards": {reward: 1.0},
        "n": n,
        "max_tokens": max_tokens,
        "seed": item.number,
        "cache": CacheControl.BYPASS,
    }
    generation = await client.generate(item.prompt, **request)
    usage = generation.usage
    tokens = usage.generated_tokens + usage.discarded_tokens
    return Answer(generation.best.text, tokens, usage.prefilled_tokens)


async def ask_peer(
    http: httpx.AsyncClient, rewards: Client, reward: str, item: Item, n: int, max_tokens: int
) -> Answer:
    """A `System`: a server with OpenAI's API; `reward` chooses."""
    turns = [asdict(turn) for turn in item.prompt.turns]
    sampling = {"n": n, "max_tokens": max_tokens, "seed": item.number, "temperature": 1.0}
    body = {"model": "model", "messages": turns, **sampling}
    response = await http.post("/v1/chat/completions", json=body)
    reply = response.raise_for_status().json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    scores = await rewards.score(item.prompt, texts, reward=reward)
    best = max(zip(scores.values, texts, strict=True))[1]
    usage = reply["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(best, usage["completion_tokens"], usage["prompt_tokens"] - cached)


def _server(peer: str, most: int) -> AbstractAsyncContextManager[str]:
    """The base URL, without /v1, of a peer's server; a request has at most `most` candidates."""
    if peer == PEERS[1]:  # its slots share the KV; prompts are short
        return llama_server(slots=most, tokens=most * _CONTEXT_TOKENS // 4, name="model")
    flags = (
        *("--served-model-name=model", f"--max-num-seqs={max(_VLLM_ROWS, most)}"),
        # Without the model's own sampling: draws from the whole vocabulary, as the others do.
        "--generation-config=vllm",
        # On CPUs the server ends when a seeded request has read a part of its prompt.
        *("--no-enable-chunked-prefill", f"--max-num-batched-tokens={_CONTEXT_TOKENS}"),
    )
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    return vllm_server(*flags, kv_gib=4, is_eager=False, **threads, **_VLLM_ENVIRONMENT)


@dataclass(slots=True)
class Record:
    """All answers of one file.

    settings: what all answers have in common. answers: lines with system, n, prompt_id, seed,
    seconds, tokens (all that were generated), prefilled (of prompts, computed), reward,
    second_judge and text. load: lines of answers while callers wait, in place of single ones.
    """

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    load: list[dict[str, Any]] = field(default_factory=list)

    def resume(self, settings: Mapping[str, Any]) -> None:
        """Continue the file, if it exists.

        Raises:
            ValueError: it has other settings.
        """
        self.settings = settings
        if not self.path.exists():
            return
        stored = json.loads(self.path.read_text("utf-8"))
        theirs = stored.get("settings", {})
        if other := [name for name in settings if theirs.get(name) != settings[name]]:
            do = "move it away, or choose another --out"
            raise ValueError(f"{self.path} has answers with another {', '.join(other)}: {do}")
        self.answers += stored["answers"]

    def compared(self) -> pd.DataFrame:
        """The answers to prompts that every system answered at every N, with the same seed."""
        frame = pd.DataFrame(self.answers)
        num_cases = len(frame[_KEY].drop_duplicates())
        return frame[frame.groupby(["prompt_id", "seed"])["n"].transform("size") == num_cases]

    def store(self) -> None:
        """Write the result and all answers in one step: an interruption leaves a whole file."""
        about = {**provenance(), "settings": self.settings, "answers": self.answers}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps({**self.result(), **about}, indent=1) + "\n", "utf-8")
        new.replace(self.path)

    def result(self) -> dict[str, Any]:
        """The content of the JSON line."""
        compared = self.compared()
        tables = {"points": points(compared), "paired": differences(compared)}
        lines = {name: json.loads(of.to_json(orient="records")) for name, of in tables.items()}
        size = compared.prompt_id.nunique()
        return {"prompts": size, "max_tokens": self.settings["max_tokens"]} | lines


def points(answers: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts by system and N, in order of their first answers."""
    rows = []
    for (system, n), of in _of_prompts(answers).groupby(_KEY, sort=False):
        row = {
            **{"system": system, "n": int(n), "prompts": len(of)},
            "seconds": round(of.seconds.mean(), 3),
            "tokens": round(of.tokens.mean(), 1),
            "prefilled": round(of.prefilled.mean(), 1),
            **_interval("reward", of.reward),
            "second_judge": round(of.second_judge.mean(), 5),
            "words": round(of.words.mean(), 1),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def differences(answers: pd.DataFrame) -> pd.DataFrame:
    """Each system at each N against the peer's largest N, paired by prompt; quotients of sums.

    Without answers of a peer, against Best-of-N before its server; empty without these, too.
    """
    answers, bases = _of_prompts(answers), (*PEERS, "specrej-endpoint-best-of-n")
    base = next((name for name in bases if name in {*answers["system"]}), "")
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
            row = {"system": system, "n": int(n), "base": f"{base} n={most}"}
            row["prompts"] = len(shared)
            for judge in ("reward", "second_judge"):
                row |= _interval(judge, ours[judge] - other[judge])
            for cost in ("seconds", "tokens"):
                row[f"{cost}_ratio"] = round(float(ours[cost].sum() / other[cost].sum()), 4)
            rows.append(row)
    return pd.DataFrame(rows)


def _of_prompts(answers: pd.DataFrame) -> pd.DataFrame:
    """The means of each prompt's answers by system and N."""
    counted = answers.assign(words=answers.text.str.split().str.len()).drop(columns="text")
    return counted.groupby([*_KEY, "prompt_id"], sort=False, as_index=False).mean()


def _interval(name: str, values: Any) -> dict[str, float]:
    """The mean and its 95 % interval over prompts; NaN for fewer than four."""
    of = mean(values)
    ends = zip(ENDS, (of.value, of.low, of.high), strict=True)
    return {f"{name}{end}": round(value, 5) for end, value in ends}


@dataclass(slots=True)
class Bench:
    """Answers of all systems at each of their N."""

    systems: Mapping[str, System]
    ns: Mapping[str, Sequence[int]]
    judge: Judge
    record: Record
    settle_s: float = _SETTLE_S

    async def answer(self, item: Item, max_tokens: int) -> None:
        """Add the missing answers to a prompt; its number is the seed."""
        answers = self.record.answers
        answered = {(a["system"], a["n"]) for a in answers if a["seed"] == item.number}
        for name, n in ((system, n) for system in self.systems for n in self.ns[system]):
            if (name, n) in answered:
                continue
            await asyncio.sleep(self.settle_s)
            started = time.perf_counter()
            text, tokens, prefilled = await self.systems[name](item, n, max_tokens)
            seconds = time.perf_counter() - started
            reward, second = await self.judge(item.prompt, text)
            log(f"{item.id}: {name} n={n}: {seconds:.1f} s, {tokens} tokens, {reward:.3f}")
            line = {"system": name, "n": n, "prompt_id": item.id, "seed": item.number}
            line |= {"seconds": seconds, "tokens": tokens, "prefilled": prefilled}
            answers.append(line | {"reward": reward, "second_judge": second, "text": text})

    async def under_load(
        self, name: str, items: Sequence[Item], max_tokens: int, callers: int
    ) -> None:
        """Add a line: answers to all items at a system's last N, while so many callers wait."""
        waiting, seconds, texts = iter(items), list[float](), list[tuple[Item, str]]()
        n = self.ns[name][-1]

        async def call() -> None:
            for item in waiting:
                began = time.perf_counter()
                texts.append((item, (await self.systems[name](item, n, max_tokens)).text))
                seconds.append(time.perf_counter() - began)

        await asyncio.sleep(self.settle_s)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(call())
        took = time.perf_counter() - began
        rewards = [(await self.judge(item.prompt, text))[0] for item, text in texts]
        self.record.load.append(
            {
                **{"system": name, "n": n, "callers": callers, "answers": len(texts)},
                "answers_per_s": round(len(texts) / took, 4),
                "p50_s": round(float(np.quantile(seconds, 0.5)), 2),
                "p95_s": round(float(np.quantile(seconds, 0.95)), 2),
                "reward": round(float(np.mean(rewards)), 4),
            }
        )
        log(f"{self.record.load[-1]}")


def main() -> None:
    """Measure and report; an interruption or a failure ends with a report, too."""
    arguments = parse_arguments(
        __doc__,
        prompts=(100, "most prompts"),
        seeds=(1, "answers of a prompt; in the statistics it counts once, with their mean"),
        file=(PROMPTS, "JSON lines with an id and a prompt, or messages"),
        n=([4, 16, 64], "candidates"),
        max_tokens=(128, "most new tokens per candidate"),
        systems=([*OURS, PEERS[0]], "systems to compare; name=N: at this N instead of the others"),
        reward=("relevance", "the reward that chooses; the next one served is the second judge"),
        peer=(PEERS[0], f"the server beside ours, and behind *-endpoint: {', '.join(PEERS)}"),
        callers=("", "such as 1,4,16: answers per second while so many callers wait"),
        out=(Path("build/answer"), "files to write, without .json and .svg; a file is continued"),
    )
    if arguments.peer not in PEERS:
        sys.exit(f"bench-answer: unknown peer {arguments.peer}; available: {', '.join(PEERS)}")
    known = (*OURS, *ENDPOINT, arguments.peer)
    if unknown := sorted({*_cases(arguments)} - {*known}):
        sys.exit(f"bench-answer: unknown system {unknown[0]}; available: {', '.join(known)}")
    record = Record(Path(f"{arguments.out}.json"))
    interrupted = False
    try:
        asyncio.run(_run(arguments, read_items(arguments.file), record))
    except ValueError as error:
        sys.exit(f"bench-answer: {error}")
    except KeyboardInterrupt:
        interrupted = True
        log("interrupted: the same command continues")
    finally:
        if record.load:
            about = {"max_tokens": arguments.max_tokens, "load": record.load}
            rows = [[*line.values()] for line in record.load]
            report("answers while callers wait", [*record.load[0]], rows, about)
        elif record.answers:
            _report(arguments, record)
    sys.exit(130 if interrupted else 0)


def _cases(arguments: argparse.Namespace) -> dict[str, list[int]]:
    """The systems, and the N of each."""
    ns = sorted({*arguments.n})
    parts = (name.partition("=") for name in arguments.systems)
    return {name: [int(n)] if n else ns for name, _, n in parts}


def read_items(file: Path) -> list[Item]:
    """The prompts of a file of JSON lines, each with a system turn."""
    items = []
    for number, line in enumerate(file.read_text("utf-8").strip().split("\n")):
        item = json.loads(line)
        turns = item.get("messages") or [{"role": "user", "content": item["prompt"]}]
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        system = [] if messages[0].role == "system" else [SYSTEM_TURN]
        items.append(Item(item["id"], number, Prompt((*system, *messages))))
    return items


async def _run(arguments: argparse.Namespace, items: Sequence[Item], record: Record) -> None:
    """Start what the systems need, let all answer all prompts, store answers after each prompt."""
    ns = _cases(arguments)
    most = max(itertools.chain.from_iterable(ns.values()))
    slots = most * arguments.max_tokens + 8 * _CONTEXT_TOKENS
    environment = {"SPECREJ_GENERATOR_KV_SLOTS": str(slots)}
    async with AsyncExitStack() as started:
        stack = await started.enter_async_context(Stack(environment=environment))
        client = await started.enter_async_context(_client(stack))
        described, peer = await client.describe(), arguments.peer
        model, others = described.generator, {*described.rewards} - {arguments.reward, LIKELIHOOD}
        if arguments.reward not in described.rewards or not others:
            names = ", ".join(described.rewards)
            raise ValueError(f"needs the reward {arguments.reward} and a second one; has {names}")
        judges = arguments.reward, min(others, key=described.rewards.index)
        if model.model != MODEL.name and not {*ns} <= {*OURS}:
            raise ValueError(f"services answer with {model.model}, {peer} with {MODEL.name}")
        record.resume(
            {
                "model": f"{model.model} {model.fingerprint}",
                "max_tokens": arguments.max_tokens,
                "reward": arguments.reward,
                "judges": [*judges],
                "prompts": hashlib.sha256(repr(items).encode()).hexdigest()[:16],
                "machine": describe_machine(),
            }
        )

        async def judge(prompt: Prompt, text: str) -> tuple[float, float]:
            scores = [await client.score(prompt, [text], reward=one) for one in judges]
            return scores[0].values[0], scores[1].values[0]

        systems: dict[str, System] = {
            name: partial(ask_services, client, OURS[name], arguments.reward)
            for name in ns
            if name in OURS
        }
        if not {*ns} <= {*OURS}:
            url = await started.enter_async_context(_server(peer, most))
            # A proxy must not answer for this machine.
            http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)
            if peer in ns:
                await started.enter_async_context(http)
                systems[peer] = partial(ask_peer, http, client, arguments.reward)
            if endpoint := {*ns} & {*ENDPOINT}:
                environment = {
                    "SPECREJ_GENERATOR_ENGINE": "remote",
                    "SPECREJ_GENERATOR_REMOTE_URL": f"{url}/v1",
                    "SPECREJ_GENERATOR_REMOTE_REQUESTS": "256",
                    "SPECREJ_GENERATOR_MODEL": "model",
                }
                before = await started.enter_async_context(Stack(environment=environment))
                other = await started.enter_async_context(_client(before))
                systems |= {
                    name: partial(ask_services, other, OURS[ENDPOINT[name]], arguments.reward)
                    for name in endpoint
                }
        systems = {name: systems[name] for name in ns}
        least = {name: [of[0]] for name, of in ns.items()}
        await Bench(systems, least, judge, Record(record.path)).answer(items[0], max_tokens=8)
        bench, distance = Bench(systems, ns, judge, record), len(items)
        items = items[: arguments.prompts]
        callers = [int(number) for number in arguments.callers.split(",") if number]
        for number, name in itertools.product(callers, systems):
            await bench.under_load(name, items, arguments.max_tokens, number)
        for repeat, item in [] if callers else itertools.product(range(arguments.seeds), items):
            again = item._replace(number=item.number + repeat * distance)
            await bench.answer(again, arguments.max_tokens)
            record.store()


def _client(stack: Stack) -> Client:
    return Client(stack.orchestrator_address, timeout_s=_TIMEOUT_S)


def _report(arguments: argparse.Namespace, record: Record) -> None:
    """Write both files and print the tables."""
    record.store()
    compared = record.compared()
    measured, paired = points(compared), differences(compared)
    result = record.result()
    title = f"{result['prompts']} prompts, {arguments.max_tokens} new tokens, {arguments.reward}"
    if len(measured):
        write_picture(Path(f"{arguments.out}.svg"), measured, title)
    if len(paired):
        print_table("paired by prompt", [*paired], paired.to_numpy())
    report(f"{title}: means per answer", [*measured], measured.to_numpy(), result)


def write_picture(path: Path, measured: pd.DataFrame, title: str) -> None:
    """Write an SVG file: means with 95 % intervals over prompts; every point has its N."""
    systems = {
        system: of.to_dict("records") for system, of in measured.groupby("system", sort=False)
    }
    costs = {
        cost: {
            system: [
                (one["n"], one[cost], Estimate(*(one[f"reward{end}"] for end in ENDS)))
                for one in sorted(points, key=lambda one: one["n"])
            ]
            for system, points in systems.items()
        }
        for cost in ("seconds", "tokens")
    }
    draw(path, title, "reward of the answer", costs, joined=True)


if __name__ == "__main__":
    main()
