"""All errors that callers receive, as one exception tree.

    SpecrejError
    ├── InvalidRequest     INVALID_ARGUMENT    every violation, with its field's path
    ├── Unauthenticated    UNAUTHENTICATED     missing or unknown token
    ├── PermissionDenied   PERMISSION_DENIED   the token lacks the role
    ├── NotFound           NOT_FOUND           unknown model, reward or request
    ├── RetryableError                         carries a delay
    │   ├── Overloaded     RESOURCE_EXHAUSTED  queue or slots full
    │   └── Unavailable    UNAVAILABLE         loading, draining, backend down
    ├── SessionExpired     FAILED_PRECONDITION the session is closed, or its lease ran out
    ├── OutOfOrder         FAILED_PRECONDITION a command that the session's state forbids
    ├── DeadlineExceeded   DEADLINE_EXCEEDED
    ├── Cancelled          CANCELLED
    └── InternalError      INTERNAL            opaque; RewardInvalid is its only named subclass

`status.py` holds the table to gRPC statuses and back. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

MAX_VIOLATIONS = 20  # listed; a last one has the number of the others


@dataclass(frozen=True, slots=True)
class Violation:
    """An invalid field: its dotted path and the accepted values."""

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
    """The request cannot be served, now or later.

    Reasons besides its own: CONTEXT_EXCEEDED, and SLOTS_EXCEEDED if the prompt and `n` candidates
    never fit into a generator's KV slots; `metadata` has the numbers.
    """

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


def malformed() -> InvalidRequest:
    """The error for bytes that are not a message."""
    return InvalidRequest([Violation("request", "must be a valid message")])


def raise_if_any(violations: Iterable[Violation]) -> None:
    """Raises InvalidRequest if there are violations: the first ones, and the number of others."""
    remaining = iter(violations)
    listed = list(islice(remaining, MAX_VIOLATIONS))
    if num_more := sum(1 for _ in remaining):
        listed.append(Violation("request", f"and {num_more} more"))
    if listed:
        raise InvalidRequest(listed)


class Unauthenticated(SpecrejError):
    """The token is missing, unknown or expired."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(SpecrejError):
    """The token lacks the role for this call, or the certificate an allowed name."""

    reason = "PERMISSION_DENIED"


class NotFound(SpecrejError):
    """Unknown model, reward or request."""

    reason = "NOT_FOUND"


class RetryableError(SpecrejError):
    """May succeed after `retry_after_s` seconds."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, metadata: Mapping[str, str] | None = None
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
    """The session is closed, or its lease ran out; its slots are free."""

    reason = "SESSION_EXPIRED"


class OutOfOrder(SpecrejError):
    """The session's state does not allow this command."""

    reason = "OUT_OF_ORDER"


class DeadlineExceeded(SpecrejError):
    """The deadline passed, perhaps while queued."""

    reason = "DEADLINE_EXCEEDED"


def is_late(left_s: float, total_s: float) -> bool:
    """Whether a call that is cancelled `left_s` seconds before its deadline has missed it.

    grpc cancels late calls, and a client cancels its own at its deadline, of which the server's is
    a rounded copy: later by at most a hundredth of the call's `total_s` seconds.
    """
    return left_s < 0.05 + total_s / 100


class Cancelled(SpecrejError):
    """The call was cancelled."""

    reason = "CANCELLED"


class InternalError(SpecrejError):
    """A bug or a failed device; details are in the server's log only."""


class RewardInvalid(InternalError):
    """A reward returned NaN, infinity, or the wrong number of scores."""

    reason = "REWARD_INVALID"
