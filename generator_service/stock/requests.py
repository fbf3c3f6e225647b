"""What the stock engine requests of the program that computes, and what that returns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from generator_service.engine.commands import OpenCommand, Top
from generator_service.engine.grammar import json_schema_of
from specrej.contracts import FinishReason, Grammar, Prompt, Regex, Sampling, StructuredOutput

_MAX_SEED = 2**31 - 1  # of servers that read seeds as int32


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a candidate's next tokens.

    `token_ids`: those that it has; `count`: most new ones. `session`: equal in all requests of a
    session, and in no others. `interval`: the number of new tokens that are sent together; 1: each
    at once. `with_logprobs`: whether log-probabilities are read.
    """

    command: OpenCommand
    prompt: Prompt  # that of the command, as its caller sent it
    session: str
    candidate: int
    token_ids: Sequence[int]
    count: int
    interval: int
    with_logprobs: bool = True

    @property
    def seed(self) -> int:
        """Depends on the candidate and on where its request begins, not on other candidates."""
        key = f"{self.command.sampling.seed}/{self.candidate}/{len(self.token_ids)}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) & _MAX_SEED

    @property
    def min_tokens(self) -> int:
        """The sampling's minimum, of the new tokens."""
        return max(0, self.command.sampling.min_tokens - len(self.token_ids))


@dataclass(slots=True)
class Part:
    """Some of a candidate's new tokens.

    `logprobs`: at temperature 1, over the whole distribution; `top`: the most probable tokens of
    each step, if requested. `text`, of servers that send no ids; a token's id is then its number in
    the answer. `finish`, of a request's last part: STOP, or LENGTH where `count` or a
    limit of the server was reached. `prompt_tokens`: of the request's whole prompt, in one of its
    parts; `cached_tokens` of them were not computed anew; None: unknown.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Top] = ()
    text: str = ""
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed; 0: none, or unknown."""
        return 0 if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    def divided(self, count: int) -> tuple[Part, Part]:
        """The first `count` tokens, which are not all, and the others."""
        ids, logprobs, top = self.token_ids, self.logprobs, self.top
        first = Part(ids[:count], logprobs[:count], top[:count], self.text)
        rest = Part(ids[count:], logprobs[count:], top[count:], finish=self.finish)
        first.prompt_tokens, first.cached_tokens = self.prompt_tokens, self.cached_tokens
        return first, rest


class Requests(Protocol):
    """A program that computes candidates' tokens."""

    def generate(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """The new tokens; closing the iterator ends the request and frees what it holds.

        Raises:
            InvalidRequest: the program refuses the request.
            Overloaded, Unavailable, InternalError: it failed.
        """

    def heartbeat_s(self) -> float:
        """Seconds since its last progress while requests run; infinite if it has ended."""

    async def close(self) -> None:
        """End the program, or the connections to it."""


class Places:
    """Requests at the same time. Tenants take turns, and so do the sessions of each: a small one
    does not wait for all of a large one."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, session: str, tenant: str) -> AsyncIterator[None]:
        """Hold a place while the context lasts."""
        of_session = self._turns.setdefault(session, asyncio.Lock())
        of_tenant = self._turns.setdefault(f"tenant {tenant}", asyncio.Lock())
        async with of_session, of_tenant:
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()


def continues_exactly(sampling: Sampling) -> bool:
    """Whether a request whose prompt ends with a candidate's tokens draws as one request would: not
    where draws depend on which tokens are those of the answer."""
    return not (
        sampling.presence_penalty or sampling.frequency_penalty or sampling.structured_output
    )


def structured_fields(output: StructuredOutput) -> dict[str, str]:
    """An output as vLLM's `structured_outputs` has it, in this process or in its API.

    Raises:
        ValueError: a schema cannot be read; the frontend refuses it before.
    """
    match output:
        case Regex(pattern):
            return {"regex": pattern}
        case Grammar(lark):
            return {"grammar": lark}
        case _:
            return {"json": json_schema_of(output)}
