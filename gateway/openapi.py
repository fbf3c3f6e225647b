"""The OpenAPI document, from the request models."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from gateway.mapping import ChatRequest, CompletionRequest

_PATHS = {
    "/v1/chat/completions": ("post", "Answer a conversation", "ChatRequest"),
    "/v1/completions": ("post", "Continue a raw text", "CompletionRequest"),
    "/v1/specrej/stream": ("post", "A conversation, answered with every event", "ChatRequest"),
    "/v1/specrej/records/{id}": ("get", "The record of one of the latest requests", ""),
    "/v1/models": ("get", "Models, adapters and presets", ""),
    "/v1/models/{id}": ("get", "One of them", ""),
    "/v1/embeddings": ("post", "Always an error with a pointer", ""),
    "/healthz": ("get", "Whether the process runs", ""),
    "/readyz": ("get", "Whether the orchestrator serves", ""),
    "/metrics": ("get", "Metrics for Prometheus; on loopback, or with metrics_route", ""),
}
_STATUSES = {
    "200": "The answer; with stream: true server-sent events",
    "400": "Invalid fields: error.param and error.message name them",
    "401": "No token, or an unknown one",
    "403": "The token lacks the role",
    "404": "No such model, reward or record",
    "429": "Queue or slots are full: retry-after-ms",
    "503": "The orchestrator or a backend is away",
    "504": "The deadline passed",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specrej gateway",
            "version": version("specrej"),
            "description": "docs/gateway.md has what becomes of each field.",
        },
        "paths": {path: {verb: _operation(*rest)} for path, (verb, *rest) in _PATHS.items()},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(summary: str, model: str) -> dict[str, Any]:
    statuses = {code: {"description": text} for code, text in _STATUSES.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": statuses}
    if model:
        schema = {"$ref": f"#/components/schemas/{model}"}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
