"""The public port: answers, their fields and defaults, descriptions.

Every test that uses `world()` waits at its end until nothing runs, waits or owns a slot."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.__main__ import _backend_states
from specrej import contracts as c
from specrej.client import Client
from specrej.contracts import Finished, FinishReason, Prompt
from specrej.security import Role, new_token
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.backends.fleets import PATIENT, generators, reward_services
from tests.serving import failure_of, until
from tests.world import (
    BOUND_S,
    PROMPT,
    HeldGenerator,
    HeldReward,
    LongTexts,
    World,
    generation,
    small_request,
    world,
)


async def test_a_stream_has_all_events_and_ends_with_the_unary_answer(service: World) -> None:
    message = small_request(
        cache_control=pb.CACHE_CONTROL_BYPASS, selection={"return_candidates": 5}
    )
    reply = await service.answer(message)
    received = await service.events(message)
    kinds = [event.WhichOneof("event") for event in received]
    num_rounds = len(reply.rounds)
    assert num_rounds >= 2, "the case did not occur"
    assert kinds == ["admitted", *["round_completed"] * num_rounds, "finished"]
    admitted, finished = received[0].admitted, received[-1].finished
    assert generation(finished) == generation(reply)
    assert (admitted.n, admitted.prompt_tokens) == (reply.n, reply.usage.prompt_tokens) == (12, 4)
    assert admitted.request_id == finished.request_id != reply.request_id
    assert re.fullmatch("[0-9a-f]{32}", reply.request_id)
    rounds = [event.round_completed for event in received[1:-1]]
    assert [event.round for event in rounds] == list(finished.rounds)
    for event in rounds:
        assert len(event.survivors) == event.round.num_live
        assert event.best_text
    for before, after in pairwise(rounds):
        assert set(after.survivors) < set(before.survivors)


async def test_streamed_text_is_sent_once(service: World) -> None:
    """Guards against a whole text with each round and with the answer, besides its parts."""
    message = small_request(cache_control=pb.CACHE_CONTROL_BYPASS, selection={"n": 1})
    reply = await service.answer(message)
    request = pb.GenerateStreamRequest(request=message, text_deltas=True)
    events = [event async for event in service.stub.GenerateStream(request, timeout=BOUND_S)]
    assert "".join(event.text_delta.text for event in events) == reply.text
    texts = [event.round_completed.best_text for event in events[:-1]]
    assert not any((*texts, events[-1].finished.text, events[-1].finished.candidates[0].text))
    async with Client(service.address) as client:
        options: Any = {"n": 1, "max_tokens": 40, "seed": 7, "text_deltas": True}
        prompt = Prompt(text=message.prompt.text)
        streamed = [event async for event in client.stream(prompt, **options)]
    assert isinstance(streamed[-1], Finished)
    assert streamed[-1].generation.best.text == reply.text


async def test_absent_fields_mean_the_defaults_of_the_schema(service: World) -> None:
    """Guards against an absent field that is read as 0."""
    reply = await service.answer(pb.GenerateRequest(prompt=PROMPT))
    with_defaults = pb.GenerateRequest(
        model="toy",
        prompt=PROMPT,
        sampling=common_pb2.Sampling(max_tokens=2048, temperature=1, top_k=0, top_p=1, seed=0),
        selection=pb.Selection(
            n=16,
            alpha=0.5,
            schedule=pb.Schedule(kind=pb.SCHEDULE_KIND_GEOMETRIC, first=16, factor=2),
            algorithm=pb.ALGORITHM_SPECULATIVE_REJECTION,
            rewards=[pb.WeightedReward(name="toy", weight=1)],
            return_candidates=1,
            prefer_complete=False,
        ),
        cache_control=pb.CACHE_CONTROL_USE,
    )
    assert generation(reply) == generation(await service.answer(with_defaults))
    assert [round_.decision_token for round_ in reply.rounds[:2]] == [16, 32]
    assert (reply.n, len(reply.candidates)) == (16, 1)


async def test_describe_returns_the_current_load_and_limits(cached_service: World) -> None:
    service = cached_service
    running = await service.held(small_request())
    described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert list(described.rewards) == ["toy", "other", "likelihood"]
    assert described.cache_available
    assert (described.running, described.queued) == (1, 0)
    assert (described.generator.model, described.generator.max_candidates) == ("toy", 1024)
    assert described.generator.sessions == 1
    assert described.generator.slots.owned == service.generator.toy.ledger.owned > 0
    assert described.default_schedule.first == described.default_n == 16
    assert described.default_max_tokens == 2048
    service.generator.gates["extend"].open()
    await running


async def test_a_run_knows_the_deadline_of_its_caller(
    service: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against cuts that no deadline shapes."""
    generate, left_s = service.orchestrator.generate, list[float]()

    async def noted(*arguments: Any, **options: Any) -> None:
        left_s.append(options["time_left_s"])
        await generate(*arguments, **options)

    monkeypatch.setattr(service.orchestrator, "generate", noted)
    for stream in (False, True):
        await service.answer(small_request(), stream=stream)
    assert all(0 < time_s <= BOUND_S + 1 for time_s in left_s) and len(left_s) == 2


# Besides answers: texts of candidates on request, and the service's description


STATE = c.BackendState(c.BackendKind.REWARD, "10.0.0.1:50052", c.BackendHealth.AWAY, 0)


async def texts_of(
    service: World, request: pb.GenerateStreamRequest
) -> list[list[tuple[int, int]]]:
    """Of each round, its candidates with the number of words of their texts."""
    call = service.stub.GenerateStream(request, timeout=BOUND_S)
    rounds = [event.round_completed async for event in call if event.HasField("round_completed")]
    return [[(t.candidate_id, len(t.text.split())) for t in ended.texts] for ended in rounds]


async def test_rounds_have_the_texts_of_their_candidates_on_request(service: World) -> None:
    """Guards against texts of survivors only, and texts that were not requested."""
    reply = await service.answer(small_request())
    request = pb.GenerateStreamRequest(request=small_request(seed=7), texts=True)
    request.request.cache_control = pb.CACHE_CONTROL_BYPASS
    traced = [[(t.candidate_id, t.num_tokens) for t in trace.candidates] for trace in reply.rounds]
    assert await texts_of(service, request) == traced
    request.texts = False
    assert await texts_of(service, request) == [[] for _ in traced]


async def test_the_texts_of_a_round_are_bounded() -> None:
    """Guards against a round whose texts are too long for a message."""
    async with world(LongTexts(100_000, FinishReason.STOP)) as service:
        (texts,) = await texts_of(
            service, pb.GenerateStreamRequest(request=small_request(seed=1), texts=True)
        )
        assert len(texts) == 2


async def test_a_description_counts_requests_of_the_process(cached_service: World) -> None:
    """Guards against counters of one kind of answer in place of another."""
    service = cached_service
    first = await service.orchestrator.describe()
    reply = await service.answer(small_request(seed=1))
    await service.answer(small_request(seed=1))
    service.admission._limits = type(service.admission._limits)(1, 0)
    service.shut("extend")
    running = service.stub.GenerateStream(pb.GenerateStreamRequest(request=small_request(seed=2)))
    await until(lambda: service.num_held("extend") == 1)
    failure = await failure_of(service.answer(small_request(seed=3)))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    now = await service.orchestrator.describe()
    assert (now.num_answers, now.num_cached, now.num_refused) == (1, 1, 1)
    usage = reply.usage
    assert now.generated_tokens == usage.generated_tokens
    assert now.saved_tokens_estimate == usage.best_of_n_tokens_estimate - usage.generated_tokens
    assert first.process_id == now.process_id != ""
    running.cancel()
    service.generator.gates["extend"].open()
    await until(lambda: service.is_idle)


@pytest.mark.parametrize(
    ("role", "is_listed"), [(None, True), (Role.ADMIN, True), (Role.GENERATE, False)]
)
async def test_backends_are_described_to_operators(
    tmp_path: Path, role: Role | None, is_listed: bool
) -> None:
    """Guards against addresses of the network that any tenant's token shows."""
    settings: dict[str, str] = {}
    metadata: tuple[tuple[str, str], ...] = ()
    if role:
        token, line = new_token("acme", [role])
        (tmp_path / "tokens").write_text(line)
        settings = {"tokens_file": str(tmp_path / "tokens")}
        metadata = (("authorization", f"Bearer {token}"),)
    async with world(server_settings=settings, backends=lambda: [STATE]) as service:
        request = pb.OrchestratorServiceDescribeRequest()
        reply = await service.stub.Describe(request, metadata=metadata, timeout=BOUND_S)
        assert [backend.address for backend in reply.backends] == [STATE.address] * is_listed


async def test_the_state_of_each_backend() -> None:
    """Guards against a state of the fleet in place of the backend's."""
    toys = [HeldGenerator(end_every=end) for end in (30, 30, 40)]
    settings = replace(PATIENT, resolve_s=60)  # one that is away is not connected to anew
    opening = generators(*toys, settings=settings)
    async with opening as running, reward_services(HeldReward()) as judging:
        await running.servers[1].kill()
        await until(lambda: running.counts == (1, 1, 1))
        spec = c.SessionSpec(c.Prompt.from_user("why?"), 2, c.Sampling(max_tokens=8), 4)
        async with running.client.open(spec):
            states = _backend_states(running.fleet, judging.fleet)
            of_address = {state.address: state for state in states}
            assert len(of_address) == 4
            health = [of_address[f"127.0.0.1:{s.port}"].health for s in running.servers]
            assert sorted(h.value for h in health) == ["away", "other_version", "serving"]
            assert sum(state.running for state in states) == 1
            assert {state.serves for state in states} == {"toy"}
            assert [bool(state.slots) for state in states] == [True, True, True, False]
            assert states[3].kind is c.BackendKind.REWARD
