"""A reward behind HTTP, for servers that exist already.

POST {"messages": [{"role", "content"}, ...], "responses": [...], "finished": [...],
"data": ...} as JSON; the answer is {"scores": [...]}, a number for each response, higher is better.
`data` is that of the request, and absent without. `finished`: whether the
response ended by itself. The header Specrej-Timeout-Ms has the time after which the answer is not
read; a call that is cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx2

from reward_service.specs import HTTPSpec, Resources
from specrej import fingerprint
from specrej.contracts import NO_PROBE, Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import RewardInvalid, Unavailable
from specrej.reloading_file import ReloadingFile, read_line
from specrej.security import may_use_proxy
from specrej.server.serving import time_left_s

_MAX_ANSWER_BYTES = 1 << 20
_TIMEOUT_HEADER = "Specrej-Timeout-Ms"


class HTTPReward:
    """Scores by the server at the spec's URL.

    Raises:
        OSError, ValueError: a file of a header cannot be used.
    """

    def __init__(self, spec: HTTPSpec, resources: Resources) -> None:
        self.name = spec.name
        selecting = {"headers": spec.headers} if spec.headers else {}
        self.fingerprint = fingerprint.of_values(
            kind="http", url=spec.url, version=spec.version, **selecting
        )
        self.description = "The scores of a reward model behind HTTP."
        self.probe = NO_PROBE
        self.takes_data, self.sample_data, self.is_cheap = True, "", False
        self._url, self._timeout_s = spec.url, spec.timeout_s
        self._secrets = {
            name: ReloadingFile((path,), partial(read_line, path))
            for name, path in spec.header_files.items()
        }
        # Compressed answers are not read: a few bytes could be gigabytes.
        headers = {**spec.headers, "Accept-Encoding": "identity"}
        # `answer` has the timeout: httpx2 bounds only the time between two parts.
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=None, trust_env=may_use_proxy(spec.url)
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def answer(
        self, prompt: Prompt, candidates: Sequence[Candidate], data: str = ""
    ) -> Scores:
        """One score per candidate.

        Raises:
            Unavailable: it cannot be reached, is too slow, or answers with status 429 or 5xx.
            RewardInvalid: any other answer without scores.
        """
        request = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in prompt.turns],
            "responses": [candidate.text for candidate in candidates],
            "finished": [candidate.finish is FinishReason.STOP for candidate in candidates],
            **({"data": json.loads(data)} if data else {}),
        }
        caller_s = time_left_s()
        left_s = self._timeout_s if caller_s is None else max(0.0, min(self._timeout_s, caller_s))
        try:
            async with asyncio.timeout(self._timeout_s):
                status, answer = await self._post(request, left_s)
        except TimeoutError:
            text = f"reward {self.name} did not answer within {self._timeout_s:g} s"
            raise Unavailable(text) from None
        except httpx2.HTTPError as error:
            # Without its text, which holds internal addresses.
            text = f"reward {self.name} cannot be reached: {type(error).__name__}"
            raise Unavailable(text) from error
        if status == 429 or status >= 500:
            raise Unavailable(f"reward {self.name} answers with status {status}")
        return self._scores(status, answer)

    async def _post(self, request: dict[str, Any], left_s: float) -> tuple[int, bytes]:
        headers = {name: secret.get() for name, secret in self._secrets.items()}
        headers[_TIMEOUT_HEADER] = str(round(left_s * 1000))
        posting = self._client.stream("POST", self._url, json=request, headers=headers)
        answer = bytearray()
        async with posting as response:
            async for part in response.aiter_raw():
                answer += part  # bytes would be copied for each part
                if len(answer) > max(_MAX_ANSWER_BYTES, 64 * len(request["responses"])):
                    answer.clear()  # no scores, then
                    break
        return response.status_code, bytes(answer)

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
            text = f"reward {self.name} did not return scores: {type(error).__name__}"
            raise RewardInvalid(text, metadata={"reward": self.name}) from error
