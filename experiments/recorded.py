"""Whole answers as a `Generator`: it reveals them token by token, to the loop that serves requests.

The tokens of a candidate depend on its seed, id and step only. So candidates that were generated
once to their ends answer any request for them, with its rounds, waves and stops, exactly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from specrej import contracts as c

_GAUGE = c.SlotGauge(1 << 30, 0, 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """One candidate. `confidences`: the log-probabilities of the most probable tokens per step."""

    text: str
    tokens: tuple[bytes, ...]
    logprobs: tuple[float, ...]
    confidences: tuple[tuple[float, ...], ...]
    finish: c.FinishReason

    @classmethod
    def of(cls, ranked: c.RankedCandidate) -> Answer:
        """A candidate of a reply to a request with `logprobs` and `top_logprobs`."""
        tops = (tuple(one.logprob for one in top.tokens) for top in ranked.top_logprobs)
        return cls(ranked.text, ranked.tokens, ranked.logprobs, tuple(tops), ranked.finish)

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Answer:
        tokens = tuple(token.encode("latin-1") for token in line["tokens"])
        tops = tuple(map(tuple, line["confidences"]))
        finish = c.FinishReason(line["finish"])
        return cls(line["text"], tokens, tuple(line["logprobs"]), tops, finish)

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "logprobs": [round(value, 4) for value in self.logprobs],
            "confidences": [[round(value, 3) for value in top] for top in self.confidences],
            "finish": self.finish.value,
        }

    def at(
        self, number: int, position: int, known: int = 0, *, with_top: bool = False
    ) -> c.Candidate:
        """The candidate `number` at its first `position` tokens; `known` of them are not new."""
        end = min(position, len(self.tokens))
        is_over = end == len(self.tokens)
        text = self.text if is_over else b"".join(self.tokens[:end]).decode(errors="ignore")
        new = range(known, end)
        return c.Candidate(
            number,
            text,
            end,
            sum(self.logprobs[:end]),
            self.finish if is_over else None,
            tuple(new),
            tuple(self.logprobs[known:end]),
            (),
            tuple(v for step in new for v in self.confidences[step]) if with_top else (),
        )


class RecordedGenerator:
    """A `Generator` of these candidates, which have as many of `confidences` at each step."""

    def __init__(self, answers: Sequence[Answer], form: c.AnswerForm = c.PLAIN) -> None:
        self._answers, self._form = answers, form

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[RecordedSession]:
        yield RecordedSession(self._answers, spec, self._form)

    async def check(self, spec: c.SessionSpec) -> None:
        return

    async def describe(self) -> c.GeneratorDescription:
        raise NotImplementedError


class RecordedSession:
    """A `Session`."""

    reduced, fingerprint, costly_rounds, prompt_tokens = False, "recorded", False, 1

    def __init__(self, answers: Sequence[Answer], spec: c.SessionSpec, form: c.AnswerForm) -> None:
        self.answer_form = form
        ids = range(spec.first_id, spec.first_id + spec.n)
        self._live = {number: answers[number] for number in ids}
        self._with_top = spec.sampling.top_logprobs > 0
        self._position = 0
        self.n, self.max_tokens = spec.n, spec.sampling.max_tokens

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        known, until = self._position, min(until_tokens, self.max_tokens)
        grown = [
            answer.at(number, until, known, with_top=self._with_top)
            for number, answer in self._live.items()
        ]
        self._live = {one.id: self._live[one.id] for one in grown if not one.finish}
        self._position = until if self._live else max((one.num_tokens for one in grown), default=0)
        ended_by = c.RoundEnd.DECISION_TOKEN if self._live else c.RoundEnd.ALL_FINISHED
        return c.Round(tuple(grown), ended_by, self._position, _GAUGE)

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        self._live = {number: one for number, one in self._live.items() if number in keep}
        return c.Pruned(0, _GAUGE)
