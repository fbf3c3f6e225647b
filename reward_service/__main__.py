"""Starts the reward service: `python -m reward_service --help`."""

from __future__ import annotations

import asyncio
from functools import partial

from reward_service.servicer import RewardServicer
from reward_service.settings import RewardSettings
from reward_service.worker import Worker
from specrej import settings as settings_loader
from specrej import telemetry, threads
from specrej.contracts.errors import SpecrejError
from specrej.server.serving import Server


def main() -> None:
    """Serves until SIGTERM, then exits with 0; with 1 and a one-line explanation if it cannot."""
    settings = settings_loader.load(RewardSettings)
    threads.bound_spinning()
    try:
        with telemetry.configured("reward", settings):
            asyncio.run(serve(settings))
    except (OSError, RuntimeError, SpecrejError, ValueError) as error:
        raise SystemExit(f"reward service: {error}") from error
    threads.leave()


async def serve(settings: RewardSettings) -> None:
    """Listens at once; healthy once every reward is loaded."""
    servicer = RewardServicer(settings.max_batch, settings.lease_s)
    server = Server(settings, [servicer.service()], default_deadline_s=settings.deadline_s)
    workers: list[Worker] = []

    async def warm_up() -> None:
        for spec in settings.rewards:
            load = partial(spec.load, settings.resources)
            worker = await Worker.start(load, settings.queue_limit)
            server.watch(worker.heartbeat_s)
            workers.append(worker)
        servicer.serve(workers)

    try:
        await server.run(warm_up)
    finally:
        for worker in workers:
            worker.close()
        # torch must not be in a pass when the interpreter ends; the server has waited for calls.
        for worker in workers:
            await worker.join(1.0)


if __name__ == "__main__":
    main()
