"""Runs the orchestrator: `python -m orchestrator --help`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import grpc.aio

from orchestrator import instruments
from orchestrator.admission import Admission, Limits
from orchestrator.backends.fleet import Fleet
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Resolver, Target
from orchestrator.backends.rewards import FleetRewards
from orchestrator.cache import Cache
from orchestrator.journal import Journal
from orchestrator.refresh import Refreshes
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.service import Orchestrator
from orchestrator.servicer import OrchestratorServicer
from orchestrator.settings import OrchestratorSettings
from orchestrator.shadowing import Shadows
from orchestrator.shared_flight import SharedFlights
from specrej import telemetry
from specrej.channel import open_channel
from specrej.contracts import GeneratorDescription, RewardDescription
from specrej.errors import SpecrejError
from specrej.serving import Server
from specrej.settings import load

log = logging.getLogger(__name__)

_BACKEND_POLL_S = 0.5


def main() -> None:
    """Serve until told to stop."""
    settings = load(OrchestratorSettings)
    try:
        with telemetry.configured("orchestrator", settings):
            asyncio.run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"orchestrator: {error}") from error


async def _serve(settings: OrchestratorSettings) -> None:
    cache = Cache(
        settings.redis_access,
        ttl_s=settings.cache_ttl_s,
        stale_s=settings.cache_stale_s,
        timeout_s=settings.cache_timeout_s,
    )
    limits = Limits(
        settings.max_running,
        settings.max_queued,
        settings.max_queued_tokens,
        settings.tenant_tokens,
    )
    admission = Admission(limits)
    async with (
        _generators(settings) as generators,
        _reward_services(settings) as reward_services,
    ):
        orchestrator = Orchestrator(
            FleetGenerator(generators),
            FleetRewards(reward_services),
            cache,
            admission,
            default_schedule=settings.default_schedule,
            composites=settings.composites,
            default_reward=settings.default_reward,
            shared_flights=SharedFlights(cache) if settings.shared_flights else None,
            refreshes=Refreshes(deadline_s=settings.deadline_s),
            shadows=Shadows(
                settings.shadow_share,
                max_slots=settings.shadow_slots,
                target_regret=settings.shadow_regret,
                deadline_s=settings.deadline_s,
            ),
            journal=Journal(settings.journal_requests),
            log_texts=settings.log_texts,
        )
        instruments.observe(admission)
        fleets = {"generator": generators.counts, "reward": reward_services.counts}
        instruments.observe_backends(fleets)
        servicer = OrchestratorServicer(orchestrator)
        server = Server(settings, [servicer.service()], default_deadline_s=settings.deadline_s)
        try:
            await server.run(partial(_backends_ready, orchestrator, generators, reward_services))
        finally:
            await orchestrator.aclose()
            await cache.close()


def _generators(settings: OrchestratorSettings) -> Fleet[RemoteGenerator]:
    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteGenerator]:
        channel = _channel_to(target, settings)
        return channel, RemoteGenerator(channel)

    def version(description: GeneratorDescription) -> str:
        return description.fingerprint

    resolver = Resolver(settings.generator_addresses)
    return Fleet("generator", resolver, connect, version, settings.pulse)


def _reward_services(settings: OrchestratorSettings) -> Fleet[RemoteRewards]:
    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteRewards]:
        channel = _channel_to(target, settings)
        return channel, RemoteRewards(channel)

    def version(served: tuple[RewardDescription, ...]) -> tuple[tuple[str, str], ...]:
        return tuple((reward.name, reward.fingerprint) for reward in served)

    resolver = Resolver(settings.reward_addresses)
    return Fleet("reward service", resolver, connect, version, settings.pulse)


def _channel_to(target: Target, settings: OrchestratorSettings) -> grpc.aio.Channel:
    return open_channel(
        target.address,
        retries=False,
        max_message_bytes=settings.max_message_bytes,
        certified_name=target.name,
        **settings.backend_credentials,
    )


async def _backends_ready(orchestrator: Orchestrator, *fleets: Fleet[Any]) -> None:
    """Returns once generator and rewards answer: services may start in any order."""
    told = False
    for fleet in fleets:
        await fleet.surveyed()  # what needs two generators is not for one that was quicker
    while True:
        try:
            await orchestrator.describe()
        except SpecrejError as error:
            if not told:
                log.info("waiting for backends: %s", _reason(error))
                told = True
            await asyncio.sleep(_BACKEND_POLL_S)
        else:
            return


def _reason(error: SpecrejError) -> str:
    """What callers are not told: addresses, and why a handshake failed."""
    cause = error.__cause__
    said = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else None
    return said or str(error)


if __name__ == "__main__":
    main()
