"""The engine beyond its throughput: `make bench-engine`.

Figures on the embedded model: eight sessions at once against the same eight one after another; a
step after a long prompt against one after a short prompt. Compared runs take turns; figures are
medians. And, on the toy, the cost of an answer of 8,192 tokens that is streamed over all services,
and of a session's place among 1,000 generators.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import MODEL, log, parse_arguments, prompt_ids, report, timed
from generator_service.engine.commands import OpenCommand, PrefixBatch
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.engine.thread import EngineThread
from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Fleet, FleetSettings
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Target
from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from reward_service.kinds.toy import ToyReward
from specrej import Client, Finished, TextDelta
from specrej.client.channel import open_channel
from specrej.contracts import GeneratorDescription, Prompt, Sampling, SessionSpec
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej_models.probe import examine
from tests.orchestrator.caching import new_cache
from tests.serving import listening
from tests.world import channel_to, generator_backend, reward_backend

_FIGURES = {
    "sessions": ("speed_up", "8 sessions of N=16 at once / one after another"),
    "prompt": ("ratio", "N=128: step after 512 prompt tokens / after 40"),
    "stream": (
        "ms_per_token",
        "8,192 streamed tokens: ms of processor time per token beyond the toy",
    ),
    "placement": ("ms", "ms to describe 1,000 generators and hold a session at one"),
}


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__, rounds=(3, "measured rounds"), only=([*_FIGURES], "figures to measure")
    )
    model = cache(partial(CausalLM.load, examine(MODEL), "cpu"))
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "sessions": lambda: _sessions(model(), arguments.rounds),
        "prompt": lambda: _prompt(model(), arguments.rounds),
        "stream": lambda: asyncio.run(_stream()),
        "placement": lambda: asyncio.run(_placement()),
    }
    results, rows = {}, []
    for name in arguments.only:
        results[name] = measures[name]()
        log(f"{name}: {results[name]}")
        figure, text = _FIGURES[name]
        rows.append((text, f"{results[name][figure]:.3f}", results[name]))
    headings = ("what", "figure", "details")
    report("the engine on the embedded model", headings, rows, {"results": results})


def products_seconds(products: Sequence[Any], rows: int) -> float:
    """The fastest of several passes through all matrix products of one step.

    Every layer has its own weights, so they are read from memory as in a step.
    """
    data = {size: torch.randn(1, rows, size) for size in {layer.in_features for layer in products}}
    passes: list[float] = []
    with torch.inference_mode():
        while len(passes) < 6 or sum(passes) < 1.0:
            started = time.perf_counter()
            for layer in products:
                layer(data[layer.in_features])
            passes.append(time.perf_counter() - started)
    return min(passes)


class Sessions:
    """Open sessions, one per prompt, that grow together without cuts."""

    def __init__(
        self,
        engine: EngineThread,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
    ) -> None:
        self._engine = engine
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        opened = [engine.open(OpenCommand(prompt, n, sampling, 1)) for prompt in prompts]
        for _, future in opened:
            future.result()
        self.ids = [session_id for session_id, _ in opened]
        self._tokens = 0

    def grow(self, tokens: int) -> list[PrefixBatch]:
        """Extend every candidate by this number of tokens."""
        self._tokens += tokens
        futures = [self._engine.extend(session_id, self._tokens) for session_id in self.ids]
        batches = [future.result() for future in futures]
        assert all(batch.num_tokens == self._tokens for batch in batches)
        return batches

    def close(self) -> None:
        for session_id in self.ids:
            self._engine.close(session_id).result()


def generate(engine: EngineThread, prompt: Sequence[int], n: int, new_tokens: int) -> None:
    """Run one session to its end without cuts."""
    sessions = Sessions(engine, [prompt], n, new_tokens)
    (batch,) = sessions.grow(new_tokens)
    assert sum(prefix.num_new for prefix in batch.prefixes) == n * new_tokens
    sessions.close()


@contextmanager
def _running(model: CausalLM, capacity_slots: int) -> Iterator[EngineThread]:
    engine = EngineThread(Engine(model, capacity_slots))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        engine.engine.check_integrity()


def _medians(
    one_round: Callable[[], tuple[float, float]], rounds: int
) -> tuple[float, float, float]:
    """Medians of both values and of second / first, after one round that warms up."""
    one_round()
    pairs = [one_round() for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return first, second, statistics.median(b / a for a, b in pairs)


def _sessions(
    model: CausalLM, rounds: int, sessions: int = 8, n: int = 16, new_tokens: int = 32
) -> dict[str, float]:
    """Prompts differ, so nothing is shared. While one session runs alone, the joint ones wait."""
    prompts = [prompt_ids(40, number) for number in range(2 * sessions)]

    def one_round() -> tuple[float, float]:
        joint = Sessions(engine, prompts[:sessions], n, new_tokens)
        joint_s = serial_s = 0.0
        for prompt in prompts[sessions:]:
            joint_s += timed(lambda: joint.grow(new_tokens // sessions))
            serial_s += timed(partial(generate, engine, prompt, n, new_tokens))
        joint.close()
        return joint_s, serial_s

    with _running(model, (sessions + 1) * (n * new_tokens + 40)) as engine:
        joint_s, serial_s, speed_up = _medians(one_round, rounds)
    num_tokens = sessions * n * new_tokens
    return {
        "speed_up": round(speed_up, 3),
        "at_once_tokens_per_s": round(num_tokens / joint_s, 1),
        "one_after_another_tokens_per_s": round(num_tokens / serial_s, 1),
    }


def _prompt(model: CausalLM, rounds: int, n: int = 128, new_tokens: int = 32) -> dict[str, float]:
    """Milliseconds per step after the first token, so without the prefill."""

    def step_ms(tokens: int) -> float:
        sessions = Sessions(engine, [prompt_ids(tokens)], n, new_tokens)
        sessions.grow(1)
        seconds = timed(lambda: sessions.grow(new_tokens - 1))
        sessions.close()
        return seconds * 1e3 / (new_tokens - 1)

    with _running(model, n * new_tokens + 512) as engine:
        short_ms, long_ms, _ = _medians(lambda: (step_ms(40), step_ms(512)), rounds)
    return {
        "ratio": round(long_ms / short_ms, 3),
        "step_ms_after_40": round(short_ms, 1),
        "step_ms_after_512": round(long_ms, 1),
    }


class _LongToy(ToyGenerator):
    """A toy whose answers may be long and do not end early."""

    async def describe(self) -> GeneratorDescription:
        return replace(await super().describe(), context_tokens=16_384)


@asynccontextmanager
async def _metered(port: int) -> AsyncIterator[tuple[str, list[int]]]:
    """An address that leads to a local port, and the sizes of what the port sends."""
    sizes: list[int] = []

    async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter, into: list[int]) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                into.append(len(data))
                to.write(data)
                await to.drain()
        to.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(back, writer, sizes), pump(reader, forth, []))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sizes
    finally:
        server.close()


async def _stream(num_tokens: int = 8192, step_s: float = 0.0005) -> dict[str, float]:
    """One candidate's tokens over gRPC, and without: the difference is the processor time of the
    servicer, the orchestrator and the client."""
    toy, sampling = _LongToy(step_s=step_s), Sampling(num_tokens, ignore_eos=True)
    began = time.process_time()
    async with toy.open(SessionSpec(Prompt.from_user("Tell me."), 1, sampling, 16)) as session:
        await session.extend(num_tokens)
    toy_s = time.process_time() - began
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        backend = await enter(generator_backend(toy))
        generator, from_generator = await enter(_metered(backend.port))
        rewards = await enter(channel_to(await enter(reward_backend(ToyReward()))))
        orchestrator = Orchestrator(
            RemoteGenerator(await enter(open_channel(generator))),
            RemoteRewards(rewards),
            new_cache(""),
            Admission(Limits(8, 64)),
        )
        address = await enter(listening(OrchestratorServicer(orchestrator).service()))
        public, from_orchestrator = await enter(_metered(int(address.rpartition(":")[2])))
        client, deltas, streamed = await enter(Client(public)), list[str](), 0
        options: dict[str, Any] = {
            "n": 1,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "text_deltas": True,
        }
        began, began_s = time.process_time(), time.perf_counter()
        async for event in client.stream("Tell me.", **options):
            if isinstance(event, TextDelta):
                deltas.append(event.text)
                streamed = sum(from_orchestrator)
            elif isinstance(event, Finished):
                answer = event.generation.best
        used_s, seconds = time.process_time() - began, time.perf_counter() - began_s
    assert "".join(deltas) == answer.text and answer.num_tokens == num_tokens
    text_bytes = len(answer.text.encode())
    return {
        "ms_per_token": round((used_s - toy_s) * 1e3 / num_tokens, 4),
        "toy_ms_per_token": round(toy_s * 1e3 / num_tokens, 4),
        "text_bytes": text_bytes,
        "tokens_per_s": round(num_tokens / seconds),
        "from_generator_bytes_per_text_and_ids": round(
            sum(from_generator) / (text_bytes + num_tokens), 3
        ),
        "deltas_to_client_bytes_per_text": round(streamed / text_bytes, 3),
        "to_client_bytes_per_text_and_ids": round(
            sum(from_orchestrator) / (text_bytes + num_tokens), 3
        ),
        "deltas_per_s": round(len(deltas) / seconds, 1),
    }


async def _placement(num_backends: int = 1000, num_sessions: int = 2000) -> dict[str, float]:
    """The orchestrator's part alone: neither calls nor reports."""
    toy = ToyGenerator()
    described = await toy.describe()
    targets = frozenset(Target(f"10.0.0.1:{port}", "") for port in range(num_backends))

    async def watch(_: float) -> AsyncIterator[GeneratorDescription]:
        yield described
        await asyncio.Event().wait()

    async with toy.open(SessionSpec(Prompt.from_user("?"), 1, Sampling(1), 1)) as session:
        peer: Any = SimpleNamespace(watch=watch, open=lambda _: nullcontext(session))
        channel: Any = SimpleNamespace(close=partial(asyncio.sleep, 0))
        resolve: Any = partial(asyncio.sleep, 0, targets)
        settings = FleetSettings(report_s=1, resolve_s=600, lost_s=600)
        of_peer: Any = lambda _: (channel, peer)  # noqa: E731
        async with Fleet[Any]("generator", resolve, of_peer, lambda _: "", settings) as fleet:
            await fleet.wait_heard()
            generator, seconds = FleetGenerator(fleet), list[float]()
            for number in range(num_sessions):
                prompt = Prompt.from_user(f"{number} times?")
                began = time.perf_counter()
                await generator.describe()
                async with generator.open(SessionSpec(prompt, 16, Sampling(64), 16)):
                    seconds.append(time.perf_counter() - began)
    return {"ms": round(statistics.median(seconds) * 1e3, 4)}


if __name__ == "__main__":
    main()
