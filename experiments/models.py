"""The generator and the rewards of an experiment: loaded in this process, or a running stack.

Both are given as the Protocols of `specrej.contracts`, with the descriptions that are stored with
results.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import run
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.client.channel import open_channel
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
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.security import credentials_from

_TOY_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Models:
    """A generator and rewards by name, with their descriptions."""

    generator: Generator
    description: GeneratorDescription
    scorers: Mapping[str, Scorer]
    rewards: tuple[RewardDescription, ...]

    def identity(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Names and fingerprints of the generator and of these rewards, by default of all. They
        must be equal when a collection is resumed."""
        chosen = [reward for reward in self.rewards if names is None or reward.name in names]
        fingerprints = {f"reward {reward.name}": reward.fingerprint for reward in chosen}
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
async def in_process(rewards: Sequence[str], kv_slots: int = 0) -> AsyncIterator[Models]:
    """The models of the services' settings, loaded in this process.

    Raises:
        ValueError: a reward is not configured.
        FileNotFoundError: a model is missing.
    """
    # Imported here, so that replays and reports do not need torch.
    from generator_service.loading import load_generator
    from generator_service.settings import GeneratorSettings
    from generator_service.toy import is_toy, load_toy
    from reward_service.settings import RewardSettings
    from reward_service.worker import Worker
    from specrej.settings import load

    reward_settings = load(RewardSettings, [])
    specs = {spec.name: spec for spec in reward_settings.rewards}
    _check_available(rewards, specs)
    flags = ["--kv-slots", str(kv_slots)] if kv_slots else []
    generator_settings = load(GeneratorSettings, flags)
    generator: Generator
    if is_toy(generator_settings.model):
        generator = load_toy(generator_settings.model, kv_slots or _TOY_SLOTS)
    else:
        generator = await asyncio.to_thread(load_generator, generator_settings)
    workers: dict[str, Worker] = {}
    try:
        for name in rewards:
            load_reward = partial(specs[name].load, reward_settings.resources)
            workers[name] = await Worker.start(load_reward)
        yield Models(
            generator,
            await generator.describe(),
            {name: worker.open for name, worker in workers.items()},
            tuple(worker.description for worker in workers.values()),
        )
    finally:
        for worker in workers.values():
            worker.close()
        for worker in workers.values():  # torch must not be computing when the interpreter exits
            await worker.join(60.0)


@asynccontextmanager
async def remote(
    rewards: Sequence[str], generator_address: str, reward_address: str
) -> AsyncIterator[Models]:
    """The generator and reward service of a running stack.

    Raises:
        ValueError: a reward is not served there.
        SpecrejError: a service cannot be reached.
    """
    credentials = credentials_from(os.environ)
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(address, retries=False, **credentials))
            for address in (generator_address, reward_address)
        ]
        generator, served = RemoteGenerator(channels[0]), RemoteRewards(channels[1])
        descriptions = (
            {reward.name: reward for reward in await served.describe()} if rewards else {}
        )
        _check_available(rewards, descriptions)
        yield Models(
            generator,
            await generator.describe(),
            {name: partial(served.open, name) for name in rewards},
            tuple(descriptions[name] for name in rewards),
        )


def _check_available(rewards: Sequence[str], available: Mapping[str, object]) -> None:
    if missing := [name for name in rewards if name not in available]:
        names = ", ".join(available) or "none"
        raise ValueError(f"no such reward: {', '.join(missing)}; available: {names}")
