"""vLLM's scheduler, without two kinds of work that rounds do not need: runs inside vLLM.

After each step vLLM sends its tokens to the generator's process, where each takes some 70 us of
processor time. Here the outputs of a request are kept until it pauses or ends, but for at most 16
steps or a second. A request that needs each token at once receives it at once.

In each step vLLM takes every paused request out of its queue and puts it back. Here paused requests
are in no queue until their next round.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from specrej_models.vllm_options import end_with_parent

_MOST_STEPS, _MOST_S = 16, 1.0


def scheduler(vllm_config: Any, **options: Any) -> Any:
    """vLLM's scheduler for this configuration, with less work, in a process that ends with its
    parent."""
    end_with_parent()
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_Async if is_async else _Sync)(vllm_config=vllm_config, **options)


class _Scheduler:
    """Overrides methods of the scheduler that is the next base class."""

    # Both are vLLM's: the number of paused requests; the waiting requests that cannot run yet.
    num_waiting_for_streaming_input: int
    deferred_waiting: set[Any]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: dict[str, list[Any]] = {}  # outputs by request
        self._num_silent = 0  # steps without a message
        self._last_message = 0.0

    def update_from_output(self, *given: Any) -> dict[int, Any]:
        """Outputs of a step by client, or none."""
        made: dict[int, Any] = super().update_from_output(*given)  # type: ignore[misc]
        now = time.monotonic()
        is_due = self._num_silent + 1 >= _MOST_STEPS or now - self._last_message >= _MOST_S
        for of_client in made.values():
            joined = [self._joined(output, is_due) for output in of_client.outputs]
            of_client.outputs = [output for output in joined if output]
        if is_due or any(one.outputs or one.finished_requests for one in made.values()):
            self._num_silent, self._last_message = 0, now
            return made
        self._num_silent += 1
        return {}

    def finish_requests(self, *given: Any) -> Any:
        """Also the outputs of requests that are aborted are dropped."""
        finished: Any = super().finish_requests(*given)  # type: ignore[misc]
        for request in finished:
            self._kept.pop(request.request_id, None)
        return finished

    def get_request_counts(self) -> tuple[int, int]:
        """The numbers of running and of waiting requests; paused ones count as waiting."""
        running, waiting = super().get_request_counts()  # type: ignore[misc]
        return running, waiting + self.num_waiting_for_streaming_input

    def _enqueue_waiting_request(self, request: Any) -> None:
        if _is_paused(request):
            self.deferred_waiting.add(request)
        else:
            super()._enqueue_waiting_request(request)  # type: ignore[misc]

    def _update_request_as_session(self, request: Any, update: Any) -> None:
        """Begin a request's next round; one that was not paused yet is queued by the caller."""
        was_paused = _is_paused(request)
        super()._update_request_as_session(request, update)  # type: ignore[misc]
        if was_paused:
            self._enqueue_waiting_request(request)

    def _joined(self, output: Any, is_due: bool) -> Any | None:
        """The output with those that were kept; None if it is kept, too."""
        name = output.request_id
        if not (is_due or output.finished) and self._may_wait(name):
            self._kept.setdefault(name, []).append(output)
            return None
        if kept := self._kept.pop(name, None):
            outputs = [*kept, output]
            output.new_token_ids = [token for one in outputs for token in one.new_token_ids]
            output.prefill_stats = kept[0].prefill_stats
            output.events = [event for one in outputs for event in one.events or ()] or None
            if logprobs := [one.new_logprobs for one in outputs if one.new_logprobs]:
                # As wide as the largest request of each step's batch asks for.
                width = min(lists.logprobs.shape[1] for lists in logprobs)
                tokens = [lists.logprob_token_ids[:, :width] for lists in logprobs]
                values = [lists.logprobs[:, :width] for lists in logprobs]
                ranks = [lists.sampled_token_ranks for lists in logprobs]
                output.new_logprobs = LogprobsLists(*map(np.concatenate, (tokens, values, ranks)))
        return output

    def _may_wait(self, name: str) -> bool:
        params = self.requests[name].sampling_params  # type: ignore[attr-defined]
        return params is not None and (params.stream_interval or 1) > 1


def _is_paused(request: Any) -> bool:
    is_paused: bool = request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    return is_paused


class _Sync(_Scheduler, Scheduler):  # type: ignore[misc]
    """Without asynchronous scheduling, as on CPUs."""


class _Async(_Scheduler, AsyncScheduler):  # type: ignore[misc]
    """With it, as on GPUs."""
