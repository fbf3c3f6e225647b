"""Besides answers: texts of candidates on request, and the service's description."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from orchestrator.__main__ import _backend_states
from specrej import contracts as c
from specrej.contracts import FinishReason
from specrej.security import Role, new_token
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.backends.fleets import generators, reward_services
from tests.serving import failure_of, until
from tests.world import BOUND_S, HeldGenerator, HeldReward, LongTexts, World, small_request, world

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
    async with generators(*toys) as running, reward_services(HeldReward()) as judging:
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
