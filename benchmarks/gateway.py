"""What HTTP adds to gRPC, and when an answer begins to stream: `make bench-gateway`.

Requests of one length go to the gateway and to the orchestrator by turns, each with a seed of its
own, on the embedded models. Then answers stream through the gateway with OpenAI's client: the time
to the first piece of text as a share of the whole, and the share of the answer's characters that
came before its last piece. A piece can be sent once one candidate is certain to win.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI

from benchmarks.harness import PROMPTS, alternate, parse_arguments, report, running
from specrej import Client
from specrej.contracts import CacheControl

_MODEL = "SmolLM2-135M-Instruct"


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        pairs=(30, "requests each by HTTP and by gRPC"),
        n=(8, "candidates of these"),
        new=(32, "their most new tokens"),
        stream_n=([8, 32, 128], "candidates of the streamed answers"),
        stream_new=(128, "their most new tokens"),
    )
    asyncio.run(_measure(arguments))


async def _measure(arguments: Any) -> None:
    async with running(gateway=True) as (stack, client):
        http = AsyncOpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none", timeout=600)
        async with http:
            medians = await _medians_ms(http, client, arguments)
            streams = [await _streams(http, n, arguments.stream_new) for n in arguments.stream_n]
    added = medians["http"] / medians["grpc"] - 1
    report(
        f"p50 by HTTP {medians['http']:.1f} ms, by gRPC {medians['grpc']:.1f} ms: {added:+.1%}",
        ("N", "first text s", "whole s", "first / whole", "streamed"),
        (
            (s["n"], s["first_s"], s["seconds"], f"{s['first_share']:.0%}", f"{s['streamed']:.0%}")
            for s in streams
        ),
        {"p50_ms": medians, "added": round(added, 4), "streams": streams},
    )


async def _medians_ms(http: AsyncOpenAI, client: Client, arguments: Any) -> dict[str, float]:
    n, new = arguments.n, arguments.new

    async def by_http(seed: int) -> None:
        await http.chat.completions.create(**_request(0, n, new, seed))

    async def by_grpc(seed: int) -> None:
        prompt, bypass = PROMPTS[0], CacheControl.BYPASS
        await client.generate(prompt, n=n, max_tokens=new, seed=seed, cache=bypass)

    calls: dict[str, Callable[[int], Awaitable[None]]] = {"http": by_http, "grpc": by_grpc}
    measured = await alternate(calls, arguments.pairs)
    return {
        name: round(statistics.median(seconds for seconds, _ in of) * 1e3, 2)
        for name, of in measured.items()
    }


async def _streams(http: AsyncOpenAI, n: int, new: int) -> dict[str, Any]:
    """Medians over the prompts."""
    streams = [await _stream(http, number, n, new) for number in range(len(PROMPTS))]
    names = ("first_s", "seconds", "first_share", "streamed")
    return {"n": n} | {
        name: round(statistics.median(values), 3)
        for name, values in zip(names, zip(*streams, strict=True), strict=True)
    }


async def _stream(http: AsyncOpenAI, number: int, n: int, new: int) -> tuple[float, ...]:
    started, pieces = time.perf_counter(), list[tuple[float, int]]()
    async for chunk in await http.chat.completions.create(
        **_request(number, n, new, number), stream=True
    ):
        if chunk.choices and (text := chunk.choices[0].delta.content):
            pieces.append((time.perf_counter() - started, len(text)))
    seconds = time.perf_counter() - started
    whole = sum(length for _, length in pieces)
    return pieces[0][0], seconds, pieces[0][0] / seconds, 1 - pieces[-1][1] / whole


def _request(number: int, n: int, new: int, seed: int) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "messages": [{"role": "user", "content": PROMPTS[number]}],
        "max_tokens": new,
        "seed": seed,
        "extra_body": {"specrej": {"n": n, "cache": "bypass"}},
    }


if __name__ == "__main__":
    main()
