"""Numbered commands of a stream, each handled once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from specrej import telemetry
from specrej.contracts.errors import InvalidRequest, SessionExpired, Violation
from specrej.server.interceptor import Context


class Numbered(Protocol):
    """A stream message with a sequence number."""

    sequence: int


Request = TypeVar("Request", bound=Numbered)
Response = TypeVar("Response", bound=Numbered)
T = TypeVar("T")


async def answer_commands(
    requests: AsyncIterator[Request],
    context: Context,
    handle: Callable[[Request], Awaitable[Response]],
    stale: Callable[[], Response],
    lease_s: float,
) -> None:
    """Answer a stream's numbered commands until the peer half-closes.

    A repeated number is answered with the previous answer, an older one with `stale()`; neither is
    handled again. The stream ends if the peer neither sends nor reads for `lease_s` seconds.

    Raises:
        SessionExpired: the lease ran out.
        InvalidRequest: a number below 1.
    """
    last: Response | None = None
    answer: Response
    while (request := await leased(anext(requests, None), lease_s)) is not None:
        if request.sequence < 1:
            raise InvalidRequest([Violation("sequence", "must be at least 1")])
        if last is None or request.sequence > last.sequence:
            answer = await handle(request)
            if last is None:
                await context.send_initial_metadata(())
            last = answer
            answer.sequence = request.sequence
        elif request.sequence == last.sequence:
            answer = last
        else:
            answer = stale()
            answer.sequence = request.sequence
        await leased(context.write(answer), lease_s)


async def leased(step: Awaitable[T], lease_s: float) -> T:
    """What a read or a write of the peer returns.

    Raises:
        SessionExpired: the peer took `lease_s` seconds.
    """
    lease = asyncio.timeout(lease_s)
    try:
        async with lease:
            return await step
    except TimeoutError:
        if lease.expired():
            telemetry.metrics.add(telemetry.names.LEASES_EXPIRED)
            raise SessionExpired(f"nothing from the peer for {lease_s:g} s") from None
        raise
