"""The routes: read a request, call the orchestrator, answer as OpenAI does."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import images
from gateway.answers import JSON, STOPPED_BY, VERIFIED, Answer, in_thread
from gateway.bodies import Bodies, Disconnected, until_disconnected
from gateway.errors import MESSAGES, HTTPError, for_caller, response_of
from gateway.fields import parsed
from gateway.messages import MessagesRequest
from gateway.page import Page
from gateway.requests import Call, ChatRequest, CompletionRequest, Request, call_of
from gateway.responses import ResponsesRequest
from gateway.scores import RerankRequest, ScoreRequest
from gateway.settings import GatewaySettings
from gateway.streaming import Events, PackedResponse, answer_stream, raw_stream
from specrej import telemetry
from specrej.client import Client
from specrej.client.client import answer_of
from specrej.contracts import ServiceDescription, wire
from specrej.contracts.errors import SpecrejError, Unauthenticated
from specrej.threads import all_of

T = TypeVar("T")

Handler = Callable[[HTTPRequest], Awaitable[Response]]

_MAX_TOKEN_CHARACTERS = 4096  # a longer one would exceed grpc's bound of metadata
_READ_S = 10.0  # for descriptions
_CHECKED_S = 60.0  # between two looks at whether the orchestrator checks tokens
_CLIENT_LEFT = 499  # nginx's number
_PROBES = "/healthz", "/readyz"
# Headers of replies that pages of other origins may read.
_IGNORED = "x-specrej-ignored"  # names of the request's fields without effect
_SHOWN_HEADERS = (
    *("x-request-id", "x-should-retry", "retry-after", "retry-after-ms", _IGNORED),
    *(STOPPED_BY, VERIFIED),
)
_NAME, _MAX_NAMES = re.compile(r"[\w.-]{1,64}", re.ASCII), 32


class Gateway:
    """The handlers; `client` is that of the orchestrator."""

    def __init__(self, settings: GatewaySettings, client: Client) -> None:
        self._settings = settings
        self._client = client
        self._bodies = Bodies(settings.max_body_bytes)
        self._page = Page()
        self._checks_tokens = False
        self._known_until_s = 0.0
        self.is_ready = False

    def app(self) -> Starlette:
        """The ASGI application."""
        handlers: dict[str, Handler] = {
            "POST /v1/chat/completions": partial(self._complete, kind=ChatRequest),
            "POST /v1/completions": partial(self._complete, kind=CompletionRequest),
            "POST /v1/responses": partial(self._complete, kind=ResponsesRequest),
            f"POST {MESSAGES}": partial(self._complete, kind=MessagesRequest),
            "POST /v1/score": partial(self._score, kind=ScoreRequest),
            "POST /v1/rerank": partial(self._score, kind=RerankRequest),
            "GET /v1/models": self.models,
            "GET /v1/models/{id:path}": self.model,
            "POST /v1/specrej/stream": partial(self._complete, kind=ChatRequest, is_raw=True),
            "GET /v1/specrej/describe": self.describe,
            "GET /": self.page,
            "GET /page/{name}": self.page,
            f"GET {_PROBES[0]}": self.health,
            f"GET {_PROBES[1]}": self.readiness,
        }
        routes: list[Route] = []
        others: list[Route] = []
        for key, handler in handlers.items():
            method, path = key.split()
            # Probes are in no trace and no metric.
            endpoint = handler if path in _PROBES else Endpoint(handler, path)
            routes.append(Route(path, endpoint, methods=[method]))
            others.append(Route(path, Endpoint(partial(_wrong_method, method), path)))
        unknown = Route("/{path:path}", Endpoint(self.nowhere, "unknown"))
        origins = [origin.strip() for origin in self._settings.cors_origins.split(",")]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=[*filter(None, origins)],
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN_HEADERS,
        )
        routes += [*others, unknown]
        return Starlette(routes=routes, middleware=[cors] if any(origins) else [])

    def probes(self) -> Starlette:
        """The ASGI application of the port for probes alone."""
        return Starlette(routes=[*map(Route, _PROBES, (self.health, self.readiness))])

    async def _score(self, http: HTTPRequest, kind: type[ScoreRequest | RerankRequest]) -> Response:
        """Score answers to prompts by a reward, or order them."""
        token = await self._token(http)
        ignored = set[str]()
        body = await self._bodies.read(http)
        request = parsed(kind, body, ignored)
        calls = request.calls()
        how: dict[str, Any] = {"reward": request.model or "", "data": request.data}
        how |= {"unfinished": bool(request.unfinished), "timeout_s": request.timeout_s}
        try:
            calls = [(await images.upright(prompt), texts) for prompt, texts in calls]
            works = [self._client.score(*call, **how, token=token) for call in calls]
            results = await until_disconnected(http.receive, all_of(works))
        except SpecrejError as error:
            return response_of(for_caller(error, "a request"), request.name_of)
        return _noted(JSONResponse(request.reply(results)), ignored)

    async def _complete(
        self, http: HTTPRequest, kind: type[Request], *, is_raw: bool = False
    ) -> Response:
        """Answer a conversation or raw texts; `is_raw`: by every event of the orchestrator."""
        token = await self._token(http)
        ignored = set[str]()
        body = await self._bodies.read(http)
        request = parsed(kind, body, ignored)
        presets = self._settings.presets
        call = call_of(request, presets, self._settings.model_names)
        answer = request.answer(call)
        try:
            call = replace(call, prompt=await images.upright(call.prompt))
            if is_raw:
                shown = dict.fromkeys(("progress", "texts", "text_deltas"), True)
                events = await self._events(http, call, token, **shown)
                return _noted(raw_stream(events, call), ignored)
            if request.stream:
                # Other answers are sent whole at the end, so text deltas are not requested.
                events = await self._events(http, call, token, text_deltas=answer.streams_text)
                return _noted(answer_stream(events, answer, call), ignored)
            options = {**call.options, "timeout_s": call.timeout_s, "token": token}
            work = self._client.reply(call.prompt, **options)
            reply = [await until_disconnected(http.receive, work)]
            respond = partial(_response, answer, reply)
            response, n = await in_thread(respond, is_large=call.wants_logprobs)
            telemetry.note(id=response.headers["x-request-id"], n=n)
            return _noted(response, ignored)
        except SpecrejError as error:
            if error.metadata.get("field") == "model" and ":" in request.model:
                error.message += f"; presets, after a colon: {', '.join(presets)}"
            return response_of(for_caller(error, "a request"), call.name_of, http.url.path)

    async def _events(self, http: HTTPRequest, call: Call, token: str, **shown: Any) -> Events:
        """The events of a call; returns when there is one, or after `keep_alive_s`.

        `shown`: the events within rounds, as options of `Client.stream`.

        Raises:
            SpecrejError: it failed before its first event.
            Disconnected: the client left.
        """
        shown |= {"timeout_s": call.timeout_s, "token": token}
        stream = self._client.stream(call.prompt, **shown, **call.options)
        events = Events(stream, self._settings.keep_alive_s)
        try:
            await until_disconnected(http.receive, events.peek())
        except BaseException:
            await events.aclose()
            raise
        return events

    async def _token(self, http: HTTPRequest) -> str:
        """The bearer token to forward, or none.

        Raises:
            Unauthenticated: there is none, and there must be one; or it is too long.
            SpecrejError: the orchestrator does not answer.
        """
        given = http.headers.getlist("authorization")
        if http.url.path == MESSAGES:  # Anthropic's clients have a header of their own
            given += [f"Bearer {key}" for key in http.headers.getlist("x-api-key")]
        if len(given) > 1:
            raise Unauthenticated("two Authorization headers or keys: send one")
        scheme, _, token = "".join(given).partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if len(token) > _MAX_TOKEN_CHARACTERS:
            raise Unauthenticated(f"the token has more than {_MAX_TOKEN_CHARACTERS} characters")
        host = http.headers.get("host", "localhost")
        if not self._settings.needs_no_token(host):
            only = ", or localhost as Host" if self._settings.serves_anonymous else ""
            if not token:
                raise Unauthenticated(f"a token is needed: Authorization: Bearer TOKEN{only}")
            if not self._settings.tls_client_ca:  # otherwise the caller has a certificate
                await self._check_that_tokens_count(only)
        return token if self._settings.forwards_tokens else ""

    async def _check_that_tokens_count(self, only: str) -> None:
        """Raises Unauthenticated: no token is checked anywhere, so that any text would be one."""
        if not self._settings.forwards_tokens:
            text = "they are not sent in plaintext to another machine: set orchestrator_tls_ca"
            raise Unauthenticated(f"tokens are needed{only}, but {text}")
        if not await self._is_token_checked():
            text = "the orchestrator checks none: set its tokens_file, or allow_anonymous here"
            raise Unauthenticated(f"tokens are needed{only}, but {text}")

    async def _is_token_checked(self) -> bool:
        """Whether the orchestrator refuses a random token; asked once a minute.

        Raises:
            SpecrejError: the orchestrator does not answer.
        """
        if time.monotonic() >= self._known_until_s:
            token = secrets.token_urlsafe()
            try:
                await self._client.describe(timeout_s=_READ_S, token=token)
                self._checks_tokens = False
            except Unauthenticated:
                self._checks_tokens = True
            self._known_until_s = time.monotonic() + _CHECKED_S
        return self._checks_tokens

    async def _described(self, http: HTTPRequest) -> ServiceDescription:
        """The description of the service, unless the caller leaves."""
        reading = self._client.describe(timeout_s=_READ_S, token=await self._token(http))
        return await until_disconnected(http.receive, reading)

    async def describe(self, http: HTTPRequest) -> Response:
        """The service: generator, rewards, load and defaults."""
        return JSONResponse(wire.to_plain(await self._described(http)))

    async def page(self, http: HTTPRequest) -> Response:
        """The page to watch requests, or another file of it."""
        return self._page.response(http.path_params.get("name", "index.html"), http.headers)

    async def models(self, http: HTTPRequest) -> Response:
        """The models, each alone and with every preset."""
        return JSONResponse({"object": "list", "data": await self._models(http)})

    async def model(self, http: HTTPRequest) -> Response:
        """One of the models."""
        for item in await self._models(http):
            if item["id"] == http.path_params["id"]:
                return JSONResponse(item)
        raise HTTPError(404, "no such model: /v1/models lists them", "model_not_found")

    async def _models(self, http: HTTPRequest) -> list[JSON]:
        described = await self._described(http)
        generator = described.generator
        names = (generator.model, *generator.adapters)
        names = tuple(dict.fromkeys((*self._settings.model_names, *names)))
        suffixes = ("", *(f":{preset}" for preset in self._settings.presets))
        common = {"object": "model", "created": 0, "owned_by": "specrej"}
        common |= {"max_model_len": generator.context_tokens, "specrej": generator.form_summary}
        return [{"id": name + suffix, **common} for name in names for suffix in suffixes]

    async def health(self, http: HTTPRequest) -> Response:
        """Whether the process runs."""
        return PlainTextResponse("ok\n")

    async def readiness(self, http: HTTPRequest) -> Response:
        """Whether the orchestrator serves and this process does not end."""
        return PlainTextResponse("ready\n") if self.is_ready else PlainTextResponse("no\n", 503)

    async def nowhere(self, http: HTTPRequest) -> Response:
        raise HTTPError(404, "unknown route", "not_found")


def _response(answer: Answer, reply: list[bytes]) -> tuple[Response, int]:
    """The answer to a request that does not stream, and its number of candidates; `reply` is taken
    from its list, so that its bytes are free while the body is made."""
    generation = answer_of(reply.pop())
    return PackedResponse(answer.body(generation), answer.headers(generation)), generation.n


def _noted(response: Response, ignored: Iterable[str]) -> Response:
    """The response with the names of fields without effect; unusual ones as "?"."""
    names = dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in sorted(ignored))
    if names:
        response.headers[_IGNORED] = ", ".join([*names][:_MAX_NAMES])
    return response


async def _wrong_method(method: str, http: HTTPRequest) -> Response:
    """An error that names the method of the route."""
    refused = HTTPError(405, f"the method must be {method}", "method_not_allowed")
    response = response_of(refused)
    response.headers["allow"] = method
    return response


class Endpoint:
    """A handler as an ASGI application with telemetry; what it raises becomes a response."""

    def __init__(self, handler: Handler, route: str) -> None:
        self._handler = handler
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HTTPRequest(scope, receive)
        told = scope["method"], self._route, scope["scheme"]
        with telemetry.served_http(*told, http.headers.items()) as call:
            try:
                response = await self._respond(http)
                call.code = response.status_code
                await response(scope, receive, send)
            except Disconnected:
                call.code = _CLIENT_LEFT

    async def _respond(self, http: HTTPRequest) -> Response:
        try:
            return await self._handler(http)
        except Disconnected:
            raise
        except Exception as error:
            return response_of(for_caller(error, self._route), route=self._route)
