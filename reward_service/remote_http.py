"""A reward behind HTTP, for servers that exist already.

POST {"messages": [{"role", "content"}, ...], "responses": [...], "finished": [...]} as JSON; the
answer is {"scores": [...]}, a number for each response, higher is better. `finished`: whether the
response ended by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from reward_service.reward import WholeBatchReward, WholeBatchTask
from reward_service.specs import HTTPSpec, Resources
from specrej import fingerprint
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.errors import RewardInvalid, Unavailable

# Requests under way at the same time.
_CONCURRENT = 8

_MAX_ANSWER_BYTES = 1 << 24


class HTTPReward(WholeBatchReward):
    """Scores by the server at the spec's URL."""

    token_budget = _CONCURRENT

    def __init__(self, spec: HTTPSpec, resources: Resources) -> None:
        super().__init__(
            spec.name,
            fingerprint.of_values(kind="http", url=spec.url, version=spec.version),
            "The scores of a reward model behind HTTP.",
        )
        self._spec = spec
        self._client = httpx2.Client(timeout=spec.timeout_s, headers=spec.headers)
        self._threads = ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="http-reward")

    def compute(self, pieces: Sequence[WholeBatchTask]) -> None:
        """At the same time, as the server may merge them."""
        list(self._threads.map(WholeBatchTask.run, pieces))

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        """Raises:
        Unavailable: it cannot be reached, is too slow, or answers with status 429 or 5xx.
        RewardInvalid: any other answer without scores.
        """
        request = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in prompt.turns],
            "responses": [candidate.text for candidate in candidates],
            "finished": [candidate.finish is FinishReason.STOP for candidate in candidates],
        }
        try:
            status, answer = self._post(request)
        except httpx2.HTTPError as error:
            # Without its text, which holds internal addresses.
            text = f"reward {self.name} cannot be reached: {type(error).__name__}"
            raise Unavailable(text) from error
        if status == 429 or status >= 500:
            raise Unavailable(f"reward {self.name} answers with status {status}")
        return self._scores(status, answer)

    def _post(self, request: dict[str, Any]) -> tuple[int, bytes]:
        """Status and answer; httpx2 limits only the time between two parts, this limits all."""
        until = time.monotonic() + self._spec.timeout_s
        answer = b""
        with self._client.stream("POST", self._spec.url, json=request) as response:
            for part in response.iter_bytes():
                answer += part
                if time.monotonic() > until or len(answer) > _MAX_ANSWER_BYTES:
                    raise httpx2.ReadTimeout("too slow, or too long")
        return response.status_code, answer

    def _scores(self, status: int, answer: bytes) -> Scores:
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            scores = json.loads(answer)["scores"]
            # A dict's keys may look like numbers, and float() accepts strings and booleans.
            if not isinstance(scores, list) or not set(map(type, scores)) <= {int, float}:
                raise TypeError("must be a list of numbers")
            return Scores(tuple(map(float, scores)))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            text = f"reward {self.name} answers no scores: {type(error).__name__}"
            raise RewardInvalid(text, metadata={"reward": self.name}) from error
