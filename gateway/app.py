"""The routes: read a request, call the orchestrator, answer as OpenAI does."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import openapi
from gateway.answers import Answer
from gateway.calls import Call, call_of, parsed
from gateway.errors import HTTPError, response_of
from gateway.mapping import ChatRequest, CompletionRequest, Request
from gateway.receiving import Bodies, Disconnected, until_disconnected
from gateway.settings import GatewaySettings
from gateway.streaming import Events, openai_stream, raw_stream
from specrej import telemetry, wire
from specrej.client import Client
from specrej.errors import InternalError, SpecrejError, Unauthenticated

log = logging.getLogger(__name__)

Handler = Callable[[HTTPRequest], Awaitable[Response]]

_EMBEDDINGS = (
    "there are no embeddings here: `specrej score` and the reward service's Score compare texts"
)


class Gateway:
    """The handlers; `client` is connected to the orchestrator."""

    def __init__(
        self, settings: GatewaySettings, client: Client, exposition: Callable[[], bytes] = bytes
    ) -> None:
        self._settings = settings
        self._client = client
        self._exposition = exposition
        self._bodies = Bodies(settings.max_body_bytes, settings.body_s)
        self.is_ready = False

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            _route("POST", "/v1/chat/completions", self.chat),
            _route("POST", "/v1/completions", self.complete),
            _route("POST", "/v1/specrej/stream", self.stream),
            _route("GET", "/v1/specrej/records/{id}", self.record),
            _route("GET", "/v1/models", self.models),
            _route("GET", "/v1/models/{id:path}", self.model),
            _route("POST", "/v1/embeddings", _refuse_embeddings),
            _route("GET", "/healthz", _health),
            _route("GET", "/readyz", self.readiness),
            _route("GET", "/openapi.json", _document),
            Route("/{path:path}", Endpoint(_nowhere, "unknown")),
        ]
        if self._settings.serves_metrics:
            routes.insert(0, _route("GET", "/metrics", self.metrics))
        origins = [origin for origin in self._settings.cors_origins.split(",") if origin]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        return Starlette(routes=routes, middleware=[cors] if origins else [])

    async def chat(self, request: HTTPRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, ChatRequest)

    async def complete(self, request: HTTPRequest) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, CompletionRequest)

    async def _complete(self, request: HTTPRequest, kind: type[Request]) -> Response:
        token = self._token(request)
        asked = parsed(kind, await self._bodies.read(request))
        call = call_of(asked, self._settings.presets)
        answer = Answer(
            asked.model,
            call.num_choices,
            chat=kind is ChatRequest,
            logprobs=bool(call.options.get("logprobs")),
        )
        try:
            if asked.stream:
                events = await self._events(request, call, token)
                return openai_stream(events, answer, asked, call)
            generating = self._client.generate(
                call.prompt, timeout_s=self._timeout_s(call), token=token, **call.options
            )
            generation = await until_disconnected(request.receive, generating)
            telemetry.note(id=generation.request_id, n=generation.n)
            headers = {"x-request-id": generation.request_id}
            return JSONResponse(answer.whole(generation), headers=headers)
        except SpecrejError as error:
            return response_of(error, call.name_of)

    async def stream(self, request: HTTPRequest) -> Response:
        """POST /v1/specrej/stream: a chat request, answered with every event."""
        token = self._token(request)
        asked = parsed(ChatRequest, await self._bodies.read(request))
        call = call_of(asked, self._settings.presets)
        try:
            events = await self._events(request, call, token)
        except SpecrejError as error:
            return response_of(error, call.name_of)
        return raw_stream(events, call)

    async def _events(self, request: HTTPRequest, call: Call, token: str) -> Events:
        """The events of a call that has begun, or is still silent after `keep_alive_s`.

        Raises:
            SpecrejError: it ended before its first event.
            Disconnected: the client left.
        """
        stream = self._client.stream(
            call.prompt, timeout_s=self._timeout_s(call), token=token, **call.options
        )
        events = Events(stream, self._settings.keep_alive_s)
        try:
            await until_disconnected(request.receive, events.begin())
        except BaseException:
            await events.aclose()
            raise
        return events

    async def record(self, request: HTTPRequest) -> Response:
        """GET /v1/specrej/records/{id}; the id may have the prefix of an answer's."""
        name = request.path_params["id"].rpartition("-")[2]
        record = await self._client.record(name, token=self._token(request))
        return JSONResponse(wire.to_plain(record))

    async def models(self, request: HTTPRequest) -> Response:
        """GET /v1/models: the model, its adapters, and each with every preset."""
        return JSONResponse({"object": "list", "data": await self._models(request)})

    async def model(self, request: HTTPRequest) -> Response:
        """GET /v1/models/{id}."""
        for item in await self._models(request):
            if item["id"] == request.path_params["id"]:
                return JSONResponse(item)
        raise HTTPError(404, "no such model: see /v1/models", code="model_not_found")

    async def _models(self, request: HTTPRequest) -> list[dict[str, Any]]:
        described = (await self._client.describe(token=self._token(request))).generator
        names = (described.model, *described.adapters)
        presets = ("", *(f":{preset}" for preset in self._settings.presets))
        return [
            {"id": f"{name}{preset}", "object": "model", "created": 0, "owned_by": "specrej"}
            for name in names
            for preset in presets
        ]

    async def readiness(self, request: HTTPRequest) -> Response:
        """GET /readyz: whether the orchestrator serves and this process does not drain."""
        if self.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", 503)

    async def metrics(self, request: HTTPRequest) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self._exposition(), media_type="text/plain; version=0.0.4")

    def _timeout_s(self, call: Call) -> float:
        return min(call.timeout_s or self._settings.deadline_s, self._settings.deadline_s)

    def _token(self, request: HTTPRequest) -> str:
        """The bearer token to forward, or none.

        Raises:
            Unauthenticated: there is none, and there must be one.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if not token and not self._settings.serves_anonymous:
            raise Unauthenticated("a token is needed: Authorization: Bearer TOKEN")
        return token if self._settings.forwards_tokens else ""


class Endpoint:
    """A handler as an ASGI application, with telemetry, until its client disconnects."""

    def __init__(self, handler: Handler, route: str) -> None:
        self._handler = handler
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPRequest(scope, receive)
        with telemetry.served_http(scope["method"], self._route, request.headers.items()) as call:
            try:
                response = await self._respond(request)
                call.status = response.status_code
                await response(scope, receive, send)
            except Disconnected:
                call.status = 499  # nginx's number: the client closed the request

    async def _respond(self, request: HTTPRequest) -> Response:
        try:
            return await self._handler(request)
        except Disconnected:
            raise
        except SpecrejError as error:
            return response_of(error)
        except Exception as error:
            error_id = uuid.uuid4().hex
            log.error("bug in %s (error %s)", self._route, error_id, exc_info=error)
            return response_of(InternalError(f"internal error {error_id}"))


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, Endpoint(handler, path), methods=[method])


async def _health(request: HTTPRequest) -> Response:
    return PlainTextResponse("ok\n")


async def _document(request: HTTPRequest) -> Response:
    return JSONResponse(openapi.document())


async def _refuse_embeddings(request: HTTPRequest) -> Response:
    raise HTTPError(400, _EMBEDDINGS, code="not_supported")


async def _nowhere(request: HTTPRequest) -> Response:
    raise HTTPError(404, "no such route: see /openapi.json", code="not_found")
