"""Log lines: two formats, ids of the span they were written in, one line per request, no texts."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from specrej import telemetry
from specrej.telemetry import calls, logs
from tests.orchestrator.services import whole
from tests.serving import failure_of
from tests.telemetry.observed import request as asked


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("specrej.test")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield logger
    logger.handlers.clear()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spans that are recorded; nobody exports them."""
    provider = TracerProvider()
    monkeypatch.setattr("specrej.telemetry.traces._tracer", provider.get_tracer("test"))
    yield
    provider.shutdown()


def heard(logger: logging.Logger, **options: bool) -> io.StringIO:
    """What it says from now on."""
    handler = logging.StreamHandler(text := io.StringIO())
    handler.setFormatter(telemetry.log_formatter("service", **options))
    logger.addHandler(handler)
    return text


def test_libraries_are_heard_from_warnings_on() -> None:
    # A library that logged every call at INFO wrote a line per batch into a reward service's log.
    program = """
import logging
from specrej.telemetry import logs
logs.configure("service", "INFO", as_json=False, error_text=False)
for name in ("httpx2", "reward_service.worker"):
    logging.getLogger(name).info("told by %s", name)
    logging.getLogger(name).warning("warned by %s", name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    told = [line.rpartition(" by ")[0].split()[-1] for line in done.stderr.splitlines()]
    assert told == ["warned", "told", "warned"]


@pytest.mark.usefixtures("recorded")
def test_lines_have_the_ids_of_their_span(log: logging.Logger) -> None:
    """Guards against a line that cannot be found from its trace, or the reverse."""
    text, lines = heard(log), heard(log, as_json=True)
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
    text, lines = heard(log), heard(log, as_json=True)
    logs.say(log, "request", {"n": 8, "score": 0.123456789, "cached": False, "said": 'a "b"\n='})
    (line,) = lines.getvalue().splitlines()
    told = json.loads(line)
    assert (told["n"], told["cached"], told["said"]) == (8, False, 'a "b"\n=')
    assert told["time"].endswith("Z") and told["level"] == "INFO" and told["service"] == "service"
    assert r'request n=8 score=0.123457 cached=false said="a \"b\"\n="' in text.getvalue()


def test_an_exception_stays_one_json_line_without_its_text(log: logging.Logger) -> None:
    """Guards against a stack that breaks the line format, and against a prompt in it."""
    lines, open_ones = heard(log, as_json=True), heard(log, as_json=True, error_text=True)
    try:
        raise ValueError(" ".join(["a", "prompt"]))
    except ValueError:
        log.exception("failed")
    (line,) = lines.getvalue().splitlines()
    told = json.loads(line)
    assert told["message"] == "failed" and told["error"].endswith("ValueError")
    assert "a prompt" not in line and "a prompt" in open_ones.getvalue()


def test_what_is_noted_outside_of_a_call_is_nobodys() -> None:
    """Guards against facts of one request in the line of the next."""
    telemetry.note(n=1)
    with logs.noting() as first:
        telemetry.note(n=2)
    with logs.noting() as second:
        telemetry.note(m=3)
    assert (first, second) == ({"n": 2}, {"m": 3})


class Lines(logging.Handler):
    """The facts of requests' lines."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.facts.append(getattr(record, "facts", {}))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, level = Lines(), calls.log.level
    calls.log.addHandler(handler)
    calls.log.setLevel(logging.INFO)
    yield handler
    calls.log.removeHandler(handler)
    calls.log.setLevel(level)


async def test_a_request_is_one_line(lines: Lines) -> None:
    """Guards against a request that leaves no trace in the log, or phases that do not add up."""
    async with whole() as service:
        answer = await service.stub.Generate(asked("Why is it so?"))
    (facts,) = lines.facts
    assert facts["id"] == answer.request_id and facts["code"] == "OK"
    assert (facts["n"], facts["algorithm"]) == (answer.n, "speculative-rejection")
    assert facts["rounds"] == len(answer.rounds) > 0
    assert facts["generated_tokens"] == answer.usage.generated_tokens
    phases = ("queue_ms", "open_ms", "extend_ms", "score_ms", "prune_ms")
    assert 0 < sum(facts[phase] for phase in phases) <= facts["total_ms"]
    assert (facts["cached"], facts["degraded"], facts["source"]) == (False, False, "run")
    assert not {"prompt", "answer"} & facts.keys()


async def test_a_request_that_fails_is_a_line_too(lines: Lines) -> None:
    """Guards against a log of successes."""
    bad = asked("Why?")
    bad.selection.n = -1
    async with whole() as service:
        error = await failure_of(service.stub.Generate(bad))
    assert error.code().name == "INVALID_ARGUMENT"
    (facts,) = lines.facts
    assert (facts["code"], facts["n"], facts["rounds"]) == ("INVALID_ARGUMENT", -1, 0)


async def test_texts_are_there_for_whoever_asks(lines: Lines) -> None:
    """Guards the setting that is for finding out what somebody has seen."""
    async with whole() as service:
        service.orchestrator._log_texts = True
        answer = await service.stub.Generate(asked("Why is it so?"))
    (facts,) = lines.facts
    assert "Why is it so?" in facts["prompt"]
    assert facts["answer"] == answer.candidates[0].text
