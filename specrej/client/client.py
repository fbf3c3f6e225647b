"""The typed client of the public API.

It builds messages from plain arguments, returns the contract's values and raises the exceptions of
`errors.py`. Validation is the server's, which reports all violations at once. An omitted argument
stays absent on the wire, so that the server's default applies. Each call has an OpenTelemetry span,
which costs next to nothing unless the application records it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from typing import Any, Self, TypedDict, TypeVar, Unpack, cast

import grpc.aio
from google.protobuf.message import Message as ProtobufMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej import contracts as c
from specrej.client.channel import check_address, open_channel
from specrej.client.options import accepted, json_text, shown, value_of
from specrej.contracts import Options as Options
from specrej.contracts import errors, wire
from specrej.contracts.status import from_rpc_error
from specrej.security import Credentials, check_token
from specrej.telemetry import ClientSpan
from specrej.v1 import common_pb2, orchestrator_pb2, orchestrator_pb2_grpc

# One user turn, a whole prompt, or a conversation; mappings have the fields of a Message.
PromptLike = str | c.Prompt | Sequence[c.Message | Mapping[str, str]]
M = TypeVar("M", bound=ProtobufMessage)
A = TypeVar("A")
T = TypeVar("T")

# Names in lower case, and values.
Metadata = Sequence[tuple[str, str]]
# Converting so many bytes of an event takes some milliseconds.
_LARGE_BYTES = 8192
_LONGEST_S = 1e8  # three years: grpc counts nanoseconds in 64 bits
_NAME, _TEXT = re.compile("[0-9a-z_.-]+(?<!-bin)"), re.compile("[ -~]*")


class CallOptions(TypedDict, total=False):
    """Of one call."""

    timeout_s: float | None  # to its deadline; None: the client's
    token: str  # replaces that of the client
    metadata: Metadata  # sent with it


@dataclass(frozen=True, slots=True)
class Retries:
    """Repeats a call that ends with an error of `on` before its first event.

    The wait is what the server's RetryInfo demands (1 s if it sends none), and up to a fifth more
    at random. If that is above `max_wait_s`, or ends after the call's deadline, the error is
    raised. The server identifies a request by its content: a repeated one joins an equal one that
    still runs, or receives its stored answer, unless its `cache` is bypass or refresh.
    """

    attempts: int = 4  # in all
    max_wait_s: float = 10.0
    on: tuple[type[errors.RetryableError], ...] = (errors.Unavailable, errors.Overloaded)

    def __post_init__(self) -> None:
        """Raises ValueError: a value out of range."""
        if self.attempts < 1 or not self.max_wait_s >= 0:
            raise ValueError("attempts must be 1 or more, max_wait_s 0 or more")


# Of clients that were given none.
_DEFAULT = Retries(on=(errors.Unavailable,))


class _Attempts:
    """The attempts of one call, all before its deadline in `timeout_s` seconds."""

    def __init__(self, retries: Retries | None, timeout_s: float) -> None:
        self._retries = retries or _DEFAULT
        self._num_failed = 0
        self._deadline = time.monotonic() + min(timeout_s, _LONGEST_S)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self._deadline - time.monotonic()

    async def after(self, error: errors.SpecrejError) -> None:
        """Wait for the next attempt; raises the error if there is none."""
        self._num_failed += 1
        retries, wait_s = self._retries, error.retry_after_s
        if wait_s is None or not isinstance(error, retries.on):
            raise error
        least_s, wait_s = wait_s, wait_s * random.uniform(1, 1.2)
        is_last = self._num_failed >= retries.attempts
        if is_last or least_s > retries.max_wait_s or wait_s >= self.left_s:
            raise error
        await asyncio.sleep(wait_s)


def build_request(prompt: PromptLike, **options: Any) -> orchestrator_pb2.GenerateRequest:
    """The message for a prompt and options by their names, see `declared_options`.

    Options also take the texts of their flags, such as `algorithm="best-of-n"`,
    `rewards="relevance"` and `schedule="geometric:64,2"`, and mappings of their fields. `rewards`
    may map names to weights, `logit_bias` token ids to biases; a mapping for `structured_output` is
    a JSON Schema. A reward's `data` may be any JSON value; a text is one of JSON.

    Raises:
        TypeError: an unknown option.
        InvalidRequest: a value that no message can hold, such as a number beyond 64 bits, or of
            another type.
    """
    if unknown := options.keys() - c.declared_options().keys():
        known = [get_close_matches(name, c.declared_options(), 1) for name in sorted(unknown)]
        hint = "".join(f"; did you mean {near}?" for near in chain.from_iterable(known))
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}{hint}")
    given = {name: _parsed(name, value) for name, value in options.items() if value is not None}
    if isinstance(rewards := given.get("rewards"), Mapping):
        given["rewards"] = [c.WeightedReward(name, weight) for name, weight in rewards.items()]
    if isinstance(biases := given.get("logit_bias"), Mapping):
        given["logit_bias"] = [c.TokenBias(token_id, bias) for token_id, bias in biases.items()]
    request = _part(c.GenerationRequest, given, orchestrator_pb2.GenerateRequest)
    request.sampling.CopyFrom(_part(c.Sampling, given, common_pb2.Sampling, "sampling."))
    selection = _part(c.Selection, given, orchestrator_pb2.Selection, "selection.")
    request.selection.CopyFrom(selection)
    with _valid("prompt"):
        request.prompt.CopyFrom(_prompt(prompt))
    return request


def _parsed(name: str, value: Any) -> Any:
    """An option's value, from a text if it is one; several values may be one."""
    option = c.declared_options()[name]
    with _valid(option.path):
        if not isinstance(option.default, tuple):
            is_schema = name == "structured_output" and isinstance(value, Mapping)
            return c.JsonSchema(json_text(value)) if is_schema else value_of(name, value)
        if isinstance(value, Mapping):
            return value
        several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        return [value_of(name, one) for one in (value if several else [value])]


def _part(contract: Any, given: Mapping[str, Any], message: type[M], path: str = "") -> M:
    """The message with those options that are fields of the contract.

    Raises:
        InvalidRequest: the first value that the message cannot hold.
    """
    try:
        return wire.part_to_message(contract, given, message)
    except (AttributeError, TypeError, ValueError):
        for name, value in given.items():
            with _valid(path + name):
                try:
                    wire.part_to_message(contract, {name: value}, message)
                except (AttributeError, TypeError):
                    raise ValueError(f"must be {accepted(name)}, is {shown(name, value)}") from None
        raise


@contextmanager
def _valid(path: str) -> Iterator[None]:
    """Raises InvalidRequest: a value that no message can hold."""
    try:
        yield
    except ValueError as error:
        raise errors.InvalidRequest([errors.Violation(path, str(error))]) from None


class Client:
    """A client of the orchestrator at `address` ("host:port"), connected for its context.

    Create it inside a running event loop; it connects at the first call.

    Every call has a deadline of `timeout_s` seconds, or its own. Without `retries`, a call to an
    unavailable server is sent four times in all. `credentials` are the fields of
    `specrej.security.Credentials`: tokens, TLS and client certificates. A call's own `token`
    replaces theirs; its `metadata` is sent with it.

    A call that fails raises a SpecrejError, whose subclasses are in `specrej.contracts.errors`.

    Raises:
        InvalidRequest: the address is one of HTTP, or the credentials cannot be used with it.
    """

    _service = "specrej.v1.OrchestratorService"

    def __init__(
        self,
        address: str = "127.0.0.1:50050",
        *,
        timeout_s: float = 300.0,
        retries: Retries | None = None,
        **credentials: Unpack[Credentials],
    ) -> None:
        with _valid("address"):
            check_address(address)
        try:
            self._channel = open_channel(address, **credentials)
        except (OSError, ValueError) as error:
            raise errors.InvalidRequest([errors.Violation("credentials", str(error))]) from error
        self._timeout_s, self._retries = timeout_s, retries
        self._address, self._credentials = address, credentials
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
        self._stub.Generate = self._channel.unary_unary(
            f"/{self._service}/Generate", orchestrator_pb2.GenerateRequest.SerializeToString
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running calls and disconnect."""
        await self._channel.close()

    async def generate(self, /, prompt: PromptLike, **options: Any) -> c.Generation:
        """The best answer. `options`: of the request, see `build_request`, and `CallOptions`."""
        return await _in_thread(answer_of, await self.reply(prompt, **options))

    async def reply(self, /, prompt: PromptLike, **options: Any) -> bytes:
        """The best answer as it was received; `answer_of` converts it, to ten times the memory."""
        call = _taken(options)
        reply: bytes = await self._call("Generate", build_request(prompt, **options), **call)
        return reply

    async def stream(
        self,
        /,
        prompt: PromptLike,
        *,
        progress: bool = False,
        text_deltas: bool = False,
        texts: bool = False,
        **options: Any,
    ) -> AsyncGenerator[c.Event, None]:
        """`generate` with an event at admission and after every round; `Finished` is the last.

        With `progress` there are `Progress` events within rounds; with `text_deltas` the answer's
        text comes in `TextDelta` events once one candidate is certain to win; with `texts` rounds
        have the texts of their candidates. Leaving the loop early cancels the call and frees its
        slots, at once under `contextlib.aclosing`.
        """
        call_options = _taken(options)
        request = orchestrator_pb2.GenerateStreamRequest(
            request=build_request(prompt, **options),
            progress=progress,
            text_deltas=text_deltas,
            texts=texts,
        )
        attempts = self._attempts(call_options.get("timeout_s"))
        event: c.Event | None = None
        while not isinstance(event, c.Finished):
            try:
                with _calling(f"{self._service}/GenerateStream") as span:
                    sent = self._metadata(span, call_options)
                    call = self._stub.GenerateStream(
                        request, timeout=attempts.left_s, metadata=sent
                    )
                    try:
                        async for message in call:
                            if message.ByteSize() > _LARGE_BYTES:
                                event = await _in_thread(wire.event_from_message, message)
                            else:
                                event = wire.event_from_message(message)
                            if isinstance(event, c.Finished):  # after which callers may leave
                                span.end(grpc.StatusCode.OK.name)
                            yield event
                    finally:
                        call.cancel()
                if not isinstance(event, c.Finished):
                    raise errors.InternalError("the stream ended without an answer")
            except errors.SpecrejError as error:
                if isinstance(event, c.Finished):  # the answer is there; only its status is lost
                    return
                if event:
                    raise
                await attempts.after(error)

    async def score(
        self,
        prompt: PromptLike,
        responses: Sequence[str],
        *,
        reward: str = "",
        unfinished: bool = False,
        data: Any = "",
        **call: Unpack[CallOptions],
    ) -> c.Scores:
        """One score per response, in order; higher is better. `reward` "": the default one.

        `unfinished`: the responses are beginnings of answers. `data`: JSON for rewards that take
        it; a text is one of JSON.
        """
        with _valid("data"):
            text = json_text(data)
        with _valid("request"):
            request = orchestrator_pb2.OrchestratorServiceScoreRequest(
                reward=reward,
                prompt=_prompt(prompt),
                responses=[responses] if isinstance(responses, str) else responses,
                unfinished=unfinished,
                data=text,
            )
        answer = await self._call("Score", request, **call)
        return c.Scores(tuple(answer.scores), answer.computed_tokens, reward=answer.reward)

    async def describe(self, **call: Unpack[CallOptions]) -> c.ServiceDescription:
        """Models, rewards, limits and defaults."""
        request = orchestrator_pb2.OrchestratorServiceDescribeRequest()
        answer = await self._call("Describe", request, **call)
        return wire.from_message(answer, c.ServiceDescription)

    async def is_serving(self, *, timeout_s: float = 1.0) -> bool:
        """Whether the orchestrator reports that it serves; needs no token."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=self._service)
        try:
            answer = await stub.Check(request, timeout=min(timeout_s, _LONGEST_S))
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _attempts(self, timeout_s: float | None) -> _Attempts:
        return _Attempts(self._retries, self._timeout_s if timeout_s is None else timeout_s)

    async def _call(
        self, method: str, request: ProtobufMessage, **call: Unpack[CallOptions]
    ) -> Any:
        """The answer to a unary call."""
        attempts, start = self._attempts(call.get("timeout_s")), getattr(self._stub, method)
        while True:
            try:
                with _calling(f"{self._service}/{method}") as span:
                    sent = self._metadata(span, call)
                    return await start(request, timeout=attempts.left_s, metadata=sent)
            except errors.SpecrejError as error:
                await attempts.after(error)

    def _metadata(self, span: ClientSpan, call: CallOptions) -> Metadata:
        """Raises Unauthenticated: the token is malformed, or may not be sent in plaintext.
        InvalidRequest: gRPC cannot send a name or value, or the name is `authorization`.
        """
        token, metadata = call.get("token", ""), call.get("metadata", ())
        for name, value in metadata:
            if name == "authorization":
                raise errors.InvalidRequest(
                    [errors.Violation(f"metadata {name!a}", "pass token instead")]
                )
            if not (_NAME.fullmatch(name) and _TEXT.fullmatch(value)):
                accepted = "lower-case names without -bin, and printable ASCII"
                raise errors.InvalidRequest(
                    [errors.Violation(f"metadata {name!a}", f"gRPC sends {accepted}")]
                )
        if not token:
            return (*span.metadata, *metadata)
        try:
            check_token(token, self._address, self._credentials)
        except ValueError as error:
            raise errors.Unauthenticated(str(error)) from None
        return (*span.metadata, *metadata, ("authorization", f"Bearer {token}"))


def _taken(options: dict[str, Any]) -> CallOptions:
    """The options of the call, taken out."""
    names = options.keys() & CallOptions.__annotations__
    return cast(CallOptions, {name: options.pop(name) for name in names})


def _prompt(prompt: PromptLike) -> common_pb2.Prompt:
    """Raises ValueError: it is none, or its texts are not Unicode."""
    if isinstance(prompt, str):
        prompt = c.Prompt.from_user(prompt)
    try:
        if isinstance(prompt, c.Prompt):
            return wire.to_message(prompt, common_pb2.Prompt)
        turns = (
            c.Message(**dict[str, Any](turn)) if isinstance(turn, Mapping) else turn
            for turn in prompt
        )
        return wire.to_message(c.Prompt(messages=tuple(turns)), common_pb2.Prompt)
    except TypeError:
        accepted = "a text, a Prompt, or messages of role and content"
        raise ValueError(f"must be {accepted}, is {prompt!r:.100}") from None


def answer_of(reply: bytes) -> c.Generation:
    """The answer in a reply of `Client.reply`."""
    message = orchestrator_pb2.GenerateResponse.FromString(reply)
    return wire.generation_from_message(message)


async def _in_thread(convert: Callable[[A], T], message: A) -> T:
    """Convert a large message beside the event loop, or in it once the main thread has ended."""
    try:
        return await asyncio.to_thread(convert, message)
    except RuntimeError:  # executors accept no more work
        return convert(message)


@contextmanager
def _calling(method: str) -> Iterator[ClientSpan]:
    """One call with its span; a failure is raised as a SpecrejError."""
    span = ClientSpan(method)
    try:
        yield span
        span.end(grpc.StatusCode.OK.name)
    except grpc.aio.AioRpcError as failure:
        span.end(failure.code().name)
        raise from_rpc_error(failure) from failure
    finally:
        span.end(grpc.StatusCode.CANCELLED.name)  # no effect if it has ended already
