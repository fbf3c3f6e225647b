"""A `Generator` of whole answers: an endpoint with OpenAI's API makes them, one request each.

The endpoint's KV is out of reach, so no candidate can be rejected early: `extend` returns every
candidate at its end, and the orchestrator runs Best-of-N with one scoring of complete answers.
Tokens are those that the endpoint reports; it charges the prompt once per candidate. If a request
is retried, only the tokens of its last attempt are reported and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import Any

import httpx2

from generator_service.engine.commands import Load, OnStep, Step
from generator_service.settings import GeneratorSettings
from specrej import fingerprint
from specrej.contracts import (
    NO_FORKS,
    Candidate,
    FinishReason,
    Forks,
    GeneratorDescription,
    Pruned,
    Report,
    Round,
    RoundEnd,
    Sampling,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Violation,
    raise_if_any,
)
from specrej.contracts.requests import MAX_INT32
from specrej.reloading_file import ReloadingFile, read_line
from specrej.security import may_use_proxy
from specrej.server.serving import time_left_s

log = logging.getLogger(__name__)

_ATTEMPTS = 4
# Of our own; the endpoint's Retry-After may be longer.
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_MAX_RETRY_AFTER_S = 86_400.0
_ROUNDING = 1e-3  # of a log-probability near 0, which may be above it
_UNKNOWN_CONTEXT, _UNKNOWN_VOCABULARY = 131_072, 1_000_000
_AUTO_CANDIDATES = 8
# What reading JSON of another form than the API's raises, besides failed look-ups.
_UNREADABLE = (ValueError, TypeError, RecursionError)
_REFUSED = {
    "logprobs": "the endpoint has no token ids",
    "top_logprobs": "the endpoint has no token ids",
    "structured_output": "endpoints differ in the formats that they take",
}
_CONVERTED = ("max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias")
# Only fields that differ from their defaults are sent: not every endpoint accepts these names.
_SENT_BY_NAME = tuple(
    field.name for field in fields(Sampling) if field.name not in (*_CONVERTED, *_REFUSED)
)


class EndpointSession:
    """A `Session` whose candidates are requests to the endpoint."""

    reduced = False
    fingerprint = ""  # the servicer has the generator's
    prompt_tokens = 0  # the endpoint reports them with its answers

    def __init__(self, generator: EndpointGenerator, spec: SessionSpec) -> None:
        self.n = spec.n or generator.auto_candidates
        self.max_tokens = spec.sampling.max_tokens
        self.reserved = self.n * self.max_tokens
        self._generator = generator
        self._spec = spec
        self._live = list(range(self.n))
        self.turn = asyncio.Lock()  # of the one candidate that waits for a place

    async def extend(self, until_tokens: int, report: Report | None = None) -> Round:
        """All candidates at their ends, whatever `until_tokens` is; without reports."""
        answer, spec = self._generator.answer, self._spec
        tasks = [asyncio.create_task(answer(spec, i, self)) for i in self._live]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # one failed, or the caller went away: the endpoint stops the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._live, self.reserved = [], 0
        candidates = tuple(candidate for candidate, _ in answers)
        longest = max((candidate.num_tokens for candidate in candidates), default=0)
        prompt_tokens = max((prompt for _, prompt in answers), default=0)
        gauge = self._gauge()
        return Round(candidates, RoundEnd.ALL_FINISHED, longest, gauge, prompt_tokens=prompt_tokens)

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        """Drop candidates that were not requested yet; forks are refused."""
        before = len(self._live)
        self._live = [number for number in self._live if number in keep]
        freed = (before - len(self._live)) * self.max_tokens
        self.reserved -= freed
        return Pruned(freed, self._gauge(), tuple(sorted(forks)))

    def _gauge(self) -> SlotGauge:
        slots = self._generator.load().slots
        return SlotGauge(slots.capacity, slots.owned, self.reserved)


class EndpointGenerator:
    """Answers by the endpoint of the settings.

    Slots are tokens that running candidates may still get; none of them is KV.
    """

    def __init__(self, settings: GeneratorSettings, on_step: OnStep | None = None) -> None:
        """Raises OSError or ValueError: the key cannot be read."""
        self._settings = settings
        self._on_step = on_step
        self._url = settings.remote_url.rstrip("/")
        self._context = settings.context_tokens or _UNKNOWN_CONTEXT
        most = settings.auto_candidates or _AUTO_CANDIDATES
        self.auto_candidates = min(most, _AUTO_CANDIDATES, settings.max_candidates)
        self._sessions: set[EndpointSession] = set()
        self._places = asyncio.Semaphore(settings.remote_requests)
        path = settings.remote_key_file
        self._key = ReloadingFile((path,), partial(read_line, path)) if path else None
        limits = httpx2.Limits(max_connections=settings.remote_requests)
        trusted = may_use_proxy(self._url)
        self._client = httpx2.AsyncClient(limits=limits, timeout=None, trust_env=trusted)

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[EndpointSession]:
        raise_if_any(_check(spec))
        if len(self._sessions) > self._settings.max_waiting:
            raise Overloaded(f"{len(self._sessions)} sessions are open")
        session = EndpointSession(self, spec)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)

    async def describe(self) -> GeneratorDescription:
        load, settings = self.load(), self._settings
        return GeneratorDescription(
            model=settings.model,
            fingerprint=fingerprint.of_values(url=self._url, model=settings.model),
            context_tokens=self._context,
            max_candidates=settings.max_candidates,
            vocabulary=_UNKNOWN_VOCABULARY,
            slot_bytes=0,
            device="remote, no early rejection",
            slots=load.slots,
            sessions=load.sessions,
            auto_candidates=self.auto_candidates,
            whole_answers=True,
        )

    def load(self) -> Load:
        """Slots and sessions as of now."""
        owned = sum(session.reserved for session in self._sessions)
        capacity = max(owned, self._settings.max_candidates * self._context)
        return Load(SlotGauge(capacity, owned, 0), len(self._sessions), 0)

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(
        self, spec: SessionSpec, candidate_id: int, session: EndpointSession
    ) -> tuple[Candidate, int]:
        """One candidate of a session, complete, and the tokens of its prompt.

        Raises:
            InvalidRequest: the endpoint refuses the request; with its reason.
            Overloaded, Unavailable: the last attempt failed so, or the next delay exceeds the time
                left (without a deadline, `_MAX_DELAY_S`).
            InternalError: the endpoint refuses the key, or its answer cannot be read.
        """
        path, body = _request(spec, candidate_id, self._settings)
        for attempt in range(_ATTEMPTS):
            async with self._place(session):
                began = time.perf_counter()
                response = await self._post(path, body)
                seconds = time.perf_counter() - began
            if not isinstance(response, str) and response.status_code == 200:
                return self._read(candidate_id, response.content, seconds)
            failure, left_s = _failure(response, attempt), time_left_s()
            delay_s = failure.retry_after_s or 0.0
            longest_s = _MAX_DELAY_S if left_s is None else left_s
            if attempt + 1 == _ATTEMPTS or delay_s > longest_s:
                raise failure
            log.info("%s; again in %.1f s", failure.message, delay_s)
            await asyncio.sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    @asynccontextmanager
    async def _place(self, session: EndpointSession) -> AsyncIterator[None]:
        """One of the requests at the same time. Sessions take turns: a small one does not wait for
        all of a large one."""
        async with session.turn:
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response | str:
        """The response, or the kind of error without one."""
        headers = {"Authorization": f"Bearer {self._key.get()}"} if self._key else {}
        try:
            return await self._client.post(f"{self._url}{path}", json=body, headers=headers)
        except httpx2.HTTPError as error:
            return type(error).__name__

    def _read(self, candidate_id: int, answer: bytes, seconds: float) -> tuple[Candidate, int]:
        try:
            content = json.loads(answer)
            choice, usage = content["choices"][0], content["usage"]
            made, prompt = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            if not 0 <= min(made, prompt) <= max(made, prompt) <= MAX_INT32:
                raise ValueError("counts of tokens must be from 0 to 2**31 - 1")
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if not isinstance(text, str | None):
                raise TypeError("the text must be a string")
            logprobs = _logprobs(choice.get("logprobs") or {})
            if not all(math.isfinite(one) and one < _ROUNDING for one in logprobs):
                raise ValueError("log-probabilities must be finite and at most 0")
            if logprobs and not made:
                raise ValueError("log-probabilities of no tokens")
            # A filtered answer is not complete.
            is_complete = choice["finish_reason"] == "stop"
        except (ArithmeticError, AttributeError, LookupError, *_UNREADABLE) as error:
            reason = _encodable(f"{type(error).__name__} {error}")
            raise InternalError(f"the endpoint's answer cannot be read: {reason}") from error
        if self._settings.remote_logprobs and made and not logprobs:
            raise InternalError("the endpoint reports no logprobs: set remote_logprobs to false")
        if self._on_step:
            self._on_step(Step(seconds, 1, generated=made, prefilled=prompt))
        finish = FinishReason.STOP if is_complete else FinishReason.LENGTH
        logprob = min(0.0, sum(logprobs))
        return Candidate(candidate_id, _encodable(text or ""), made, logprob, finish), prompt


def _check(spec: SessionSpec) -> list[Violation]:
    refused = {
        f"sampling.{name}": why for name, why in _REFUSED.items() if getattr(spec.sampling, name)
    }
    if spec.prompt.allow_special_tokens:
        refused["prompt.allow_special_tokens"] = "the endpoint decides"
    return [Violation(field, f"must be absent: {reason}") for field, reason in refused.items()]


def _request(
    spec: SessionSpec, candidate_id: int, settings: GeneratorSettings
) -> tuple[str, dict[str, Any]]:
    """Path and body; candidates differ in their seeds."""
    sampling, default = spec.sampling, Sampling()
    body: dict[str, Any] = {
        "model": settings.model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": (sampling.seed + candidate_id) % (1 << 31),
    }
    for name in _SENT_BY_NAME:
        if (value := getattr(sampling, name)) != getattr(default, name):
            body[name] = value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(one.token_id): one.bias for one in sampling.logit_bias}
    if settings.remote_logprobs:
        body["logprobs"] = 0 if spec.prompt.text else True
    if spec.prompt.text:
        return "/completions", {**body, "prompt": spec.prompt.text}
    if spec.prompt.continue_final:  # as vLLM's API has it
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    turns = [{"role": turn.role, "content": turn.content} for turn in spec.prompt.messages]
    return "/chat/completions", {**body, "messages": turns}


def _logprobs(given: dict[str, Any]) -> list[float]:
    """Log-probabilities of an answer's tokens, in either API's form: chat or completions."""
    if content := given.get("content"):
        return [float(token["logprob"]) for token in content]
    return [float(value) for value in given.get("token_logprobs") or () if value is not None]


def _encodable(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs, which UTF-8 lacks and JSON may have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _failure(response: httpx2.Response | str, attempt: int) -> Overloaded | Unavailable:
    """What an attempt failed with, and when the next one may succeed.

    Raises:
        InvalidRequest, InternalError: another attempt would fail, too.
    """
    delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt * random.uniform(1, 1.5))
    if isinstance(response, str):
        reason = f"the endpoint does not answer: {response}"
        return Unavailable(reason, retry_after_s=delay_s)
    status = response.status_code
    if status in (401, 403):
        raise InternalError(f"the endpoint refuses the key: status {status}")
    if status not in (408, 409, 429) and status < 500:
        reason = f"the endpoint refuses it with status {status}: {_reason(response.content)}"
        raise InvalidRequest([Violation("sampling", reason)])
    delay_s = max(delay_s, _retry_after_s(response.headers.get("retry-after", "")))
    if status == 429:
        return Overloaded("the endpoint limits requests", retry_after_s=delay_s)
    return Unavailable(f"the endpoint answers with status {status}", retry_after_s=delay_s)


def _retry_after_s(text: str) -> float:
    """Seconds, at most a day; 0 if it is not a number, such as a date."""
    with suppress(ValueError):
        return min(_MAX_RETRY_AFTER_S, max(0.0, float(text)))
    return 0.0


def _reason(answer: bytes) -> str:
    with suppress(LookupError, *_UNREADABLE):
        return _encodable(str(json.loads(answer)["error"]["message"])[:200])
    return "without a reason"
