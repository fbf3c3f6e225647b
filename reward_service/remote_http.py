"""A reward behind HTTP, for whatever serves one already.

POST {"messages": [{"role", "content"}, ...], "responses": [...], "finished": [...]} as JSON; the
answer is {"scores": [...]}, a number for each response, higher is better. `finished` says which
responses ended by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from reward_service.reward import WholeBatchReward
from specrej import fingerprint
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.errors import RewardInvalid, Unavailable

# Batches that are asked for at the same time.
_AT_ONCE = 8

_MAX_ANSWER_BYTES = 1 << 24


class HTTPReward(WholeBatchReward):
    """`headers` go with every request; `version` tells its fingerprints apart, as we cannot."""

    token_budget = _AT_ONCE

    def __init__(
        self,
        name: str,
        url: str,
        *,
        timeout_s: float = 30.0,
        headers: dict[str, str] | None = None,
        version: str = "",
    ) -> None:
        super().__init__(
            name,
            fingerprint.of_values(kind="http", url=url, version=version),
            "What a reward model behind HTTP says.",
        )
        self._url = url
        self._timeout_s = timeout_s
        self._client = httpx2.Client(timeout=timeout_s, headers=headers)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="http-reward")

    def compute(self, pieces: Sequence[Any]) -> None:
        """At the same time: the other end may merge them."""
        for done in [self._threads.submit(piece.run) for piece in pieces]:
            done.result()

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        """Raises:
        Unavailable: it cannot be reached, is too slow, or says that it is overloaded.
        RewardInvalid: it answers something else.
        """
        messages = prompt.turns
        asked = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in messages],
            "responses": [candidate.text for candidate in candidates],
            "finished": [candidate.finish is FinishReason.STOP for candidate in candidates],
        }
        try:
            status, answer = self._post(asked)
        except httpx2.HTTPError as error:
            # Not its text, which holds internal addresses.
            text = f"reward {self.name} cannot be reached: {type(error).__name__}"
            raise Unavailable(text) from error
        if status == 429 or status >= 500:
            raise Unavailable(f"reward {self.name} answers with status {status}")
        return Scores(self._numbers(status, answer))

    def _post(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        """Status and answer, all of it in time: httpx2 bounds only the time between two parts."""
        until = time.monotonic() + self._timeout_s
        answer = b""
        with self._client.stream("POST", self._url, json=asked) as response:
            for part in response.iter_bytes():
                answer += part
                if time.monotonic() > until or len(answer) > _MAX_ANSWER_BYTES:
                    raise httpx2.ReadTimeout("too slow, or too long")
        return response.status_code, answer

    def _numbers(self, status: int, answer: bytes) -> tuple[float, ...]:
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            return tuple(map(_number, _listed(json.loads(answer)["scores"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            text = f"reward {self.name} answers no scores: {type(error).__name__}"
            raise RewardInvalid(text, metadata={"reward": self.name}) from error


def _listed(scores: object) -> list[object]:
    """Raises TypeError: by ids, say, and whoever takes the keys of that for scores is wrong."""
    if not isinstance(scores, list):
        raise TypeError
    return scores


def _number(value: object) -> float:
    """Raises TypeError: a text or a truth value is none, even if Python makes one of it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)
