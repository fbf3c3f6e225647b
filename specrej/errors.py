"""Everything a caller can be told, as one exception tree.

    SpecrejError
    ├── InvalidRequest     INVALID_ARGUMENT    every violation, with its field's path
    ├── Unauthenticated    UNAUTHENTICATED     no token, or one that nobody was given
    ├── PermissionDenied   PERMISSION_DENIED   a token that is not for this
    ├── NotFound           NOT_FOUND           unknown model, reward or request
    ├── Overloaded         RESOURCE_EXHAUSTED  queue or slots full; carries a delay
    ├── Unavailable        UNAVAILABLE         loading, draining, backend down; carries a delay
    ├── SessionExpired     FAILED_PRECONDITION the session's lease ran out
    ├── OutOfOrder         FAILED_PRECONDITION a command that its session's state forbids
    ├── DeadlineExceeded   DEADLINE_EXCEEDED
    ├── Cancelled          CANCELLED
    └── InternalError      INTERNAL            opaque; RewardInvalid is its one named kind

`status.py` holds the table to gRPC statuses and back.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A bad field: its dotted path and what it must be."""

    field: str
    description: str


class SpecrejError(Exception):
    """Base of all errors a caller sees. `reason` is stable and machine readable."""

    reason = "INTERNAL"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})


class InvalidRequest(SpecrejError):
    """The request cannot be served, now or later."""

    reason = "INVALID_REQUEST"

    def __init__(
        self,
        violations: Sequence[Violation],
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        super().__init__(text, metadata=metadata)
        self.violations = tuple(violations)
        if reason:
            self.reason = reason


class Unauthenticated(SpecrejError):
    """No token, or one that nobody was given."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(SpecrejError):
    """The token is known and not for this."""

    reason = "PERMISSION_DENIED"


class NotFound(SpecrejError):
    """Unknown model, reward or request."""

    reason = "NOT_FOUND"


class RetryableError(SpecrejError):
    """May succeed after `retry_after_s` seconds."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, metadata=metadata)
        self.retry_after_s = retry_after_s


class Overloaded(RetryableError):
    """Queue or slots are full."""

    reason = "OVERLOADED"


class TooLate(Overloaded):
    """The queue is too long for this caller's deadline; to the caller it is an Overloaded."""


class Unavailable(RetryableError):
    """Loading, draining, or a backend is down."""

    reason = "UNAVAILABLE"


class SessionExpired(SpecrejError):
    """The session's lease ran out and its slots are free."""

    reason = "SESSION_EXPIRED"


class OutOfOrder(SpecrejError):
    """The session's state does not allow this command."""

    reason = "OUT_OF_ORDER"


class DeadlineExceeded(SpecrejError):
    """The deadline passed, perhaps while queued."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(SpecrejError):
    """The call was cancelled."""

    reason = "CANCELLED"


class InternalError(SpecrejError):
    """A bug or a failed device; details are in the server's log only."""

    reason = "INTERNAL"


class RewardInvalid(InternalError):
    """A reward returned NaN, infinity, or the wrong number of scores."""

    reason = "REWARD_INVALID"
