"""`specrej health`: a probe by a command, where a platform's own probes speak no TLS."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.channel import open_channel
from specrej.cli_credentials import takes_credentials
from specrej.cli_run import note
from specrej.credentials import Credentials


@takes_credentials
def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of any of the services.")],
    service: Annotated[
        str, typer.Option(help="The name to ask for, or liveness; empty: readiness.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most.")] = 5.0,
    *,
    credentials: Credentials,
) -> None:
    """Ask a service for its health: exit code 0 if it is SERVING, else 1."""
    try:
        state = asyncio.run(_state(address, service, timeout, credentials))
    except grpc.aio.AioRpcError as error:
        state = f"{error.code().name} {error.details()}"
    except (OSError, ValueError) as error:
        state = str(error)
    if state != "SERVING":
        note(f"specrej: {state}")
        raise typer.Exit(1)


async def _state(address: str, service: str, timeout_s: float, credentials: Credentials) -> str:
    """Raises AioRpcError: nobody there, or not by that name; OSError, ValueError: credentials."""
    async with open_channel(address, retries=False, **credentials) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(request, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
