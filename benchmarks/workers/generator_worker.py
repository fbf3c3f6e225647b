"""The own generator or vLLM behind the session verbs; measured by vllm_verbs.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from generator_service.settings import GeneratorSettings
from specrej.contracts import Generator, Prompt, RoundEnd, Sampling, SessionSpec


class Worker:
    """One generator for all requests; `settings` are those of the generator service."""

    def __init__(self, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        parsed = GeneratorSettings(**settings)
        self.versions = {"torch": version("torch")}
        self._generator: Generator
        if parsed.engine == "vllm":
            # Not at the top: only the environment of vLLM has it.
            from generator_service.stock.vllm_generator import load_vllm

            vllm = load_vllm(parsed)
            self._loop.run_until_complete(vllm.warm_up())
            self._generator = vllm
            from generator_service.stock.vllm_engine import VERSION

            self.versions["vllm"] = VERSION
        else:
            from generator_service.loading import load_generator

            self._generator = load_generator(parsed)

    def measure(self, n: int, prompt: str, decision_tokens: Sequence[int]) -> float:
        """Seconds for a session; each decision token but the last halves the candidates."""
        return self._loop.run_until_complete(self._run(n, prompt, decision_tokens))

    async def _run(self, n: int, prompt: str, decision_tokens: Sequence[int]) -> float:
        number = next(self._numbers)
        sampling = Sampling(max_tokens=decision_tokens[-1], seed=number, ignore_eos=True)
        started = time.perf_counter()
        # A salt of its own: each session computes its prompt.
        spec = SessionSpec(Prompt(text=prompt), n, sampling, decision_tokens[0], str(number))
        async with self._generator.open(spec) as session:
            for until in decision_tokens:
                completed = await session.extend(until)
                assert completed.ended_by is not RoundEnd.SLOTS_FULL
                assert [c.num_tokens for c in completed.candidates] == [until] * n
                n = max(1, n // 2)
                await session.prune([candidate.id for candidate in completed.candidates[:n]])
        return time.perf_counter() - started
