"""Log lines as text or JSON, with the ids of the current span.

A request ends with one line of the facts noted while it ran. Prompts and answers are logged only if
a setting allows it.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from opentelemetry import trace

Fact = str | int | float | bool

# The level setting applies to these; libraries log from WARNING on, as some log every call.
_OURS = ("specrej", "orchestrator", "generator_service", "reward_service", "gateway", "__main__")
_MAX_CHAIN = 8  # of chained exceptions

# The facts of the request in this context; None outside of requests.
_noted: ContextVar[dict[str, Fact] | None] = ContextVar("noted", default=None)


def configure(service: str, level: str, *, as_json: bool, error_text: bool) -> None:
    """Log to stderr: this project's loggers from `level` on, libraries from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(service, as_json=as_json, error_text=error_text))
    libraries = max(logging.WARNING, logging.getLevelNamesMapping()[level])
    logging.basicConfig(level=libraries, handlers=[handler])
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    # It warns of invalid tracestate headers, which callers choose.
    logging.getLogger(trace.span.__name__).setLevel(logging.ERROR)


def log_formatter(
    service: str, *, as_json: bool = False, error_text: bool = False
) -> logging.Formatter:
    """The format of a service's logs; `error_text`: include the messages of exceptions."""
    kind = _Json if as_json else _Text
    return kind(service, error_text=error_text)


@contextmanager
def noting() -> Iterator[dict[str, Fact]]:
    """Collect the facts noted in this context."""
    facts: dict[str, Fact] = {}
    token = _noted.set(facts)
    try:
        yield facts
    finally:
        _noted.reset(token)


def note(**facts: Fact) -> None:
    """Add facts to the final log line of the current request."""
    noted = _noted.get()
    if noted is not None:
        noted.update(facts)


class _Formatter(logging.Formatter):
    """Formats exceptions by type and place, without their text, which may quote a prompt."""

    def __init__(self, service: str, *, error_text: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")
        self._service = service
        self._error_text = error_text

    def formatException(self, ei: Any) -> str:  # noqa: N802
        if self._error_text:
            return super().formatException(ei)
        error: BaseException | None = ei[1]
        parts: list[str] = []
        while error is not None and len(parts) < _MAX_CHAIN:
            frames = "".join(traceback.format_tb(error.__traceback__))
            parts.append(f"{frames}{type(error).__qualname__}")
            hidden = None if error.__suppress_context__ else error.__context__
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
            error = first or error.__cause__ or hidden
        return "\nafter:\n".join(parts)


class _Text(_Formatter):
    """One line of text; the frames of an exception follow."""

    def format(self, record: logging.LogRecord) -> str:
        # Other handlers cache their formatted exception on the record.
        cached, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = cached

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        if not record.message.isprintable():  # of a peer, it could forge lines
            record.message = json.dumps(record.message)
        values = {**_facts_of(record), **_span_ids()}
        return " ".join(
            [super().formatMessage(record), *(f"{key}={_plain(values[key])}" for key in values)]
        )


class _Json(_Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Fact] = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts_of(record),
            **_span_ids(),
        }
        if record.exc_info and record.exc_info[0]:
            line["error"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False)
        # Other signs might end the line, or control a terminal.
        return text if text.isprintable() else json.dumps(line)


def _facts_of(record: logging.LogRecord) -> dict[str, Fact]:
    """The `extra` of a line; in JSON each fact is a field."""
    facts: dict[str, Fact] = getattr(record, "facts", {})
    return facts


def _span_ids() -> dict[str, Fact]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
    }


def _plain(value: Fact) -> str:
    """The value as one word, else as JSON."""
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str) and (not value or " " in value or not value.isprintable()):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
