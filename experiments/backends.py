"""Who writes and who judges: models in this process, or the ports of a stack that runs.

Both come as the seams of `specrej.contracts`, with what they are, to be kept with the results.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from experiments.flops import Sizes, read_sizes
from orchestrator.remote import RemoteGenerator, RemoteRewards
from specrej.channel import open_channel
from specrej.contracts import Generator, GeneratorDescription, RewardDescription, Scorer
from specrej.credentials import credentials_from

if TYPE_CHECKING:
    from reward_service.settings import RewardSpec

_TOY_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Backends:
    """A generator and rewards by name, with what they say of themselves.

    sizes: of models whose operations can be counted; keys as in `identity`.
    """

    generator: Generator
    model: GeneratorDescription
    scorers: Mapping[str, Scorer]
    rewards: tuple[RewardDescription, ...]
    sizes: Mapping[str, Sizes] = field(default_factory=dict)

    def identity(self) -> dict[str, str]:
        """What must be the same when a collection goes on."""
        fingerprints = {f"reward {each.name}": each.fingerprint for each in self.rewards}
        return {"model": self.model.model, "generator": self.model.fingerprint, **fingerprints}


@asynccontextmanager
async def embedded(rewards: Sequence[str], kv_slots: int = 0) -> AsyncIterator[Backends]:
    """The models that the services' settings name, in this process; loading takes seconds.

    Raises:
        ValueError: a reward is not configured.
        FileNotFoundError: a model is not there.
    """
    # Here, as torch is not needed to look at what was collected.
    from generator_service.loading import load_generator
    from generator_service.settings import GeneratorSettings
    from generator_service.toy import is_toy, load_toy
    from reward_service.catalog import load_reward
    from reward_service.settings import RewardSettings
    from reward_service.worker import Worker
    from specrej.settings import load

    reward_settings = load(RewardSettings, [])
    specs = {spec.name: spec for spec in reward_settings.rewards}
    _check(rewards, specs)
    flags = ["--kv-slots", str(kv_slots)] if kv_slots else []
    generator_settings = load(GeneratorSettings, flags)
    sizes: dict[str, Sizes | None] = {}
    generator: Generator
    if is_toy(generator_settings.model):
        generator = load_toy(generator_settings.model, kv_slots or _TOY_SLOTS)
    else:
        generator = await asyncio.to_thread(load_generator, generator_settings)
        sizes["generator"] = read_sizes(generator_settings.model_directory, with_head=True)
    workers: dict[str, Worker] = {}
    try:
        for name in rewards:
            reward = partial(load_reward, specs[name], reward_settings)
            workers[name] = await Worker.start(reward)
            sizes[f"reward {name}"] = _sizes(specs[name])
        described = tuple(worker.description for worker in workers.values())
        counted = {name: each for name, each in sizes.items() if each}
        yield Backends(generator, await generator.describe(), workers, described, counted)
    finally:
        for worker in workers.values():
            worker.close()
        for worker in workers.values():  # torch must not be in a pass when the interpreter ends
            await asyncio.to_thread(worker.join, 60.0)


def _sizes(spec: RewardSpec) -> Sizes | None:
    """Of a reward that reads every text anew; what others read is not counted."""
    from reward_service.settings import RelevanceSpec

    if not isinstance(spec, RelevanceSpec):
        return None
    from reward_service.relevance import MAX_TOKENS

    return read_sizes(spec.directory, with_head=False, max_tokens=MAX_TOKENS)


@asynccontextmanager
async def remote(
    rewards: Sequence[str], generator_address: str, reward_address: str
) -> AsyncIterator[Backends]:
    """A running stack's own ports.

    Raises:
        ValueError: a reward is not served there.
        SpecrejError: nobody answers.
    """
    credentials = credentials_from(os.environ)
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(address, retries=False, **credentials))
            for address in (generator_address, reward_address)
        ]
        generator, served = RemoteGenerator(channels[0]), RemoteRewards(channels[1])
        known = {each.name: each for each in await served.describe()} if rewards else {}
        _check(rewards, known)
        yield Backends(
            generator,
            await generator.describe(),
            {name: served.scorer(name) for name in rewards},
            tuple(known[name] for name in rewards),
        )


def _check(rewards: Sequence[str], known: Mapping[str, object]) -> None:
    if missing := [name for name in rewards if name not in known]:
        there = ", ".join(known) or "none"
        raise ValueError(f"no such reward: {', '.join(missing)}; there are {there}")
