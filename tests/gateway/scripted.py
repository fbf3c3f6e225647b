"""Answers with parts, as an orchestrator sends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.fields import Checked
from specrej import contracts as c
from tests.specrej.fakes import EVENTS, ONE, FakeOrchestrator

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLS = (
    c.ToolCall("call_3_0", "weather", '{"city":"Oslo"}'),
    c.ToolCall("call_3_1", "weather", '{"city":"Rome"}'),
)
ALL = c.AnswerParts("Let me see.", "It may rain.", CALLS)
ONLY_CALLS = c.AnswerParts(tool_calls=CALLS)
ONLY_TEXT = c.AnswerParts("the best")


def deltas(parts: c.AnswerParts) -> Iterator[c.PartsDelta]:
    """The parts, a few characters at a time."""

    def cut(text: str) -> Iterator[str]:
        return (text[at : at + 3] for at in range(0, len(text), 3))

    yield from (c.PartsDelta(reasoning=text) for text in cut(parts.reasoning))
    yield from (c.PartsDelta(text) for text in cut(parts.content))
    for index, call in enumerate(parts.tool_calls):
        yield c.PartsDelta(tool_calls=(c.ToolCallDelta(index, call.id, call.name),))
        for text in cut(call.arguments):
            yield c.PartsDelta(tool_calls=(c.ToolCallDelta(index, arguments=text),))


def script(
    orchestrator: FakeOrchestrator, parts: c.AnswerParts, num_sent: int = 1000, **changes: Any
) -> None:
    """Answer with these parts; streams send at most `num_sent` deltas before the end."""
    best = replace(ONE.best, text="raw", parts=parts, **changes)
    answer = replace(ONE, candidates=(best,))
    sent = [c.TextDelta(best.id, "r", delta) for delta in deltas(parts)]
    orchestrator.answer = answer
    orchestrator.events = (EVENTS[0], *EVENTS[2:3], *sent[:num_sent], c.Finished(answer))


def known(model: type[Checked]) -> set[str]:
    """All fields of a model, by the names that callers use."""
    named = {field.alias or name for name, field in model.model_fields.items()}
    return named | {*model.ignores}
