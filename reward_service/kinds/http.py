"""A reward behind HTTP, for servers that exist already.

POST {"messages": [{"role", "content"}, ...], "responses": [...], "finished": [...], "data": ...} as
JSON; the answer is {"scores": [...]}, a number for each response, higher is better. `data` is that
of the request, and absent without. The content of a turn with images, if it reads them, is a list
of OpenAI's parts. `finished`: whether the response ended by itself. The header Specrej-Timeout-Ms
has the time after which the answer is not read; a call that is cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx2

from reward_service.reward import RemoteReward
from reward_service.specs import HTTPSpec, Resources, ServerSpec
from specrej import fingerprint
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import RewardInvalid, Unavailable
from specrej.reloading_file import ReloadingFile, read_line
from specrej.security import may_use_proxy
from specrej.server.serving import time_left_s
from specrej_models.tools import chat_message

_MAX_ANSWER_BYTES = 1 << 20
_TIMEOUT_HEADER = "Specrej-Timeout-Ms"


class Server:
    """The server of a spec, which is sent JSON.

    Raises:
        OSError, ValueError: a file of a header cannot be used.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self._name, self._url, self._timeout_s = spec.name, spec.url, spec.timeout_s
        self._secrets = {
            name: ReloadingFile((path,), partial(read_line, path))
            for name, path in spec.header_files.items()
        }
        # Compressed answers are not read: a few bytes could be gigabytes.
        headers = {**spec.headers, "Accept-Encoding": "identity"}
        # `post` has the timeout: httpx2 bounds only the time between two parts.
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=None, trust_env=may_use_proxy(spec.url)
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def post(self, body: str, most_bytes: int) -> tuple[int, bytes]:
        """Send JSON; status and content, which is empty if it is longer than `most_bytes`.

        Raises:
            Unavailable: it cannot be reached, is too slow, or answers with status 429 or 5xx.
        """
        caller_s = time_left_s()
        left_s = self._timeout_s if caller_s is None else max(0.0, min(self._timeout_s, caller_s))
        headers = {name: secret.get() for name, secret in self._secrets.items()}
        headers |= {_TIMEOUT_HEADER: str(round(left_s * 1000)), "Content-Type": "application/json"}
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", self._url, content=body, headers=headers) as response,
            ):
                async for part in response.aiter_raw():
                    content += part  # bytes would be copied for each part
                    if len(content) > most_bytes:
                        content.clear()
                        break
        except TimeoutError:
            text = f"reward {self._name} did not answer within {self._timeout_s:g} s"
            raise Unavailable(text) from None
        except httpx2.HTTPError as error:
            # Without its text, which holds internal addresses.
            text = f"reward {self._name} cannot be reached: {type(error).__name__}"
            raise Unavailable(text) from error
        status, wait = response.status_code, response.headers.get("retry-after", "")
        if status == 429 or status >= 500:
            retry_after_s = float(wait) if re.fullmatch(r"\d{1,4}", wait) else 1.0
            text = f"reward {self._name} answers with status {status}"
            raise Unavailable(text, retry_after_s=retry_after_s)
        return status, bytes(content)


class HTTPReward(RemoteReward):
    """Scores by the server at the spec's URL. Raises as `Server` does."""

    description = "The scores of a reward model behind HTTP."

    def __init__(self, spec: HTTPSpec, resources: Resources) -> None:
        self.name = spec.name
        selecting: dict[str, Any] = {"headers": spec.headers} if spec.headers else {}
        selecting |= {"images": spec.images} if spec.images == "read" else {}
        self.fingerprint = fingerprint.of_values(
            kind="http", url=spec.url, version=spec.version, **selecting
        )
        self._server = Server(spec)

    async def aclose(self) -> None:
        await self._server.aclose()

    async def answer(
        self, prompt: Prompt, candidates: Sequence[Candidate], data: str = ""
    ) -> Scores:
        request = {
            "messages": [chat_message(turn) for turn in prompt.turns],
            "responses": [candidate.text for candidate in candidates],
            "finished": [candidate.finish is FinishReason.STOP for candidate in candidates],
        }
        body = json.dumps(request, ensure_ascii=False)
        if data:  # as it is: to read and write it again could fail
            body = f'{body[:-1]}, "data": {data}}}'
        most_bytes = max(_MAX_ANSWER_BYTES, 64 * len(candidates))
        return self._scores(*await self._server.post(body, most_bytes))

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
