"""Parsers of what others wrote, each as a function of bytes that must not fail.

What a parser documents that it raises is caught here, and nothing else: whatever comes out is a
finding. What a parser accepts must survive the way there and back, where there is one.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from pydantic_settings import SettingsError

from loadtest.prompts import read_prompts
from orchestrator import family
from orchestrator.composition import check_composites
from orchestrator.envelope import pack, unpack
from orchestrator.keys import cache_keys, tenant_digest
from orchestrator.settings import OrchestratorSettings
from reward_service.remote_http import HTTPReward
from reward_service.settings import RewardSettings
from specrej import contracts as c
from specrej import wire
from specrej.credentials import Credentials, watch_token
from specrej.errors import RewardInvalid, SpecrejError, Violation
from specrej.security import read_tokens
from specrej.status import DETAILS_TRAILER, from_backend_error, to_status
from specrej.v1 import common_pb2, generator_pb2, orchestrator_pb2, reward_pb2
from specrej.validation import check_request, check_schedule

Target = Callable[[bytes], None]

_MAX_BYTES = 1 << 16
_CONTEXT, _CANDIDATES = 4096, 1024


def request(data: bytes) -> None:
    """The public request: unpacked, checked, and if it is good, packed, compared and keyed."""
    message = _parsed(orchestrator_pb2.GenerateRequest, data)
    if message is None:
        return
    violations: list[Violation] = []
    found = wire.request_from_wire(message, c.Schedule(), violations)
    violations += check_request(found, _CONTEXT, _CANDIDATES)
    if not violations:
        again = wire.request_from_wire(wire.request_to_wire(found), c.Schedule(), violations)
        assert (again, violations) == (found, [])
        cache_keys(found, tenant="t", generator_fingerprint="g", reward_fingerprint="r")


_UNPACKED: Mapping[Any, Callable[[Any], Any]] = {
    common_pb2.Prompt: wire.prompt_from_wire,
    common_pb2.Sampling: wire.sampling_from_wire,
    common_pb2.SlotGauge: wire.gauge_from_wire,
    generator_pb2.PrefixBatch: wire.round_from_wire,
    generator_pb2.GeneratorServiceDescribeResponse: wire.generator_from_wire,
    orchestrator_pb2.GenerateResponse: wire.generation_from_wire,
    orchestrator_pb2.GenerateStreamResponse: wire.event_from_wire,
    orchestrator_pb2.RequestRecord: wire.record_from_wire,
    orchestrator_pb2.OrchestratorServiceDescribeResponse: wire.service_from_wire,
    reward_pb2.RewardDescription: wire.reward_from_wire,
}


def messages(data: bytes) -> None:
    """Every other message that is unpacked; the first byte says which."""
    kinds = list(_UNPACKED)
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    message = _parsed(kind, data[1:])
    if message is not None:
        with suppress(ValueError):  # enum numbers and events that nobody knows
            _UNPACKED[kind](message)


def stored_value(data: bytes) -> None:
    """A value of the cache as it lies there, and one whose checksum is right."""
    for stored in (data, zlib.compress(data, level=0)):
        with suppress(ValueError):
            envelope = unpack("k", stored, _MAX_BYTES)
            assert unpack("k", pack(envelope, 2 * _MAX_BYTES), 2 * _MAX_BYTES) == envelope
            family.member_of(envelope)


def family_index(data: bytes) -> None:
    """An entry of a family's index."""
    if member := family.unpacked(data):
        assert family.unpacked(family.packed(member)) == member


def composites(data: bytes) -> None:
    """SPECREJ_ORCHESTRATOR_COMPOSITES."""
    if settings := _settings(OrchestratorSettings, "SPECREJ_ORCHESTRATOR_COMPOSITES", data):
        assert not list(check_composites(settings.composites))


def schedule(data: bytes) -> None:
    """SPECREJ_ORCHESTRATOR_DEFAULT_SCHEDULE."""
    if settings := _settings(OrchestratorSettings, "SPECREJ_ORCHESTRATOR_DEFAULT_SCHEDULE", data):
        assert not list(check_schedule(settings.default_schedule, ""))
        wire.schedule_to_wire(settings.default_schedule)


def rewards(data: bytes) -> None:
    """SPECREJ_REWARD_REWARDS."""
    _settings(RewardSettings, "SPECREJ_REWARD_REWARDS", data)


def prompts(data: bytes) -> None:
    """A file of prompts."""
    with _file(data) as path, suppress(ValueError):
        assert all(read_prompts(path))


def tokens(data: bytes) -> None:
    """A tokens file; whoever it lets in has a cache of its own."""
    with _file(data) as path, suppress(ValueError):
        for entry in read_tokens(path):
            tenant_digest(entry.caller.tenant)


def token(data: bytes) -> None:
    """A file with a token to send: what is read can be metadata."""
    with _file(data) as path, suppress(ValueError):
        watched = watch_token(Credentials(token_file=path))
        assert watched
        assert watched.get().isascii()
        assert watched.get().isprintable()


def http_scores(data: bytes) -> None:
    """What a reward behind HTTP answers."""
    with suppress(RewardInvalid):
        _far()._numbers(200, data)


@cache
def _far() -> HTTPReward:
    return HTTPReward("far", "http://127.0.0.1:1/")


class _Failure(grpc.aio.AioRpcError):
    """A call that ended with these details."""

    def __init__(self, code: grpc.StatusCode, details: bytes) -> None:
        trailers = grpc.aio.Metadata((DETAILS_TRAILER, details))
        super().__init__(code, grpc.aio.Metadata(), trailers, "told")


def status_details(data: bytes) -> None:
    """A backend's rich error: ours to our caller is one that can be sent; the first byte is its
    code."""
    codes = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    code = codes[data[0] % len(codes)] if data else codes[0]
    error = from_backend_error(_Failure(code, data[1:]), "a backend")
    assert isinstance(error, SpecrejError)
    to_status(error)


TARGETS: Mapping[str, Target] = {
    target.__name__: target
    for target in (
        request,
        messages,
        stored_value,
        family_index,
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
    """None for what is no message; the interceptor refuses it."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _settings(kind: Any, variable: str, data: bytes) -> Any:
    """None where the process would have ended with a line of explanation."""
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
