"""Beyond rounds, on request: how far candidates have grown, their texts, and text that is certain.

The winner is certain while one candidate is live and none has ended: its text can be sent as it
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrej import contracts as c
from specrej.answer_form import PartsReader

# Characters of the texts of one round.
_MAX_CHARACTERS = 262_144


@dataclass(frozen=True, slots=True)
class WithinRounds:
    """Which events within rounds are requested, and their receiver: `emit` returns at once.

    `texts`: whether events of rounds have the texts of candidates.
    """

    emit: Callable[[c.Progress | c.TextDelta], None]
    progress: bool = True
    text_deltas: bool = True
    texts: bool = False


class ProgressReporter:
    """Reports how one request grows."""

    def __init__(self, within: WithinRounds, stop: Sequence[str]) -> None:
        """`stop` texts are not part of an answer: what may be the beginning of one is held back."""
        self._within = within
        self._num_held = max(map(len, stop), default=1) - 1
        self.sent = ""  # text of the winner
        self._reader: PartsReader | None = None
        self._content = self._reasoning = ""  # that are sent
        self._has_calls = False
        self._most_tokens = 0

    def begin(self, form: c.AnswerForm) -> None:
        """A session is open; another one of the same request has the same form."""
        if form != c.PLAIN:
            self._reader = self._reader or PartsReader(form)

    def report(self, grown: c.Round, *, is_certain: bool) -> None:
        """Report what has grown in a round so far."""
        slots = grown.slots
        if self._within.progress:
            # A request that starts again at another generator does not fall back.
            self._most_tokens = max(self._most_tokens, grown.num_tokens)
            progress = c.Progress(self._most_tokens, grown.num_live, slots.session, slots.capacity)
            self._within.emit(progress)
        if is_certain and self._within.text_deltas:
            for candidate in grown.candidates:
                self._send(candidate)

    def texts(self, ended: c.Round, trace: c.RoundTrace) -> tuple[c.CandidateText, ...]:
        """Texts of a round's candidates, best first; none unless they are requested."""
        texts = {candidate.id: candidate.text for candidate in ended.candidates}
        chosen: list[c.CandidateText] = []
        num_left = _MAX_CHARACTERS if self._within.texts else 0
        for candidate in trace.candidates:
            num_left -= len(texts[candidate.id])
            if num_left < 0:
                break
            chosen.append(c.CandidateText(candidate.id, texts[candidate.id]))
        return tuple(chosen)

    def end(self, answer: c.RankedCandidate) -> None:
        """Send what is held back of an answer: of one that the deadline cut short, and of parts."""
        if not self.sent:
            return
        self._send(answer)
        if answer.parts and (rest := self._rest_of(answer.parts)) != c.PartsDelta():
            self._within.emit(c.TextDelta(answer.id, "", rest))

    def _send(self, winner: c.Candidate | c.RankedCandidate) -> None:
        end = len(winner.text) - (0 if winner.finish else self._num_held)
        text = winner.text[: max(0, end)]
        # The end of a text may change while a character is incomplete.
        if text.startswith(self.sent) and text != self.sent:
            new = text[len(self.sent) :]
            self._within.emit(c.TextDelta(winner.id, new, self._new_parts(new)))
            self.sent = text

    def _new_parts(self, text: str) -> c.PartsDelta | None:
        """What a text adds. Calls wait for the end, and so does what follows them: if they are not
        valid, they are content."""
        if not self._reader:
            return None
        delta = self._reader.feed(text)
        self._has_calls = self._has_calls or bool(delta.tool_calls)
        content = "" if self._has_calls else delta.content
        self._content += content
        self._reasoning += delta.reasoning
        return c.PartsDelta(content, delta.reasoning)

    def _rest_of(self, parts: c.AnswerParts) -> c.PartsDelta:
        calls = enumerate(parts.tool_calls)
        deltas = (c.ToolCallDelta(n, call.id, call.name, call.arguments) for n, call in calls)
        content = parts.content[len(self._content) :]
        return c.PartsDelta(content, parts.reasoning[len(self._reasoning) :], tuple(deltas))
