"""Work beside the event loop: large messages are converted in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from specrej import contracts as c
from specrej.security import current_caller

T = TypeVar("T")
R = TypeVar("R")

# Converting so many tokens or traced candidates takes about 3 ms.
_LARGE = 1000
_CHARACTERS = 64  # of a text, which take as long as one token
_BYTES = 8  # of a stored answer, which is compressed, likewise

# Not the event loop's own threads, which all rounds need.
_THREADS = ThreadPoolExecutor(4, "messages")
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


async def converted(convert: Callable[[T], R], value: T) -> R:
    """Return `convert(value)`, computed in a thread if the value is large, so that calls and health
    checks do not wait for the event loop; one at a time per tenant, so that no tenant occupies all
    threads."""
    if num_values(value) < _LARGE:
        return convert(value)
    turn = _turns.setdefault(current_caller().tenant, asyncio.Lock())
    async with turn:
        working = asyncio.get_running_loop().run_in_executor(_THREADS, convert, value)
        try:
            return await asyncio.shield(working)
        finally:
            await asyncio.wait({working})  # after a cancellation, too, the thread is not free yet


def num_values(value: object) -> int:
    """Tokens, traced candidates and parts of texts of an event or an answer."""
    match value:
        case bytes():
            return len(value) // _BYTES
        case c.Finished(c.Generation(candidates, rounds)) | c.Generation(candidates, rounds):
            return sum(map(num_values, (*rounds, *candidates)))
        case c.RankedCandidate():
            tokens = len(value.token_ids) + sum(len(top.tokens) for top in value.top_logprobs)
            return tokens + len(value.text) // _CHARACTERS
        case c.RoundCompleted(trace, texts=texts):
            return num_values(trace) + sum(len(item.text) for item in texts) // _CHARACTERS
        case c.RoundTrace():
            return len(value.candidates)
        case _:
            return 0
