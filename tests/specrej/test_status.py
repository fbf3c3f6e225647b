"""The table between exceptions and gRPC statuses, both ways."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from specrej import errors
from specrej.status import (
    DETAILS_TRAILER,
    PUSHBACK_TRAILER,
    from_backend_error,
    from_rpc_error,
    to_status,
)

VIOLATIONS = (errors.Violation("sampling.top_p", "must be (0, 1]"), errors.Violation("n", "no"))


def example(kind: type[errors.SpecrejError]) -> errors.SpecrejError:
    if issubclass(kind, errors.InvalidRequest):
        return kind(VIOLATIONS, reason="CONTEXT_EXCEEDED", metadata={"limit": "2048"})
    if issubclass(kind, errors.RetryableError):
        return kind("not now", retry_after_s=0.25, metadata={"queue": "8"})
    return kind("what went wrong")


def kinds(of: type[errors.SpecrejError] = errors.SpecrejError) -> list[type[errors.SpecrejError]]:
    """Every exception that a caller can be told; not the two that only group others, nor the one
    that is another to its caller."""
    below = [kind for child in of.__subclasses__() for kind in kinds(child)]
    untold = (errors.SpecrejError, errors.RetryableError, errors.TooLate)
    return below if of in untold else [of, *below]


def returned(error: errors.SpecrejError) -> errors.SpecrejError:
    code, text, trailers = to_status(error)
    return from_rpc_error(AioRpcError(code, Metadata(), Metadata(*trailers), text))


@pytest.mark.parametrize("kind", kinds())
def test_every_exception_comes_back_as_itself(kind: type[errors.SpecrejError]) -> None:
    """Guards against a new exception that is missing in one direction of the table."""
    error = example(kind)
    back = returned(error)
    assert type(back) is kind
    assert (back.message, back.reason) == (error.message, error.reason)
    assert back.retry_after_s == error.retry_after_s


def test_who_is_too_late_for_the_queue_is_told_that_it_is_full() -> None:
    """Guards callers, who know the one, against a status that is a bug."""
    error = errors.TooLate("not now", retry_after_s=0.25)
    back = returned(error)
    assert type(back) is errors.Overloaded
    assert (back.message, back.reason) == ("not now", "OVERLOADED")
    assert back.retry_after_s == 0.25


def test_details_survive() -> None:
    """Guards against rich details that are packed and never unpacked."""
    back = returned(example(errors.InvalidRequest))
    assert isinstance(back, errors.InvalidRequest)
    assert back.violations == VIOLATIONS
    assert back.metadata == {"limit": "2048"}
    assert returned(example(errors.Overloaded)).metadata == {"queue": "8"}


def test_retryable_errors_push_back() -> None:
    """Guards against clients that retry at once; grpc reads this trailer by itself."""
    _, _, trailers = to_status(example(errors.Unavailable))
    assert dict(trailers)[PUSHBACK_TRAILER] == "250"
    _, _, trailers = to_status(example(errors.NotFound))
    assert PUSHBACK_TRAILER not in dict(trailers)


def test_many_violations_fit_the_trailers() -> None:
    """Guards against trailers beyond 8 KiB, for which clients see RESOURCE_EXHAUSTED instead."""
    violations = [errors.Violation(f"sampling.stop[{i}]", "must not be empty") for i in range(999)]
    _, text, trailers = to_status(errors.InvalidRequest(violations))
    size = len(text) + sum(len(key) + len(value) for key, value in trailers)
    assert size < 8 * 1024
    back = returned(errors.InvalidRequest(violations))
    assert isinstance(back, errors.InvalidRequest)
    assert list(back.violations[:5]) == violations[:5]
    assert "more" in back.violations[-1].description


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
def test_a_status_without_details_is_still_an_exception(code: grpc.StatusCode) -> None:
    """Guards against proxies and grpc itself, whose errors carry no details."""
    back = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), "said"))
    assert isinstance(back, errors.SpecrejError)
    assert "said" in back.message


def test_the_trailer_is_binary() -> None:
    """Guards against details that grpc refuses to send: bytes need a -bin key."""
    _, _, trailers = to_status(example(errors.InvalidRequest))
    assert isinstance(dict(trailers)[DETAILS_TRAILER], bytes)


def failure(code: grpc.StatusCode, *trailers: tuple[str, str | bytes]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailers), "Unexpected <class 'X'>: /srv/a.py")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL])
def test_what_a_service_that_is_none_of_ours_says_of_itself_stays_here(
    code: grpc.StatusCode,
) -> None:
    """Guards against a class name and a path on their way to a caller."""
    error = from_backend_error(failure(code), "a reward")
    assert isinstance(error, errors.InternalError)
    assert error.message == "a reward failed"


@pytest.mark.parametrize("details", [b"\xff\xff", b"\x1a\x05abc"])
def test_details_that_cannot_be_read_are_none(details: bytes) -> None:
    """Found by fuzzing: a peer's malformed trailer was a bug of ours instead of its status."""
    told = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, (DETAILS_TRAILER, details))
    assert isinstance(from_rpc_error(told), errors.Overloaded)


@pytest.mark.parametrize(("seconds", "told"), [(-5, 0.0), (10**11, 3600.0)])
def test_a_peers_delay_is_one_that_can_be_passed_on(seconds: int, told: float) -> None:
    """Guards against an hour that is a century, and a negative one, which means never."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    details = status_pb2.Status(details=[packed]).SerializeToString()
    error = from_rpc_error(failure(grpc.StatusCode.UNAVAILABLE, (DETAILS_TRAILER, details)))
    assert error.retry_after_s == told
    to_status(error)
