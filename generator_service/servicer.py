"""The generator's gRPC port: unpacks commands, calls the generator, packs its results.

Validates every field, also of trusted callers. Works with any `Generator`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from specrej import contracts as c
from specrej import telemetry
from specrej.backend.v1 import generator_pb2 as pb
from specrej.backend.v1 import generator_pb2_grpc
from specrej.contracts import errors, validation, wire
from specrej.server.commands import answer_commands, leased
from specrej.server.health import Health
from specrej.server.serving import Context, Service
from specrej.telemetry import names
from specrej.threads import ended
from specrej.v1 import common_pb2


class GeneratorServicer(generator_pb2_grpc.GeneratorServiceServicer):
    """`specrej.backend.v1.GeneratorService` over a generator that may still be loading."""

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: seconds without a command after which a session is closed."""
        self._lease_s = lease_s
        self._generator: c.Generator | None = None
        self._health = Health()

    def load(self, generator: c.Generator) -> None:
        """Serve `generator`; until then every call fails with UNAVAILABLE."""
        self._generator = generator

    def service(self) -> Service:
        return Service(
            pb.DESCRIPTOR.services_by_name["GeneratorService"].full_name,
            lambda server: generator_pb2_grpc.add_GeneratorServiceServicer_to_server(self, server),
            self._health,
        )

    # The stubs declare an async generator; serving.py explains why this is a coroutine.
    async def Session(  # type: ignore[override] # noqa: N802
        self, request_iterator: Any, context: Context
    ) -> None:
        async with AsyncExitStack() as resources:

            def write(part: pb.SessionResponse) -> Awaitable[None]:
                return leased(context.write(part), self._lease_s)

            commands = _Commands(self._loaded(), resources, write)
            stale = partial(pb.SessionResponse, stale=pb.StaleCommand())
            await answer_commands(request_iterator, context, commands.answer, stale, self._lease_s)

    async def Check(  # noqa: N802
        self, request: pb.GeneratorServiceCheckRequest, context: Context
    ) -> pb.GeneratorServiceCheckResponse:
        generator = self._loaded()
        await generator.check(await _spec_of(request.open, generator))
        return pb.GeneratorServiceCheckResponse()

    async def Describe(  # noqa: N802
        self, request: pb.GeneratorServiceDescribeRequest, context: Context
    ) -> pb.GeneratorServiceDescribeResponse:
        description = await self._loaded().describe()
        message = wire.to_message(description, common_pb2.GeneratorDescription)
        return pb.GeneratorServiceDescribeResponse(generator=message)

    async def Watch(  # type: ignore[override]  # noqa: N802
        self, request: pb.GeneratorServiceWatchRequest, context: Context
    ) -> None:
        await self._health.report(self.Describe, pb.GeneratorServiceWatchResponse, request, context)

    def _loaded(self) -> c.Generator:
        if self._generator is None:
            raise errors.Unavailable("the model is loading", retry_after_s=2)
        return self._generator


@dataclass(slots=True)
class _Commands:
    """One stream's commands and the session they open; `resources` closes it with the stream.

    `write` sends parts of answers.
    """

    _generator: c.Generator
    _resources: AsyncExitStack
    _write: Callable[[pb.SessionResponse], Awaitable[None]]
    _texts: wire.StreamedTexts = field(default_factory=wire.StreamedTexts)
    _session: c.Session | None = None
    _max_tokens: int = 0
    _max_candidates: int = 0
    _last_id: int = 0  # the highest of a candidate, ever
    _closed: bool = False

    async def answer(self, request: pb.SessionRequest) -> pb.SessionResponse:
        command = request.WhichOneof("command")
        if command is None:
            raise errors.InvalidRequest([errors.Violation("command", "must be set")])
        with telemetry.span(command, {names.SEQUENCE: request.sequence}):
            match command:
                case "open":
                    return await self._open(request.open)
                case "extend":
                    return await self._extend(request.extend, request.sequence)
                case "prune":
                    return await self._prune(request.prune)
                case _:
                    return await self._close()

    async def _open(self, command: pb.OpenSession) -> pb.SessionResponse:
        if self._session or self._closed:
            raise errors.OutOfOrder("the session is open already")
        spec = await _spec_of(command, self._generator)
        session = await self._resources.enter_async_context(self._generator.open(spec))
        self._session, self._max_tokens = session, session.max_tokens
        self._last_id = spec.first_id + session.n - 1
        description = await self._generator.describe()
        self._max_candidates = description.max_candidates
        opened = pb.SessionOpened(
            n=session.n,
            prompt_tokens=session.prompt_tokens,
            slots=wire.to_message(description.slots, common_pb2.SlotGauge),
            fingerprint=description.fingerprint,
            reduced=session.reduced,
            costly_rounds=session.costly_rounds,
            answer_form=wire.to_message(session.answer_form, common_pb2.AnswerForm),
            max_tokens=session.max_tokens,
        )
        return pb.SessionResponse(opened=opened)

    async def _extend(self, command: pb.ExtendSession, sequence: int) -> pb.SessionResponse:
        session = self._opened()
        if not 1 <= command.until_tokens <= self._max_tokens:
            description = f"must be 1 .. {self._max_tokens}, is {command.until_tokens}"
            raise errors.InvalidRequest([errors.Violation("extend.until_tokens", description)])
        parts: asyncio.Queue[c.Round | None] = asyncio.Queue()
        report = parts.put_nowait if command.report else None
        extending = asyncio.create_task(session.extend(command.until_tokens, report))
        extending.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while part := await parts.get():
                grown = self._texts.to_message(part)
                await self._write(pb.SessionResponse(sequence=sequence, grown=grown))
            batch = self._texts.to_message(await extending)
        finally:
            await ended(extending)
        return pb.SessionResponse(prefix_batch=batch)

    async def _prune(self, command: pb.PruneSession) -> pb.SessionResponse:
        session = self._opened()
        forks = [(fork.candidate_id, fork.parent_id) for fork in command.forks]
        ids = [self._last_id, *(number for number, _ in forks)]
        if any(later <= earlier for earlier, later in pairwise(ids)):
            accepted = f"must have ascending ids above {self._last_id}, the session's highest"
            raise errors.InvalidRequest([errors.Violation("prune.forks", accepted)])
        self._last_id = ids[-1]
        room = max(0, self._max_candidates - len(command.keep))
        pruned = await session.prune(frozenset(command.keep), dict(forks[:room]))
        self._texts.fork(dict(forks))
        refused = (*pruned.refused, *(number for number, _ in forks[room:]))
        pruned = replace(pruned, refused=refused)
        return pb.SessionResponse(pruned=wire.to_message(pruned, pb.SessionPruned))

    async def _close(self) -> pb.SessionResponse:
        self._session, self._closed = None, True
        await self._resources.aclose()
        return pb.SessionResponse(closed=pb.SessionClosed())

    def _opened(self) -> c.Session:
        if self._session is None:
            raise errors.OutOfOrder("the session is closed" if self._closed else "open comes first")
        return self._session


async def _spec_of(command: pb.OpenSession, generator: c.Generator) -> c.SessionSpec:
    """Raises InvalidRequest: a field is not valid."""
    description = await generator.describe()
    spec = wire.from_message(command, c.SessionSpec)
    errors.raise_if_any(_check_open(spec, description))
    return spec


def _check_open(
    spec: c.SessionSpec, description: c.GeneratorDescription
) -> Iterator[errors.Violation]:
    yield from validation.check_prompt(spec.prompt, "open.prompt")
    yield from validation.check_candidates(spec.n, description.max_candidates, "open.n")
    limits = (description.context_tokens, description.vocabulary)
    yield from validation.check_sampling(spec.sampling, spec.n, *limits, "open.sampling")
    candidates = spec.n or max(1, description.auto_candidates)
    yield from validation.check_logprobs(spec.sampling, candidates, "open.sampling")
    if spec.first_round_tokens < 1:
        yield errors.Violation("open.first_round_tokens", "must be 1 or more")
    if not 0 < spec.weight < math.inf:
        yield errors.Violation("open.weight", "must be above 0")
    if not 0 <= spec.first_id <= validation.MAX_BATCH:
        yield errors.Violation(
            "open.first_id", f"must be 0 .. {validation.MAX_BATCH}, is {spec.first_id}"
        )
    if spec.adapter not in ("", description.model):
        yield errors.Violation("open.adapter", f"must be {description.model} or empty")
