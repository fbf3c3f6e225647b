"""Runs the gateway: `python -m gateway --help`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.app import Gateway
from gateway.server import Server
from gateway.settings import GatewaySettings
from specrej import telemetry
from specrej.client import Client
from specrej.settings import load


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load(GatewaySettings)
    try:
        with telemetry.configured(
            "gateway", settings, scraped=settings.serves_metrics
        ) as exposition:
            asyncio.run(_serve(settings, exposition))
    except OSError as error:
        raise SystemExit(f"gateway: {error}") from error


async def _serve(settings: GatewaySettings, exposition: Callable[[], bytes]) -> None:
    address, credentials = settings.orchestrator_address, settings.orchestrator_credentials
    async with Client(address, timeout_s=settings.deadline_s, **credentials) as client:
        await Server(settings, client, Gateway(settings, client, exposition)).run()


if __name__ == "__main__":
    main()
