"""The health service of every port, and the reports of backends, which are health and more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.contracts.errors import InvalidRequest, NotFound, Unavailable, Violation

_States = health_pb2.HealthCheckResponse
# A watcher that does not read its state for this long is dropped.
_WRITE_S = 5.0


class Health(health_pb2_grpc.HealthServicer):
    """`grpc.health.v1.Health`. No watcher delays another, or a change."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._changed = asyncio.Event()  # replaced at every change

    def set(self, name: str, is_serving: bool) -> None:
        """Set the state of a service."""
        state = _States.SERVING if is_serving else _States.NOT_SERVING
        if self._states.get(name) == state:
            return
        self._states[name] = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def report(
        self, describe: Callable[..., Awaitable[Any]], response: Any, request: Any, context: Any
    ) -> None:
        """Write a response with the description, which the handler `describe` returns, at once and
        in every interval of the request; an empty one if it is as before.

        Raises:
            Unavailable: the server does not serve, or no longer.
        """
        if not request.interval_s > 0:
            raise InvalidRequest([Violation("interval_s", "must be above 0")])
        sent = None
        await context.send_initial_metadata(())
        while self._states.get("") == _States.SERVING:
            changed, described = self._changed, await describe(None, context)
            async with asyncio.timeout(_WRITE_S):
                is_new = described != sent
                await context.write(response(description=described if is_new else None))
            sent = described
            with suppress(TimeoutError):
                async with asyncio.timeout(request.interval_s):
                    await changed.wait()
        raise Unavailable("a service is not serving: it is starting, stopping or stuck")

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in self._states:
            raise NotFound("no such service")
        return _States(status=self._states[request.service])

    # A coroutine, although the stubs declare an async generator; serving.py has the reason.
    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        sent = None
        await context.send_initial_metadata(())
        while True:
            changed = self._changed
            state = self._states.get(request.service, _States.SERVICE_UNKNOWN)
            if state != sent:
                async with asyncio.timeout(_WRITE_S):
                    await context.write(_States(status=state))
                sent = state
            await changed.wait()
