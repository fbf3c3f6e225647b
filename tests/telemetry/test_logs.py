"""Log lines: two formats, ids of the span they were written in, one line per request, no texts."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from orchestrator.cache import tenant_digest
from specrej import telemetry
from specrej.telemetry import traces
from tests.faults.world import request
from tests.programs import outcome_of
from tests.serving import failure_of
from tests.world import world


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("specrej.test")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger
    logger.handlers.clear()


def lines_of(logger: logging.Logger, **options: bool) -> io.StringIO:
    """The lines that the logger writes from now on."""
    handler = logging.StreamHandler(text := io.StringIO())
    handler.setFormatter(telemetry.log_formatter("service", **options))
    logger.addHandler(handler)
    return text


def test_lines_have_the_ids_of_their_span(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a line that cannot be found from its trace, or the reverse."""
    tracer = TracerProvider().get_tracer("test")
    monkeypatch.setattr("specrej.telemetry.traces._tracer", tracer)
    text, lines = lines_of(log), lines_of(log, as_json=True)
    with telemetry.span("step") as span:
        log.info("inside")
    log.info("outside")
    trace_id = f"{span.get_span_context().trace_id:032x}"
    inside, outside = (json.loads(line) for line in lines.getvalue().splitlines())
    assert inside["trace_id"] == trace_id and len(inside["span_id"]) == 16
    assert "trace_id" not in outside and outside["message"] == "outside"
    first, second = text.getvalue().splitlines()
    assert f"INFO service specrej.test: inside trace_id={trace_id}" in first
    assert second.endswith("outside")


def test_facts_are_fields_of_their_own(log: logging.Logger) -> None:
    """Guards against numbers that have to be cut out of a sentence."""
    text, lines = lines_of(log), lines_of(log, as_json=True)
    facts = {"n": 8, "score": 0.123456789, "cached": False, "text": 'a "b"\n='}
    log.info("request", extra={"facts": facts})
    (line,) = lines.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["n"], fields["cached"], fields["text"]) == (8, False, 'a "b"\n=')
    assert fields["time"].endswith("Z")
    assert (fields["level"], fields["service"]) == ("INFO", "service")
    assert r'request n=8 score=0.123457 cached=false text="a \"b\"\n="' in text.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_no_text_ends_a_line_or_controls_a_terminal(log: logging.Logger, as_json: bool) -> None:
    """Guards against lines that a prompt forges."""
    lines = lines_of(log, as_json=as_json)
    log.info("request", extra={"facts": {"text": "hi\u2028forged\x85\x9b2J"}})
    log.info("a peer: %s", "hi\u2028forged\x85\x9b2J")
    written = lines.getvalue().splitlines()
    assert len(written) == 2
    for line in written:
        assert line.isprintable() and r"\u2028forged\u0085" in line


async def test_headers_of_callers_are_not_logged() -> None:
    """Guards against thousands of lines, and a blocked event loop, by one call without a token."""
    program = """
from specrej.telemetry import logs, traces
logs.configure("service", "INFO", as_json=False, error_text=False)
for headers in (
    [("baggage", "a," * 180)],
    [("baggage", "\u00e9," * 2700)],
    [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"), ("tracestate", "a,=,\x1b")],
):
    with traces.served("method", headers):
        pass
"""
    assert (await outcome_of(sys.executable, "-c", program))[::2] == (0, "")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exception_is_logged_without_its_text(log: logging.Logger, as_json: bool) -> None:
    """Guards against a stack that breaks the line format, and against a prompt in it."""
    # In this order, because a formatter stores its text on the record for the next one.
    open_ones = lines_of(log, as_json=as_json, error_text=True)
    lines = lines_of(log, as_json=as_json)
    text = " ".join(["a", "prompt"])
    try:
        raise ValueError(text) from KeyError(text)
    except ValueError:
        log.exception("failed")
    assert text in open_ones.getvalue() and text not in lines.getvalue()
    error = lines.getvalue().rstrip("\n")
    if as_json:
        fields = json.loads(error)
        assert fields["message"] == "failed" and "\n" not in error
        error = fields["error"]
    assert __file__ in error and error.endswith("ValueError\nafter:\nKeyError")


@pytest.fixture
def facts(caplog: pytest.LogCaptureFixture) -> Callable[[], dict[str, Any]]:
    """The facts of the only request's line."""
    caplog.set_level(logging.INFO, traces.log.name)

    def of_the_line() -> dict[str, Any]:
        (record,) = (record for record in caplog.records if record.name == traces.log.name)
        fields: dict[str, Any] = record.__dict__["facts"]
        return fields

    return of_the_line


Facts = Callable[[], dict[str, Any]]


async def test_a_request_is_one_line(facts: Facts) -> None:
    """Guards against a request that leaves no trace in the log, or phases that do not add up."""
    async with world() as service:
        answer = await service.stub.Generate(request("Why is it so?"))
    fields = facts()
    assert fields["id"] == answer.request_id and fields["code"] == "OK"
    assert (fields["n"], fields["algorithm"]) == (answer.n, "speculative-rejection")
    assert fields["rounds"] == len(answer.rounds) > 0
    assert fields["tenant"] == tenant_digest("")
    assert fields["generated_tokens"] == answer.usage.generated_tokens
    phases = ("queue_ms", "open_ms", "extend_ms", "score_ms", "prune_ms")
    assert 0 < sum(fields[phase] for phase in phases) <= fields["total_ms"]
    assert (fields["cached"], fields["degraded"], fields["source"]) == (False, False, "run")
    assert not {"prompt", "answer"} & fields.keys()


async def test_a_failed_request_is_a_line(facts: Facts) -> None:
    """Guards against a log of successes."""
    bad = request("Why?")
    bad.selection.n = -1
    async with world() as service:
        error = await failure_of(service.stub.Generate(bad))
    assert error.code().name == "INVALID_ARGUMENT"
    fields = facts()
    assert (fields["code"], fields["n"], fields["rounds"]) == ("INVALID_ARGUMENT", -1, 0)
