"""The one table between exceptions and gRPC statuses, with rich details in both directions.

Every error carries exactly one ErrorInfo; bad fields a BadRequest; retryable ones a RetryInfo and
the `grpc-retry-pushback-ms` trailer. Other exceptions are INTERNAL with an opaque text.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from specrej.contracts import errors

DOMAIN = "specrej"
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"

# Of several errors with a code, the last one stands for statuses without details.
_CODES: dict[type[errors.SpecrejError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooLate: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.SessionExpired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.RewardInvalid: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

# Parts of grpc's own messages for exceeded sizes, after which the same call would fail again.
_TOO_LARGE = "message larger than max"
_REQUEST_TOO_LARGE = ("SERVER: Received", "CLIENT: Sent")
_TOO_MUCH_METADATA = "metadata size exceeds"

# Limits of the trailers: beyond 8 KiB a client may, beyond 16 KiB it will see RESOURCE_EXHAUSTED
# instead of the status.
_MAX_TEXT_CHARACTERS = 1024

# A longer delay from a peer is passed on as one hour.
_MAX_RETRY_S = 3600.0

Trailers = tuple[tuple[str, str | bytes], ...]


def to_status(error: errors.SpecrejError) -> tuple[grpc.StatusCode, str, Trailers]:
    """Code, text and trailers for an error."""
    code = _CODES[type(error)]
    text = error.message[:_MAX_TEXT_CHARACTERS]
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    trailers: Trailers = ()
    if isinstance(error, errors.InvalidRequest):
        bad = error_details_pb2.BadRequest()
        for violation in error.violations[: errors.MAX_VIOLATIONS + 1]:
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers = ((PUSHBACK_TRAILER, str(round(error.retry_after_s * 1000))),)
    packed = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        packed.details.add().Pack(detail)
    return code, text, (*trailers, (DETAILS_TRAILER, packed.SerializeToString()))


def from_rpc_error(failure: grpc.aio.AioRpcError) -> errors.SpecrejError:
    """The exception a failed call stands for; unknown codes become InternalError."""
    code = failure.code()
    message = failure.details() or code.name
    info, bad, retry = _details(failure)
    metadata = dict(info.metadata)
    delay = retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else 1.0
    delay = min(max(delay, 0.0), _MAX_RETRY_S)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = [errors.Violation(v.field, v.description) for v in bad.field_violations]
            violations = violations or [errors.Violation("request", message)]
            return errors.InvalidRequest(violations, reason=info.reason, metadata=metadata)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _exhausted(message, delay, metadata)
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(message, retry_after_s=delay, metadata=metadata)
    kinds = [kind for kind, of_kind in _CODES.items() if of_kind is code] or [errors.InternalError]
    kind = next((kind for kind in kinds if kind.reason == info.reason), kinds[-1])
    return kind(message, metadata=metadata)


def from_backend_error(failure: Any, backend: str) -> errors.SpecrejError:
    """The error for our caller after a call to `backend` has failed.

    The backend failed, not the caller: cancellations, deadlines, session errors and refused tokens
    of the backend call become Unavailable.
    """
    error = from_rpc_error(failure)
    if isinstance(
        error,
        errors.Cancelled | errors.DeadlineExceeded | errors.SessionExpired | errors.OutOfOrder,
    ):
        text = f": {error.message}" if has_details(failure) else ""
        return errors.Unavailable(f"{backend} gave up{text}")
    if isinstance(error, errors.Unauthenticated | errors.PermissionDenied):
        return errors.Unavailable(f"{backend} refused this service's token or certificate")
    if isinstance(error, errors.NotFound) and not has_details(failure):
        return errors.Unavailable(f"{backend} is not a service of this kind")
    if isinstance(error, errors.InvalidRequest) and not has_details(failure):
        return _failed(failure, backend)  # our caller's request is valid
    return without_foreign_text(error, failure, backend)


def has_details(failure: grpc.aio.AioRpcError) -> bool:
    """Whether one of our services sent this status: grpc's own have no details."""
    return DETAILS_TRAILER in dict(failure.trailing_metadata() or ())


def is_answer(error: errors.SpecrejError) -> bool:
    """Whether the backend of a failed call is there: one of our services sent this error."""
    return isinstance(error.__cause__, grpc.aio.AioRpcError) and has_details(error.__cause__)


def without_foreign_text(
    error: errors.SpecrejError, failure: BaseException | None, backend: str
) -> errors.SpecrejError:
    """The error of a failed call to `backend`, with another text if the call's is not ours.

    A text without our details is grpc's or a foreign service's: it may contain addresses, class
    names and paths.
    """
    is_foreign = isinstance(failure, grpc.aio.AioRpcError) and not has_details(failure)
    if is_foreign and isinstance(error, errors.Unavailable):
        return errors.Unavailable(f"{backend} cannot be reached")
    if is_foreign and isinstance(error, errors.InternalError):
        return _failed(failure, backend)
    if is_foreign and isinstance(error, errors.Overloaded):
        return errors.Overloaded(f"{backend} is busy", retry_after_s=error.retry_after_s or 0.0)
    return error


def _failed(failure: Any, backend: str) -> errors.InternalError:
    is_large = _TOO_LARGE in (failure.details() or "")
    return errors.InternalError(f"{backend} failed{': message too large' * is_large}")


def _exhausted(message: str, delay_s: float, metadata: dict[str, str]) -> errors.SpecrejError:
    if _TOO_LARGE in message and message.startswith(_REQUEST_TOO_LARGE):
        return errors.InvalidRequest(
            [errors.Violation("request", "is larger than the server accepts")]
        )
    if _TOO_LARGE in message or _TOO_MUCH_METADATA in message:
        return errors.InternalError(message)
    return errors.Overloaded(message, retry_after_s=delay_s, metadata=metadata)


def _details(
    failure: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo]:
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_TRAILER:
            with suppress(DecodeError):  # of a foreign peer: only its code is used
                for detail in status_pb2.Status.FromString(value).details:
                    for message in (info, bad, retry):
                        detail.Unpack(message)
    return info, bad, retry
