"""Runs the generator service: `python -m generator_service --help`."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from generator_service import instruments
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.toy import is_toy, load_toy
from specrej import telemetry, threads
from specrej.contracts import Generator, Prompt, Sampling, SessionSpec
from specrej.contracts.errors import SpecrejError
from specrej.server.serving import Heartbeat, Server
from specrej.settings import load
from specrej_models.vllm_options import end_children_with_us, prepare_environment

if TYPE_CHECKING:
    from generator_service.engine.generator import LocalGenerator
    from generator_service.stock.generator import StockGenerator


def main() -> None:
    """Serve until a signal."""
    settings = load(GeneratorSettings)
    threads.bound_spinning()
    try:
        with telemetry.configured("generator", settings):
            asyncio.run(_serve(settings))
    except (OSError, RuntimeError, SpecrejError, ValueError) as error:
        raise SystemExit(f"generator: {error}") from error
    threads.leave()


async def _serve(settings: GeneratorSettings) -> None:
    servicer = GeneratorServicer(settings.lease_s)
    server = Server(settings, [servicer.service()], default_deadline_s=settings.deadline_s)

    async def warm_up() -> None:
        generator, heartbeat = await open_generator(settings, resources)
        server.watch(heartbeat)
        servicer.load(generator)

    async with AsyncExitStack() as resources:
        await server.run(warm_up)


async def open_generator(
    settings: GeneratorSettings, resources: AsyncExitStack
) -> tuple[Generator, Heartbeat]:
    """The generator of the settings, and its heartbeat; `resources` closes the generator."""
    if settings.engine == "remote":  # first: its model may have any name
        from generator_service.stock.endpoint import open_endpoint

        remote = await open_endpoint(settings, instruments.count_step)
        resources.push_async_callback(remote.close)
        instruments.observe(remote.load)
        return remote, remote.heartbeat_s
    if is_toy(settings.model):
        toy = load_toy(
            settings.model,
            settings.kv_slots or 100_000,
            settings.max_waiting,
            instruments.count_step,
        )
        instruments.observe(toy.load)
        return toy, lambda: 0.0
    generator = await threads.load(partial(_load_model, settings))
    resources.push_async_callback(_close, generator)
    spec = SessionSpec(Prompt(text="Hello"), 1, Sampling(2, ignore_eos=True), 2)
    async with generator.open(spec) as session:  # first-time work, before the first request
        await session.extend(2)
    instruments.observe(generator.load)
    return generator, generator.heartbeat_s


async def _close(generator: LocalGenerator | StockGenerator) -> None:
    if ending := generator.close():
        await ending


def _load_model(settings: GeneratorSettings) -> LocalGenerator | StockGenerator:
    """The generator on a model's files, which are fetched first if the model is one of the hub.

    Raises:
        OSError, ValueError: the files do not exist, cannot be fetched or cannot be loaded.
    """
    try:
        files = settings.files
    except FileNotFoundError as error:
        hint = "" if "model" in settings.model_fields_set else ": run make models"
        raise FileNotFoundError(f"{error} (SPECREJ_GENERATOR_MODEL){hint}") from None
    if not (files.directory / "config.json").is_file():
        raise FileNotFoundError(f"no model in {files.directory} (SPECREJ_GENERATOR_MODEL)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported here: --help must not load torch, and vLLM has an environment of its own.
    from generator_service.loading import engine_of, load_generator

    if engine_of(settings) == "vllm":
        prepare_environment(settings.threads)
        end_children_with_us()
        from generator_service.stock.vllm import load_vllm

        return load_vllm(settings, instruments.count_step)
    return load_generator(settings, instruments.count_step)


if __name__ == "__main__":
    main()
