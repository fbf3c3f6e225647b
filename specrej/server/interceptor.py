"""The interceptor of every server: admits callers, sets deadlines, opens spans, maps errors.

Handlers raise `SpecrejError`s; this is the only place where they become statuses. grpc would answer
a message that it cannot decode with the name of a class, so `messages` decodes them. What peers may
hold by silence or by not reading is bounded by the edge.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import grpc.aio

from specrej import telemetry
from specrej.contracts import errors
from specrej.contracts.status import to_status
from specrej.contracts.validation import check_counts, check_lengths
from specrej.security import OURS, Access, Caller, set_caller
from specrej.server.messages import Context, Handler, reading

log = logging.getLogger(__name__)

# Quoted: the class is generic only for type checkers.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_PUBLIC = f"{OURS}v1."
_RECHECK_S = 2.0  # between two checks of a running call's token
_STATUS_S = 1.0  # for a status to leave

# The deadline of the call in this context, by time.monotonic().
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def time_left_s() -> float | None:
    """Seconds until the deadline of the current call, the client's or the server's default."""
    deadline = _deadline.get()
    return None if deadline is None else deadline - time.monotonic()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Runs each handler in a span, within its deadline, and maps its exception to a status.

    Calls that `access` does not admit are refused here, before any handler, for every method.
    `default_deadline_s` bounds calls without a deadline, `max_deadline_s` those with one; None
    leaves them unbounded. At most `max_calls` of the services run at once.
    """

    def __init__(
        self,
        default_deadline_s: float | None,
        access: Access,
        max_deadline_s: float | None,
        *,
        max_calls: int,
    ) -> None:
        self._default_deadline_s = default_deadline_s
        self._max_deadline_s = max_deadline_s
        self._access = access
        self._max_calls = max_calls
        self._running: Counter[str] = Counter()  # calls of the services, by tenant
        self.idle = asyncio.Event()  # set while no call of a service runs
        self.idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        admit = partial(self._access.admit, details.method, details.invocation_metadata or ())
        try:
            caller = admit()
        except Exception as error:
            # Unauthenticated callers cannot choose span names.
            return self._refuse(details.method if handler else "unknown", error)
        if handler is None:
            return None
        if details.method.startswith(OURS):
            look = check_counts if details.method.startswith(_PUBLIC) else None
            read = reading(handler, lambda m: errors.raise_if_any(check_lengths(m)), look)
            wrapped = self._guard(details.method, read, caller, admit)
        else:
            read = reading(handler, lambda _: None)
            wrapped = self._with_status(details.method, read, admit)
        return grpc.stream_stream_rpc_method_handler(wrapped, None, handler.response_serializer)

    def _refuse(self, method: str, error: Exception) -> RpcHandler:
        async def refuse(request: Any, context: Context) -> None:
            raise error

        return grpc.stream_stream_rpc_method_handler(self._guard(method, refuse, Caller(), Caller))

    def _guard(
        self, method: str, behavior: Handler, caller: Caller, admit: Callable[[], Caller]
    ) -> Handler:
        name = method.lstrip("/")

        async def guarded(request: Any, context: Context) -> Any:
            metadata = context.invocation_metadata() or ()
            left_s = self._deadline_s(context)
            with telemetry.served(name, metadata) as call:
                try:
                    set_caller(caller)
                    _deadline.set(None if left_s is None else time.monotonic() + left_s)
                    with self._counted(caller.tenant):
                        async with asyncio.timeout(left_s), self._admitted(method, context, admit):
                            return await behavior(request, context)
                except Exception as error:
                    await self._abort(context, method, error, call)
                except asyncio.CancelledError as error:
                    call.code = _code_of_cancellation(context, left_s).name
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # The task was not cancelled: without a status the client would wait for ever.
                    await self._abort(context, method, error, call)

        return guarded

    def _with_status(self, method: str, behavior: Handler, admit: Callable[[], Caller]) -> Handler:
        """A handler of health or reflection: without span, with our statuses."""

        async def with_status(request: Any, context: Context) -> Any:
            try:
                async with self._admitted(method, context, admit):
                    return await behavior(request, context)
            except Exception as error:
                await self._abort(context, method, error, telemetry.Call("OK"))

        return with_status

    async def _abort(
        self, context: Context, method: str, error: BaseException, call: telemetry.Call
    ) -> None:
        """End the call with the error's status, which grpc holds back until the client has read all
        earlier messages; what the call holds is free after `_STATUS_S`."""
        code, text, trailers = to_status(_presentable(method, error))
        call.code = code.name
        ending = asyncio.ensure_future(context.abort(code, text, trailers))
        ending.add_done_callback(lambda task: task.cancelled() or task.exception())  # else logged
        await asyncio.wait({ending}, timeout=_STATUS_S)

    @asynccontextmanager
    async def _admitted(
        self, method: str, context: Context, admit: Callable[[], Caller]
    ) -> AsyncIterator[None]:
        """Check the peer, then call `admit` every two seconds; its error ends what runs inside.

        So a token that is revoked or expires ends its open calls.
        """
        # Only here: interceptors do not receive the peer's certificate.
        if self._access.allowed_clients:
            self._access.check_peer(method, context.auth_context())
        loop, refusal = asyncio.get_running_loop(), None
        timer: asyncio.TimerHandle

        # `check` receives itself: a closure over its own name is a cycle of references, which only
        # the garbage collector frees.
        def check(again: Callable[[Any], None]) -> None:
            nonlocal timer, refusal
            try:
                admit()
                timer = loop.call_later(_RECHECK_S, again, again)
            except Exception as error:
                refusal = error
                bound.reschedule(loop.time())

        timer = loop.call_later(_RECHECK_S, check, check)
        try:
            async with asyncio.timeout(None) as bound:
                yield
        except TimeoutError:
            if refusal:
                raise refusal from None
            raise
        finally:
            timer.cancel()

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Raises Overloaded: `max_calls` run, or half as many of a tenant with a name."""
        running = self._running
        if running.total() >= self._max_calls:
            raise _refusal("calls", "too many calls")
        if tenant and running[tenant] >= max(1, self._max_calls // 2):
            raise _refusal("tenant_calls", "too many calls of the tenant")
        running[tenant] += 1
        self.idle.clear()
        try:
            yield
        finally:
            running[tenant] -= 1
            if not running[tenant]:
                del running[tenant]
            if not running:
                self.idle.set()

    def _deadline_s(self, context: Context) -> float | None:
        remaining = context.time_remaining()
        # grpc reports "no deadline" as None or as one many years ahead.
        if remaining is None or remaining > 1e9:
            return self._default_deadline_s
        return min(remaining, self._max_deadline_s or remaining)


def _code_of_cancellation(context: Context, total_s: float | None) -> grpc.StatusCode:
    left_s = context.time_remaining()
    late = left_s is not None and total_s is not None and errors.is_late(left_s, total_s)
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED


def _presentable(method: str, error: BaseException) -> errors.SpecrejError:
    """The error for the caller: a SpecrejError as it is; anything else is logged and opaque."""
    if isinstance(error, errors.SpecrejError):
        return error
    if isinstance(error, TimeoutError):
        return errors.DeadlineExceeded("deadline exceeded")
    if isinstance(error, asyncio.CancelledError):
        log.error("bug in %s: a call was cancelled within the server", method, exc_info=error)
        return errors.Cancelled("cancelled by the server")
    if isinstance(error, grpc.aio.InternalError):
        return errors.Cancelled(
            "the client is gone"
        )  # grpc accepts no message for a call that is over
    request_id = uuid.uuid4().hex
    log.error("bug in %s (error %s)", method, request_id, exc_info=error)
    return errors.InternalError(f"internal error {request_id}", metadata={"error_id": request_id})


def _refusal(reason: str, text: str) -> errors.Overloaded:
    telemetry.metrics.add(telemetry.names.RPC_REFUSED, 1, reason=reason)
    return errors.Overloaded(text, retry_after_s=1.0)
