"""Fleets over real gRPC servers on loopback ports, with toys behind them that can be held."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from orchestrator.backends.fleet import Fleet, Pulse
from orchestrator.backends.resolving import Target
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.run import run
from specrej.channel import open_channel
from specrej.contracts import (
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    Prompt,
    RewardDescription,
    Sampling,
    Schedule,
    Scorer,
    Selection,
)
from tests.orchestrator.services import Backend, HeldGenerator, generator_backend
from tests.serving import until

QUICK = Pulse(poll_s=0.02, resolve_s=0.02, lost_s=0.4)
# For tests in which nobody may be taken for silent, however busy the machine is.
PATIENT = Pulse(poll_s=0.02, resolve_s=0.02, lost_s=60)
# Everybody is asked how it is once: what is found out later, somebody else has found out.
ONCE = Pulse(poll_s=60, resolve_s=60, lost_s=60)
PROMPT = Prompt.from_user("four words of prompt")


class Known:
    """A resolver that is told."""

    def __init__(self, backends: Sequence[Backend] = ()) -> None:
        self.targets = frozenset(map(target_of, backends))

    async def resolve(self) -> frozenset[Target]:
        return self.targets


def target_of(backend: Backend) -> Target:
    return Target(f"127.0.0.1:{backend.port}", "127.0.0.1")


@asynccontextmanager
async def generators(
    known: Known, pulse: Pulse = PATIENT, *, serving: int | None = None
) -> AsyncIterator[Fleet[RemoteGenerator]]:
    """A fleet of which `serving` serve already; all that are known if None."""

    def connect(target: Target) -> tuple[object, RemoteGenerator]:
        channel = open_channel(target.address, retries=False)
        return channel, RemoteGenerator(channel)

    def version(description: GeneratorDescription) -> str:
        return description.fingerprint

    wanted = len(known.targets) if serving is None else serving
    async with Fleet("generator", known, connect, version, pulse) as fleet:  # type: ignore[arg-type]
        await until(lambda: num_serving(fleet) == wanted)
        yield fleet


@asynccontextmanager
async def reward_services(
    known: Known, pulse: Pulse = PATIENT
) -> AsyncIterator[Fleet[RemoteRewards]]:
    def connect(target: Target) -> tuple[object, RemoteRewards]:
        channel = open_channel(target.address, retries=False)
        return channel, RemoteRewards(channel)

    def version(served: tuple[RewardDescription, ...]) -> tuple[str, ...]:
        return tuple(reward.fingerprint for reward in served)

    async with Fleet("reward service", known, connect, version, pulse) as fleet:  # type: ignore[arg-type]
        await until(lambda: num_serving(fleet) == len(known.targets))
        yield fleet


def num_serving(fleet: Fleet[Any]) -> int:
    """Whatever their version."""
    counts = fleet.counts()
    return counts["serving"] + counts["other_version"]


@asynccontextmanager
async def backends(*behind: HeldGenerator) -> AsyncIterator[list[Backend]]:
    """A server for each."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(generator_backend(each)) for each in behind]


def request(
    n: int = 8,
    schedule: Schedule | None = None,
    *,
    max_tokens: int = 32,
    alpha: float = 0.5,
    allow_degraded: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        PROMPT,
        Sampling(max_tokens=max_tokens, seed=7, logprobs=True),
        Selection(n=n, alpha=alpha, schedule=schedule or Schedule(first=4), return_candidates=n),
        allow_degraded=allow_degraded,
    )


async def answered(asked: GenerationRequest, generator: Generator, scorer: Scorer) -> Generation:
    """The answer of a whole run."""
    async with aclosing(run(asked, generator, scorer)) as events:
        seen = [event async for event in events]
    assert isinstance(seen[-1], Finished)
    return seen[-1].generation
