"""Runs the orchestrator: `python -m orchestrator --help`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from orchestrator.backends.fleet import Fleet, FleetSettings, Peer
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Resolver, Target
from orchestrator.backends.rewards import FleetRewards
from orchestrator.cache import Cache, RedisClient, Secret
from orchestrator.edge.admission import Admission
from orchestrator.edge.extractors import functions_of
from orchestrator.edge.planning import Defaults
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from orchestrator.observe import instruments
from orchestrator.settings import OrchestratorSettings
from specrej import telemetry
from specrej.client.channel import open_channel
from specrej.contracts import RewardDescription
from specrej.contracts.errors import SpecrejError
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.security import tls_files
from specrej.server.serving import Server
from specrej.settings import load

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Peer)

_RETRY_S = 0.5
_REPORT_S = 1.0  # between two reports of a backend
_RESOLVE_S = 5.0  # between two lookups of the backends' names


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load(OrchestratorSettings)
    try:
        with telemetry.configured("orchestrator", settings):
            asyncio.run(_serve(settings))
    except (OSError, ValueError) as error:
        raise SystemExit(f"orchestrator: {error}") from error


async def _serve(settings: OrchestratorSettings) -> None:
    redis = RedisClient(
        settings.redis_url, settings.password_path, timeout_s=settings.cache_timeout_s
    )
    if settings.exposes_cache:
        log.warning("clients of Redis can forge answers: set cache_secret_file")
    at_generators, at_rewards = settings.generator_address, settings.reward_address
    version_of = attrgetter("fingerprint")
    async with (
        _fleet(settings, "generator", at_generators, RemoteGenerator, version_of) as generators,
        _fleet(settings, "reward service", at_rewards, RemoteRewards, _versions_of) as rewards,
    ):
        secret = Secret(Path(settings.cache_secret_file) if settings.cache_secret_file else None)
        admission = Admission(settings.max_running, settings.max_queued)
        instruments.observe_admission(admission)
        orchestrator = Orchestrator(
            FleetGenerator(generators),
            FleetRewards(rewards),
            Cache(redis, ttl_s=settings.cache_ttl_s, secret=secret),
            admission,
            defaults=Defaults(
                settings.default_schedule,
                settings.default_n,
                settings.default_max_tokens,
                settings.default_rewards,
            ),
            extractors=functions_of(settings.vote_extractors),
        )
        instruments.observe_backends({"generator": generators.counts, "reward": rewards.counts})
        servicer = OrchestratorServicer(orchestrator, least_bytes_s=settings.least_bytes_s)
        server = Server(
            settings,
            [servicer.service()],
            default_deadline_s=settings.deadline_s,
            max_deadline_s=settings.max_deadline_s,
            client_tls=tls_files(settings.backend_credentials),
        )
        try:
            await server.run(partial(_backends_ready, orchestrator, generators, rewards))
        finally:
            await redis.close()


def _fleet(
    settings: OrchestratorSettings,
    kind: str,
    addresses: str,
    peer: Callable[[grpc.aio.Channel], P],
    version: Callable[[Any], Hashable],
) -> Fleet[P]:
    def connect(target: Target) -> tuple[grpc.aio.Channel, P]:
        channel = open_channel(
            target.address,
            max_message_bytes=settings.backend_message_bytes,
            certified_name=target.name,
            **settings.backend_credentials,
        )
        return channel, peer(channel)

    resolve = Resolver(addresses.split(",")).resolve
    seconds = FleetSettings(_REPORT_S, _RESOLVE_S, settings.backend_lost_s)
    return Fleet(kind, resolve, connect, version, seconds)


def _versions_of(served: Sequence[RewardDescription]) -> Hashable:
    return tuple((reward.name, reward.fingerprint) for reward in served)


async def _backends_ready(orchestrator: Orchestrator, *fleets: Fleet[Any]) -> None:
    """Return once generator and rewards serve: services may start in any order."""
    for fleet in fleets:
        # All of them: a request may need more than the first generator that answers.
        await fleet.wait_heard()
    is_logged = False
    while True:
        try:
            await orchestrator.describe()
            return
        except SpecrejError as error:
            if not is_logged:
                # The cause has the address and the failed handshake, which callers do not get.
                cause = error.__cause__
                details = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else None
                log.info("waiting for backends: %s", details or error)
                is_logged = True
            await asyncio.sleep(_RETRY_S)


if __name__ == "__main__":
    main()
