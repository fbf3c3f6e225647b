"""The generator and the rewards of an experiment, loaded in this process.

Both are given as the Protocols of `specrej.contracts`, with the descriptions that are stored with
results.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import run
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.contracts import (
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    RewardDescription,
    Scorer,
)


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
        async with aclosing(run(request, self.generator, scorer, unique_salt())) as events:
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
    from generator_service.__main__ import open_generator
    from generator_service.settings import GeneratorSettings
    from reward_service.settings import RewardSettings
    from reward_service.worker import Worker
    from specrej.settings import load

    settings = load(RewardSettings, [])
    specs = {spec.name: spec for spec in settings.rewards}
    if missing := [name for name in rewards if name not in specs]:
        raise ValueError(f"no such reward: {', '.join(missing)}; available: {', '.join(specs)}")
    async with AsyncExitStack() as resources:
        generator, _ = await open_generator(load(GeneratorSettings, []), resources)
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
