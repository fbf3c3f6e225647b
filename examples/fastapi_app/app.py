"""A web service in front of specrej: whole answers, and text as server-sent events."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field

import specrej
from specrej import Client, Event, Finished, SpecrejError, TextDelta

# All other errors are 500: authentication, for one, concerns this service and not its callers.
STATUSES = {
    specrej.InvalidRequest: 422,
    specrej.Overloaded: 429,
    specrej.Unavailable: 503,
    specrej.DeadlineExceeded: 504,
}


class Question(BaseModel):
    """The body of a request; the fields beside `text` are options of `Client.generate`."""

    text: str = Field(min_length=1, max_length=4000)
    n: int = Field(16, ge=1, le=64, description="candidates")
    max_tokens: int = Field(128, ge=1, le=512)
    temperature: float = Field(0.7, ge=0.01, le=2)

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"text"})


class Answer(BaseModel):
    """`generated_tokens` is what all candidates took together."""

    text: str
    score: float
    generated_tokens: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client, and so one connection, for all requests."""
    address = os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")
    async with Client(address, timeout_s=60) as app.state.client:
        yield


app = FastAPI(title="Answers", lifespan=lifespan)


ClientOf = Annotated[Client, Depends(lambda: app.state.client)]


@app.exception_handler(SpecrejError)
async def on_error(request: Request, error: SpecrejError) -> JSONResponse:
    """A status, and `Retry-After` if a retry may succeed."""
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 500)
    delay_s = error.retry_after_s
    headers = {} if delay_s is None else {"Retry-After": str(math.ceil(delay_s))}
    return JSONResponse({"detail": error.message}, status, headers)


@app.post("/answer")
async def answer(question: Question, client: ClientOf) -> Answer:
    """The best of `n` answers."""
    generation = await client.generate(question.text, **question.options)
    best, usage = generation.best, generation.usage
    return Answer(text=best.text, score=best.score, generated_tokens=usage.generated_tokens)


async def events_of(question: Question, client: ClientOf) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of an admitted request. The call ends with the response, also if its client left.

    A request that is refused raises here, before the response begins, and has a status of its own.
    """
    call = client.stream(question.text, text_deltas=True, **question.options)
    async with aclosing(call) as events:
        first = await anext(events)

        async def all_events() -> AsyncIterator[Event]:
            yield first
            async for event in events:
                yield event

        yield all_events()


@app.post("/stream", response_class=EventSourceResponse)
async def stream(
    events: Annotated[AsyncIterator[Event], Depends(events_of)],
) -> AsyncIterator[ServerSentEvent]:
    """Events `text`, whose texts together are the answer, then `done` or `error`.

    Text begins when one candidate is certain to win; before that there are pings.
    """
    sent = ""
    try:
        async for event in events:
            if isinstance(event, TextDelta):
                sent += event.text
                yield ServerSentEvent(event="text", data=event.text)
            elif isinstance(event, Finished):
                best = event.generation.best
                # An answer of the cache has no deltas.
                if rest := best.text.removeprefix(sent):
                    yield ServerSentEvent(event="text", data=rest)
                yield ServerSentEvent(event="done", data={"score": best.score})
    except SpecrejError as error:
        yield ServerSentEvent(event="error", data={"detail": error.message})
