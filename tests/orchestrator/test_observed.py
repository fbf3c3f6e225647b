"""Metrics and log lines of requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.observe.requests import observing
from specrej import contracts as c
from specrej import telemetry
from specrej.contracts import errors
from specrej.telemetry import metrics, names
from tests.orchestrator.caching import Clock, generation

REQUEST = c.GenerationRequest(c.Prompt(text="hi"), selection=c.Selection(n=4))
FINISHED = c.Finished(generation())
Noted = dict[Any, tuple[float, dict[str, Any]]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """The last value and labels of each metric, tokens by their kind, and facts of the log line."""
    values: Noted = {}

    def note(metric: object, value: float = 1, **labels: Any) -> None:
        values[labels["kind"] if metric is names.TOKENS else metric] = value, labels

    monkeypatch.setattr(metrics, "record", note)
    monkeypatch.setattr(metrics, "add", note)
    monkeypatch.setattr(
        telemetry, "note", lambda **facts: values.update(dict.fromkeys(facts, (0.0, {})))
    )
    return values


@pytest.mark.parametrize(
    ("error", "passed_s", "events", "outcome"),
    [
        (errors.Overloaded("full"), 0, (), "OVERLOADED"),
        (errors.RewardInvalid("nan"), 0, (), "REWARD_INVALID"),
        (GeneratorExit(), 0, (), "CANCELLED"),
        (TimeoutError(), 0, (), "DEADLINE_EXCEEDED"),
        (ZeroDivisionError("prompt"), 0, (), "INTERNAL"),
        # The server cancels a late call just as a client that hangs up does.
        (asyncio.CancelledError(), 1, (), "CANCELLED"),
        (asyncio.CancelledError(), 4.8, (), "CANCELLED"),
        # grpc rounds the timeout up, and the client cancels before that.
        (asyncio.CancelledError(), 4.91, (), "DEADLINE_EXCEEDED"),
        # A stream is closed once it has sent its answer.
        (GeneratorExit(), 0, (FINISHED,), None),
    ],
)
def test_the_outcome_is_ok_or_the_reason_of_the_error(
    noted: Noted,
    error: BaseException,
    passed_s: float,
    events: tuple[c.Event, ...],
    outcome: str | None,
) -> None:
    """Guards against errors under another name than the caller's status has."""
    clock = Clock()
    observation = observing(REQUEST, "toy", clock.now_s, 5.0, clock)
    with pytest.raises(type(error)), observation as observed:
        clock.now_s += passed_s
        for event in events:
            observed.add(event)
        raise error
    seconds, labels = noted[names.GEN_AI_DURATION]
    assert (labels.get(names.FAILURE), labels[names.REQUEST_MODEL]) == (outcome, "toy")
    assert seconds == pytest.approx(passed_s)


def test_a_run_is_counted(noted: Noted) -> None:
    """Guards against milliseconds as seconds, wrong savings, and answers in the log."""
    usage = generation().usage
    with observing(REQUEST, "toy", 0.0) as observed:
        observed.add(c.Finished(replace(generation(), timings=c.Timings(total_ms=2000.0))))
    assert noted[names.REQUEST_DURATION][0] == 2.0
    saved, _ = noted["saved"]
    assert saved == usage.best_of_n_tokens_estimate - usage.generated_tokens > 0
    assert "score" in noted and "answer" not in noted
