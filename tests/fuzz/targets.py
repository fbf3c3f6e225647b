"""Parsers of untrusted input, each as a function of bytes that must not fail.

A target returns whether the input was accepted. The errors that a parser documents are caught here;
any other is a finding. Accepted input must survive a round trip where one exists.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from pydantic_settings import SettingsError

from gateway.completions import ChatRequest, CompletionRequest, call_of, parsed
from loadtest.prompts import read_prompts
from orchestrator.cache import Secret, cache_keys, tenant_digest
from orchestrator.cache.answers import _SUMMARY, Summary, pack, unpack
from orchestrator.cache.secret import mac
from orchestrator.loop.composition import check_composites
from orchestrator.settings import OrchestratorSettings
from reward_service.kinds.remote_http import HTTPReward
from reward_service.settings import RewardSettings
from reward_service.specs import HTTPSpec
from specrej import contracts as c
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.client.client import build_request
from specrej.contracts import wire
from specrej.contracts.errors import InvalidRequest, RewardInvalid, SpecrejError
from specrej.contracts.status import DETAILS_TRAILER, from_backend_error, to_status
from specrej.contracts.validation import check_lengths, check_request, check_schedule
from specrej.security import Credentials, read_tokens, watch_token
from specrej.v1 import common_pb2, orchestrator_pb2

Target = Callable[[bytes], bool]

_SECRET = Secret()
_MAX_BYTES = 1 << 16
_CONTEXT, _CANDIDATES, _VOCABULARY = 4096, 1024, 50_000


def request(data: bytes) -> bool:
    """A public request: unpack and validate it; a valid one is packed, compared and keyed."""
    message = _parsed(orchestrator_pb2.GenerateRequest, data)
    if message is None:
        return False
    violations = [*check_lengths(message)]
    unpacked = wire.request_from_message(message, c.Schedule(), violations)
    violations += check_request(unpacked, _CONTEXT, _CANDIDATES, _VOCABULARY)
    if not violations:
        again = wire.request_from_message(
            wire.to_message(unpacked, orchestrator_pb2.GenerateRequest),
            c.Schedule(),
            violations,
        )
        assert (again, violations) == (unpacked, [])
        cache_keys(
            unpacked,
            tenant="t",
            generator_fingerprint="g",
            reward_fingerprint="r",
            secret=_SECRET,
        )
    return not violations


def gateway_request(data: bytes) -> bool:
    """A body of OpenAI's API, as a conversation and as raw text: to the orchestrator's message."""
    is_accepted = False
    for kind in (ChatRequest, CompletionRequest):
        with suppress(InvalidRequest):
            call = call_of(parsed(kind, data), {})
            build_request(call.prompt, **call.options)
            is_accepted = True
    return is_accepted


UNPACKED: Mapping[Any, Callable[[Any], Any]] = {
    orchestrator_pb2.GenerateResponse: wire.generation_from_message,
    orchestrator_pb2.GenerateStreamResponse: wire.event_from_message,
    **{
        message: partial(wire.from_message, contract=contract)
        for message, contract in (
            (common_pb2.Prompt, c.Prompt),
            (common_pb2.Sampling, c.Sampling),
            (common_pb2.SlotGauge, c.SlotGauge),
            (generator_pb2.PrefixBatch, c.Round),
            (common_pb2.GeneratorDescription, c.GeneratorDescription),
            (orchestrator_pb2.RequestRecord, c.RequestRecord),
            (orchestrator_pb2.OrchestratorServiceDescribeResponse, c.ServiceDescription),
            (reward_pb2.RewardDescription, c.RewardDescription),
        )
    },
}


def messages(data: bytes) -> bool:
    """Every other message that is unpacked; the first byte selects it."""
    kinds = list(UNPACKED)
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    message = _parsed(kind, data[1:])
    if message is not None:
        with suppress(ValueError):  # unknown enum numbers and events
            UNPACKED[kind](message)
            return True
    return False


def stored_value(data: bytes) -> bool:
    """A stored value of the cache; a stream, and a text, with a valid MAC."""
    is_accepted = False
    for stream in (data, zlib.compress(data, level=0)):
        with suppress(ValueError):
            unpack("k", stream, _SECRET, _MAX_BYTES)
        with suppress(ValueError):
            entry = unpack("k", mac("k", stream, _SECRET) + stream, _SECRET, _MAX_BYTES)
            stored = pack(entry, "k", _SECRET, 2 * _MAX_BYTES)
            assert unpack("k", stored, _SECRET, 2 * _MAX_BYTES) == entry
            Summary.of(entry)
            is_accepted = True
    return is_accepted


def cache_index(data: bytes) -> bool:
    """An entry of the index of comparable requests."""
    with suppress(ValueError):
        summary = _SUMMARY.validate_json(data)
        assert _SUMMARY.validate_json(_SUMMARY.dump_json(summary)) == summary
        return True
    return False


def composites(data: bytes) -> bool:
    """SPECREJ_ORCHESTRATOR_COMPOSITES."""
    settings = _settings(OrchestratorSettings, "SPECREJ_ORCHESTRATOR_COMPOSITES", data)
    if settings:
        assert not list(check_composites(settings.composites))
    return settings is not None


def schedule(data: bytes) -> bool:
    """SPECREJ_ORCHESTRATOR_DEFAULT_SCHEDULE."""
    settings = _settings(OrchestratorSettings, "SPECREJ_ORCHESTRATOR_DEFAULT_SCHEDULE", data)
    if settings:
        assert not list(check_schedule(settings.default_schedule, ""))
        wire.to_message(settings.default_schedule, orchestrator_pb2.Schedule)
    return settings is not None


def rewards(data: bytes) -> bool:
    """SPECREJ_REWARD_REWARDS."""
    return _settings(RewardSettings, "SPECREJ_REWARD_REWARDS", data) is not None


def prompts(data: bytes) -> bool:
    """A file of prompts."""
    with _file(data) as path, suppress(ValueError):
        assert all(read_prompts(path))
        return True
    return False


def tokens(data: bytes) -> bool:
    """A tokens file; every tenant in it has a cache digest."""
    with _file(data) as path, suppress(ValueError):
        for entry in read_tokens(path).entries.values():
            tenant_digest(entry.caller.tenant)
        return True
    return False


def token(data: bytes) -> bool:
    """A file with a client's token; the token must be valid gRPC metadata."""
    with _file(data) as path, suppress(ValueError):
        watched = watch_token(Credentials(token_file=path))
        assert watched
        assert watched.get().isascii()
        assert watched.get().isprintable()
        return True
    return False


def http_scores(data: bytes) -> bool:
    """The answer of a reward behind HTTP."""
    with suppress(RewardInvalid):
        _far()._scores(200, data)
        return True
    return False


@cache
def _far() -> HTTPReward:
    return HTTPReward(HTTPSpec(name="far", url="http://127.0.0.1:1/"))


class _Failure(grpc.aio.AioRpcError):
    """A failed call with these details."""

    def __init__(self, code: grpc.StatusCode, details: bytes) -> None:
        trailers = grpc.aio.Metadata((DETAILS_TRAILER, details))
        super().__init__(code, grpc.aio.Metadata(), trailers, "details")


def status_details(data: bytes) -> bool:
    """A backend's rich error must become one that can be sent; the first byte is its code."""
    codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    code = codes[data[0] % len(codes)] if data else codes[0]
    error = from_backend_error(_Failure(code, data[1:]), "a backend")
    assert isinstance(error, SpecrejError)
    to_status(error)
    return True


TARGETS: Mapping[str, Target] = {
    target.__name__: target
    for target in (
        request,
        gateway_request,
        messages,
        stored_value,
        cache_index,
        composites,
        schedule,
        rewards,
        prompts,
        tokens,
        token,
        http_scores,
        status_details,
    )
}


def _parsed(kind: Any, data: bytes) -> Any:
    """Return the message, or None for malformed bytes, which the interceptor rejects."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _settings(kind: Any, variable: str, data: bytes) -> Any:
    """Return the settings, or None if they are invalid and the process would end."""
    text = data.decode("utf-8", "replace").replace("\0", "")
    os.environ[variable] = text
    try:
        return kind()
    except (ValidationError, SettingsError):
        return None
    finally:
        del os.environ[variable]


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=memory if memory.is_dir() else None) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)
