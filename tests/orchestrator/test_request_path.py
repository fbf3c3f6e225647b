"""The path of a request from the port to a backend: few functions, so that it can be followed."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from specrej import remote
from specrej.v1 import orchestrator_pb2_grpc
from tests.orchestrator.backends.fleets import generators, reward_services
from tests.orchestrator.caching import new_cache
from tests.serving import serving
from tests.world import HeldGenerator, HeldReward, small_request

ROOM = Path(orchestrator.__file__).parent


async def test_a_request_passes_few_functions_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the orchestrator's functions on the stack when a backend is called."""
    paths: list[list[Any]] = []
    for verb in ("extend", "prune"):
        call = getattr(remote.RemoteSession, verb)

        async def recorded(*arguments: Any, call: Any = call, **options: Any) -> Any:
            frame, codes = sys._getframe(1), []
            while frame:
                codes.append(frame.f_code)
                frame = frame.f_back  # type: ignore[assignment]
            paths.append([code for code in codes if ROOM in Path(code.co_filename).parents])
            return await call(*arguments, **options)

        monkeypatch.setattr(remote.RemoteSession, verb, recorded)
    async with (
        generators(HeldGenerator()) as fleet,
        reward_services(HeldReward()) as rewards,
    ):
        service = Orchestrator(
            fleet.client, rewards.client, new_cache(""), Admission(Limits(8, 64))
        )
        async with serving(OrchestratorServicer(service).service()) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            await stub.Generate(small_request())
        await service.aclose()
    assert len(paths) >= 4
    for path in paths:
        assert len(path) <= 25
        assert sum(bool(code.co_flags & inspect.CO_ASYNC_GENERATOR) for code in path) <= 3
        files = [file for file, _ in itertools.groupby(code.co_filename for code in path)]
        assert sum(Path(file).name == "service.py" for file in files) <= 3
