"""The table between exceptions and gRPC statuses, both ways."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from specrej.contracts import errors, status

VIOLATIONS = (errors.Violation("sampling.top_p", "must be (0, 1]"), errors.Violation("n", "no"))


def example(kind: type[errors.SpecrejError]) -> errors.SpecrejError:
    if issubclass(kind, errors.InvalidRequest):
        return kind(VIOLATIONS, reason="CONTEXT_EXCEEDED", metadata={"limit": "2048"})
    if issubclass(kind, errors.RetryableError):
        return kind("not now", retry_after_s=0.25, metadata={"queue": "8"})
    return kind("what went wrong")


def kinds(of: type[errors.SpecrejError] = errors.SpecrejError) -> list[type[errors.SpecrejError]]:
    """All exceptions of the tree but two base classes; a service may have its own."""
    children = [child for child in of.__subclasses__() if child.__module__ == errors.__name__]
    below = [kind for child in children for kind in kinds(child)]
    return below if of in (errors.SpecrejError, errors.RetryableError) else [of, *below]


def returned(error: errors.SpecrejError) -> errors.SpecrejError:
    code, text, trailers = status.to_status(error)
    return status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(*trailers), text))


@pytest.mark.parametrize("kind", kinds())
def test_every_exception_comes_back_as_itself(kind: type[errors.SpecrejError]) -> None:
    """Guards against a new exception that is missing in one direction of the table; TooLate is an
    Overloaded to its caller."""
    error = example(kind)
    back = returned(error)
    assert type(back) is (errors.Overloaded if kind is errors.TooLate else kind)
    assert (back.message, back.reason) == (error.message, error.reason)
    assert back.retry_after_s == error.retry_after_s
    assert back.__dict__ == error.__dict__  # violations and metadata too
    # grpc reads this trailer by itself.
    assert (status.PUSHBACK_TRAILER in dict(status.to_status(error)[2])) == (
        error.retry_after_s is not None
    )


def test_many_violations_fit_the_trailers() -> None:
    """Guards against trailers beyond 8 KiB, for which clients see RESOURCE_EXHAUSTED instead, and
    a line that stands for no more."""
    violations = [errors.Violation(f"sampling.stop[{i}]", "must not be empty") for i in range(999)]
    with pytest.raises(errors.InvalidRequest) as raised:
        errors.raise_if_any(violations)
    _, text, trailers = status.to_status(raised.value)
    size = len(text) + sum(len(key) + len(value) for key, value in trailers)
    assert size < 8 * 1024
    back = returned(raised.value)
    assert isinstance(back, errors.InvalidRequest)
    assert list(back.violations) == [*violations[:20], errors.Violation("request", "and 979 more")]
    with pytest.raises(errors.InvalidRequest) as raised:
        errors.raise_if_any(iter(violations[:20]))
    assert list(raised.value.violations) == violations[:20]
    errors.raise_if_any([])
    too_many = returned(errors.InvalidRequest(violations))  # of a peer
    assert isinstance(too_many, errors.InvalidRequest)
    assert list(too_many.violations) == violations[:21]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
def test_a_status_without_details_is_still_an_exception(code: grpc.StatusCode) -> None:
    """Guards the errors of proxies and grpc itself, which have no details."""
    back = status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(), "text"))
    assert isinstance(back, errors.SpecrejError)
    assert "text" in back.message


def failure(code: grpc.StatusCode, *trailers: tuple[str, str | bytes]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailers), "Unexpected <class 'X'>: /srv/a.py")


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
def test_text_of_a_foreign_service_is_not_passed_on(code: grpc.StatusCode) -> None:
    """Guards against a class name and a path on their way to a caller, and against a valid request
    that a foreign service makes invalid."""
    error = status.from_backend_error(failure(code), "a reward")
    assert isinstance(error, errors.InternalError | errors.Unavailable | errors.Overloaded)
    assert error.message.startswith("a reward ") and "class" not in error.message


def test_a_message_above_a_limit_is_not_sent_again() -> None:
    """Guards against an overload, which callers retry, and against grpc's text."""
    text = "CLIENT: Received message larger than max (67108900 vs. 67108864)"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = status.from_backend_error(AioRpcError(code, Metadata(), Metadata(), text), "a reward")
    assert isinstance(error, errors.InternalError)
    assert error.message == "a reward failed: message too large"
    text = "received metadata size exceeds hard limit (value length 20000 vs. 16384)"
    error = status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(), text))
    assert isinstance(error, errors.InternalError)
    text = "SERVER: Received message larger than max (9015 vs. 4096)"
    too_large = AioRpcError(code, Metadata(), Metadata(), text)
    error = status.from_rpc_error(too_large)  # the caller's own request
    assert isinstance(error, errors.InvalidRequest) and "9015" not in error.message
    error = status.from_backend_error(too_large, "a reward")
    assert error.message == "a reward failed: message too large"
    busy = status.from_backend_error(failure(code), "a reward")
    assert isinstance(busy, errors.Overloaded) and busy.message == "a reward is busy"


@pytest.mark.parametrize(("seconds", "delay_s"), [(-5, 0.0), (10**11, 3600.0)])
def test_a_peers_delay_is_one_that_can_be_passed_on(seconds: int, delay_s: float) -> None:
    """Guards against an hour that is a century, and a negative one, which means never."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    details = status_pb2.Status(details=[packed]).SerializeToString()
    error = status.from_rpc_error(
        failure(grpc.StatusCode.UNAVAILABLE, (status.DETAILS_TRAILER, details))
    )
    assert error.retry_after_s == delay_s
    status.to_status(error)
