"""Runs the generator service: `python -m generator_service --help`."""

from __future__ import annotations

import asyncio
import os

from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.toy import ToyGenerator
from specrej import telemetry
from specrej.contracts import Generator
from specrej.serving import Server
from specrej.settings import load


def main() -> None:
    """Serve until told to stop."""
    settings = load(GeneratorSettings)
    telemetry.configure("generator", settings.otlp_endpoint, settings.log_level)
    try:
        asyncio.run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"generator: {error}") from error


async def _serve(settings: GeneratorSettings) -> None:
    servicer = GeneratorServicer(settings.lease_s)

    async def warm_up() -> None:
        servicer.load(await asyncio.to_thread(_load, settings))

    await Server(settings, [servicer.service()]).run(warm_up)


def _load(settings: GeneratorSettings) -> Generator:
    if settings.model == "toy":
        return ToyGenerator(settings.kv_slots or 100_000)
    if not (settings.model_directory / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {settings.model} (SPECREJ_GENERATOR_MODEL): run make models"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Here, so that --help and a bad setting answer at once.
    from generator_service.loading import load_generator

    return load_generator(settings)


if __name__ == "__main__":
    main()
