"""Runs the orchestrator: `python -m orchestrator --help`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from orchestrator.admission import Admission
from orchestrator.cache import Cache
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.service import Orchestrator
from orchestrator.servicer import OrchestratorServicer
from orchestrator.settings import OrchestratorSettings
from specrej import telemetry
from specrej.channel import open_channel
from specrej.errors import SpecrejError
from specrej.serving import Server
from specrej.settings import load

log = logging.getLogger(__name__)

_BACKEND_POLL_S = 0.5


def main() -> None:
    """Serve until told to stop."""
    settings = load(OrchestratorSettings)
    telemetry.configure("orchestrator", settings.otlp_endpoint, settings.log_level)
    try:
        asyncio.run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"orchestrator: {error}") from error


async def _serve(settings: OrchestratorSettings) -> None:
    cache = Cache(
        settings.redis_url, ttl_s=settings.cache_ttl_s, timeout_s=settings.cache_timeout_s
    )
    async with (
        open_channel(settings.generator_address, retries=False) as generator_channel,
        open_channel(settings.reward_address, retries=False) as reward_channel,
    ):
        orchestrator = Orchestrator(
            RemoteGenerator(generator_channel),
            RemoteRewards(reward_channel),
            cache,
            Admission(settings.max_running, settings.max_queued),
            default_schedule=settings.default_schedule,
            composites=settings.composites,
            default_reward=settings.default_reward,
        )
        servicer = OrchestratorServicer(orchestrator)
        server = Server(settings, [servicer.service()], default_deadline_s=settings.deadline_s)
        try:
            await server.run(partial(_backends_ready, orchestrator))
        finally:
            await cache.close()


async def _backends_ready(orchestrator: Orchestrator) -> None:
    """Returns once generator and rewards answer: services may start in any order."""
    told = False
    while True:
        try:
            await orchestrator.describe()
        except SpecrejError as error:
            if not told:
                log.info("waiting for backends: %s", error)
                told = True
            await asyncio.sleep(_BACKEND_POLL_S)
        else:
            return


if __name__ == "__main__":
    main()
