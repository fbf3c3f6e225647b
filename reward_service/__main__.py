"""Starts the reward service: `python -m reward_service --help`."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.settings import RewardSettings, RewardSpec
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej import settings as settings_loader
from specrej import telemetry
from specrej.serving import Server


def main() -> None:
    """Serves until SIGTERM, then exits with 0; with 1 and a line of explanation if it cannot."""
    settings = settings_loader.load(RewardSettings)
    telemetry.configure("reward", settings.otlp_endpoint, settings.log_level)
    try:
        asyncio.run(serve(settings))
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"reward service: {error}") from error


async def serve(settings: RewardSettings) -> None:
    """Listens at once; healthy once every reward is loaded."""
    servicer = RewardServicer(settings.max_batch, settings.lease_s)
    server = Server(settings, [servicer.service()], default_deadline_s=settings.deadline_s)
    workers: list[Worker] = []

    async def warm_up() -> None:
        for spec in settings.rewards:
            load = partial(load_reward, spec, settings)
            workers.append(await Worker.start(load, settings.queue_limit))
        servicer.serve(workers)

    try:
        await server.run(warm_up)
    finally:
        for worker in workers:
            worker.close()


def load_reward(spec: RewardSpec, settings: RewardSettings) -> Reward:
    """The reward a spec describes.

    Raises:
        FileNotFoundError: its directory is not there.
        OSError, ValueError: its directory holds no such model.
    """
    if spec.directory is None:  # kind toy, and no other
        return ToyReward(spec.name)
    if not spec.directory.is_dir():
        raise FileNotFoundError(f"reward {spec.name}: no model directory {spec.directory}")
    options: dict[str, Any] = {
        "name": spec.name,
        "device": settings.device,
        "threads": settings.threads,
        "token_budget": settings.token_budget,
    }
    if spec.kind == "relevance":
        return _relevance(spec.directory, **options)
    kept_tokens = settings.kept_tokens
    return _classifier(spec.directory, head=spec.head, kept_tokens=kept_tokens, **options)


# Imported when called: torch loads in the background, and not at all for toys.


def _relevance(directory: Path, **options: Any) -> Reward:
    from reward_service.relevance import RelevanceReward

    return RelevanceReward(directory, **options)


def _classifier(directory: Path, **options: Any) -> Reward:
    from reward_service.classifier import ClassifierReward

    return ClassifierReward(directory, **options)


if __name__ == "__main__":
    main()
