"""The generator and the rewards of an experiment, loaded in this process.

Both are given as the Protocols of `specrej.contracts`, with the descriptions that are stored with
results.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import run
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.contracts import (
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    RewardDescription,
    Scorer,
)

_TOY_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Models:
    """A generator and rewards by name, with their descriptions."""

    generator: Generator
    description: GeneratorDescription
    scorers: Mapping[str, Scorer]
    rewards: tuple[RewardDescription, ...]

    def identity(self) -> dict[str, str]:
        """Names and fingerprints of generator and rewards; equal when a collection is resumed."""
        fingerprints = {f"reward {reward.name}": reward.fingerprint for reward in self.rewards}
        model = {"model": self.description.model, "generator": self.description.fingerprint}
        return model | fingerprints

    async def answer(self, request: GenerationRequest, reward: str) -> Generation:
        """Answer a request by the loop that serves requests."""
        scorer = LikelihoodScorer() if reward == LIKELIHOOD else self.scorers[reward]
        return await generation_of(run(request, self.generator, scorer, unique_salt()))


async def generation_of(events: AsyncGenerator[Event, None]) -> Generation:
    """The result of a run, from its events (`orchestrator.loop.run.run`)."""
    async with aclosing(events):
        *_, last = [event async for event in events]
    assert isinstance(last, Finished)
    return last.generation


def unique_salt() -> str:
    """A cache salt that no other session has, so that the prompt is computed anew.

    Every timed request then includes the cost of its prompt. Tokens do not depend on the salt: the
    last token of a prompt, from which first tokens are drawn, is always computed alone.
    """
    return f"experiments {secrets.token_hex(16)}"


@asynccontextmanager
async def in_process(rewards: Sequence[str]) -> AsyncIterator[Models]:
    """The models of the services' settings, loaded in this process.

    Raises:
        ValueError: a reward is not configured.
        FileNotFoundError: a model is missing.
    """
    # Imported here, so that replays and reports do not need torch.
    from reward_service.settings import RewardSettings
    from reward_service.worker import Worker
    from specrej.settings import load

    settings = load(RewardSettings, [])
    specs = {spec.name: spec for spec in settings.rewards}
    if missing := [name for name in rewards if name not in specs]:
        raise ValueError(f"no such reward: {', '.join(missing)}; available: {', '.join(specs)}")
    async with AsyncExitStack() as resources:
        generator = await _generator(resources)
        workers = {}
        for name in rewards:
            load_reward = partial(specs[name].load, settings.resources)
            workers[name] = await Worker.start(load_reward)
            # torch must not be computing when the interpreter exits
            resources.push_async_callback(workers[name].join, 60.0)
            resources.callback(workers[name].close)
        yield Models(
            generator,
            await generator.describe(),
            {name: worker.open for name, worker in workers.items()},
            tuple(worker.description for worker in workers.values()),
        )


async def _generator(resources: AsyncExitStack) -> Generator:
    """The generator of the settings; `resources` closes it."""
    from generator_service.loading import engine_of, load_generator
    from generator_service.settings import GeneratorSettings
    from generator_service.toy import is_toy, load_toy
    from specrej.settings import load

    settings = load(GeneratorSettings, [])
    if is_toy(settings.model):
        return load_toy(settings.model, settings.kv_slots or _TOY_SLOTS)
    engine = engine_of(settings) if settings.engine == "auto" else settings.engine
    if engine == "vllm":
        from generator_service.stock.vllm_generator import load_vllm

        vllm = await asyncio.to_thread(load_vllm, settings)
        resources.callback(vllm.close)
        await vllm.warm_up()
        return vllm
    own = await asyncio.to_thread(load_generator, settings)
    resources.callback(own.close)
    return own
