"""What vLLM's scheduler keeps until a round ends or begins. Where vLLM is (make conformance)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from generator_service.engine.commands import Step
from generator_service.stock.vllm_engine import _steps
from generator_service.stock.vllm_scheduler import _Scheduler


class Double:
    """A double of vLLM's scheduler: what it is given is what it returns."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.deferred_waiting: set[Any] = set()
        self.num_waiting_for_streaming_input = 0

    def get_request_counts(self) -> tuple[int, int]:
        return 0, len(self.waiting)

    def _enqueue_waiting_request(self, request: Any) -> None:
        self.waiting.append(request)

    def _update_request_as_session(self, request: Any, update: None) -> None:
        request.status = RequestStatus.WAITING

    def update_from_output(self, *outputs: EngineCoreOutput) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(outputs=list(outputs))}

    def finish_requests(self, names: list[str]) -> list[Any]:
        return [self.requests.pop(name) for name in names]


@dataclass(eq=False)
class Request:
    """A double of vLLM's request."""

    status: RequestStatus


class Scheduler(_Scheduler, Double):
    """The scheduler that is tested."""

    def add(self, name: str, stream_interval: int) -> None:
        params = SamplingParams(stream_interval=stream_interval)
        self.requests[name] = SimpleNamespace(request_id=name, sampling_params=params)

    def sent(self, *outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        message = self.update_from_output(*outputs)
        return list(message[0].outputs) if message else []


def recent() -> Scheduler:
    """A scheduler that has just sent a message."""
    scheduler = Scheduler()
    scheduler._last_message = time.monotonic() + 60
    return scheduler


def output(
    name: str, token: int, finish: FinishReason | None = None, width: int = 1
) -> EngineCoreOutput:
    """`width`: of the drawn token and those that another request of the batch asks for."""
    row = np.array([[token, *range(100, 99 + width)]])
    logprobs = LogprobsLists(row, -row / 10.0, row[0, :1], None)
    return EngineCoreOutput(name, [token], new_logprobs=logprobs, finish_reason=finish)


def test_tokens_leave_together_at_the_end_of_a_round() -> None:
    """Guards their order, each one's log-probability, and a second round."""
    scheduler = recent()
    scheduler.add("a", stream_interval=3)
    scheduler.add("b", stream_interval=3)
    assert scheduler.update_from_output(output("a", 1), output("b", 5)) == {}
    assert scheduler.sent(output("a", 2), output("b", 6)) == []
    (made,) = scheduler.sent(output("a", 3, FinishReason.LENGTH))
    assert made.new_token_ids == [1, 2, 3]
    assert made.new_logprobs.logprobs.tolist() == [[-0.1], [-0.2], [-0.3]]
    assert made.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 3]
    (made,) = scheduler.sent(output("b", 7, FinishReason.STOP))
    assert made.new_token_ids == [5, 6, 7]
    assert scheduler.sent(output("a", 4)) == []
    (made,) = scheduler.sent(output("a", 8, FinishReason.LENGTH))
    assert made.new_token_ids == [4, 8]


def test_outputs_are_joined_whatever_other_requests_ask_for() -> None:
    """Guards against an error in the scheduler, which ends vLLM and all sessions: the number of
    log-probabilities is that of the batch, which changes between two steps."""
    scheduler = recent()
    scheduler.add("a", stream_interval=3)
    assert scheduler.sent(output("a", 1)) == []
    assert scheduler.sent(output("a", 2, width=6)) == []
    (made,) = scheduler.sent(output("a", 3, FinishReason.LENGTH, width=4))
    assert made.new_logprobs.logprobs.tolist() == [[-0.1], [-0.2], [-0.3]]
    assert made.new_logprobs.logprob_token_ids.tolist() == [[1], [2], [3]]


def test_a_long_round_reports_every_16_steps_and_every_second() -> None:
    """Guards against a heartbeat that a long round stops."""
    scheduler = recent()
    scheduler.add("a", stream_interval=100)
    lengths = [len(tokens) for tokens in (scheduler.sent(output("a", i)) for i in range(33))]
    assert [at for at, length in enumerate(lengths) if length] == [15, 31]
    scheduler._last_message -= 120
    (made,) = scheduler.sent(output("a", 1))
    assert made.new_token_ids == [32, 1]


def test_a_paused_request_is_in_no_queue_until_its_next_round() -> None:
    """Guards against steps that take longer the more candidates wait: 1.1 ms for 504 of them."""
    scheduler = Scheduler()
    paused, ended = (Request(RequestStatus.WAITING_FOR_STREAMING_REQ) for _ in range(2))
    ended.status = RequestStatus.RUNNING
    scheduler.num_waiting_for_streaming_input = 1
    scheduler._enqueue_waiting_request(paused)
    assert not scheduler.waiting and scheduler.deferred_waiting == {paused}
    assert scheduler.get_request_counts() == (0, 1)
    scheduler._update_request_as_session(ended, None)  # its next round came early
    assert not scheduler.waiting
    scheduler._update_request_as_session(paused, None)
    assert scheduler.waiting == [paused]


def test_steps_that_come_together_are_counted_each() -> None:
    """Of three steps of four requests, one of which ends earlier."""
    prompts = SimpleNamespace(computed=5, cached_tokens=2)
    stats = SimpleNamespace(
        num_generation_tokens=11,
        time_to_first_tokens_iter=[0.1],  # one entry per request, in one of these lists
        inter_token_latencies_iter=[0.1] * 3,
        prompt_token_stats=prompts,
    )
    steps = _steps(0.3, 0, stats)  # none of them runs on: a round has ended
    assert [(step.rows, step.generated) for step in steps] == [(4, 4), (4, 4), (4, 3)]
    assert sum(step.seconds for step in steps) == pytest.approx(0.3)
    assert [(step.prefilled, step.reused) for step in steps] == [(5, 2), (0, 0), (0, 0)]
    assert _steps(0.1, 7, None) == [Step(0.1, 7)]
