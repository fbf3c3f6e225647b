"""Errors as OpenAI's clients expect them: a status, a body, and headers that govern retries."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

from specrej.contracts import errors
from specrej.contracts.status import without_foreign_text

log = logging.getLogger(__name__)


class HTTPError(errors.SpecrejError):
    """A failure of HTTP or of the gateway itself; it may be repeated after `retry_after_s`."""

    def __init__(
        self, status: int, message: str, code: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


# Status, OpenAI's type and code.
_ANSWERS: dict[type[errors.SpecrejError], tuple[int, str, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_value"),
    errors.Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: (403, "permission_error", "permission_denied"),
    errors.NotFound: (404, "invalid_request_error", "not_found"),
    errors.Overloaded: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unavailable: (503, "service_unavailable_error", "unavailable"),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
}
# Of reasons why a request is invalid.
_CODES = {"CONTEXT_EXCEEDED": "context_length_exceeded", "SLOTS_EXCEEDED": "slots_exceeded"}
# Anthropic's types.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"  # the route with Anthropic's bodies
_BUG = (500, "server_error", "internal_error")


def for_caller(error: Exception, where: str) -> errors.SpecrejError:
    """The error without grpc's text; a bug is logged, and becomes an InternalError with its id."""
    if isinstance(error, errors.SpecrejError):
        return without_foreign_text(error, error.__cause__, "the orchestrator")
    error_id = uuid.uuid4().hex
    log.error("bug in %s (error %s)", where, error_id, exc_info=error)
    return errors.InternalError(f"internal error {error_id}")


def body_of(
    error: errors.SpecrejError, name_of: Callable[[str], str] = str
) -> tuple[int, dict[str, Any]]:
    """The status and OpenAI's body; `name_of` returns the caller's field for a path."""
    status, kind, code = _ANSWERS.get(type(error), _BUG)
    message, path = error.message, error.metadata.get("field")
    if isinstance(error, HTTPError):
        status, kind, code = error.status, "invalid_request_error", error.code
    elif isinstance(error, errors.InvalidRequest):
        named = [f"{name_of(item.field)}: {item.description}" for item in error.violations]
        message, path = "; ".join(named), error.violations[0].field
        code = _CODES.get(error.reason, code)
    elif path and name_of(path) == "model":
        code = "model_not_found"
    param = name_of(path) if path else None
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's body for OpenAI's."""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def response_of(
    error: errors.SpecrejError, name_of: Callable[[str], str] = str, route: str = ""
) -> JSONResponse:
    """The response to a request of `route` that failed before its answer began."""
    status, body = body_of(error, name_of)
    if route == MESSAGES:
        body = anthropic_body(status, body)
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    # The orchestrator's client has retried these; another layer would repeat a large N.
    if status in (500, 504) or isinstance(error, errors.Unavailable):
        headers["x-should-retry"] = "false"
    if status in (408, 413):  # the rest of the body is not read
        headers["connection"] = "close"
    return JSONResponse(body, status, headers)
