"""Beyond rounds, on request: how far candidates have grown, their texts, and text that is certain.

The winner is certain while one candidate is live and none has ended: its text can be sent as it
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrej.contracts import (
    Candidate,
    CandidateText,
    Progress,
    RankedCandidate,
    Round,
    RoundTrace,
    TextDelta,
)

# Characters of the texts of one round.
_MAX_CHARACTERS = 262_144


@dataclass(frozen=True, slots=True)
class WithinRounds:
    """Which events within rounds are requested, and their receiver: `emit` returns at once.

    `texts`: whether events of rounds have the texts of candidates.
    """

    emit: Callable[[Progress | TextDelta], None]
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
        self._most_tokens = 0

    def report(self, grown: Round, *, is_certain: bool) -> None:
        """Report what has grown in a round so far."""
        slots = grown.slots
        if self._within.progress:
            # A request that starts again at another generator does not fall back.
            self._most_tokens = max(self._most_tokens, grown.num_tokens)
            progress = Progress(self._most_tokens, grown.num_live, slots.session, slots.capacity)
            self._within.emit(progress)
        if is_certain and self._within.text_deltas:
            for candidate in grown.candidates:
                self._send(candidate)

    def texts(self, ended: Round, trace: RoundTrace) -> tuple[CandidateText, ...]:
        """Texts of a round's candidates, best first; none unless they are requested."""
        texts = {candidate.id: candidate.text for candidate in ended.candidates}
        chosen: list[CandidateText] = []
        num_left = _MAX_CHARACTERS if self._within.texts else 0
        for candidate in trace.candidates:
            num_left -= len(texts[candidate.id])
            if num_left < 0:
                break
            chosen.append(CandidateText(candidate.id, texts[candidate.id]))
        return tuple(chosen)

    def end(self, answer: RankedCandidate) -> None:
        """Send what is held back of an answer that the deadline cut short."""
        if self.sent:
            self._send(answer)

    def _send(self, winner: Candidate | RankedCandidate) -> None:
        end = len(winner.text) - (0 if winner.finish else self._num_held)
        text = winner.text[: max(0, end)]
        # The end of a text may change while a character is incomplete.
        if text.startswith(self.sent) and text != self.sent:
            self._within.emit(TextDelta(winner.id, text[len(self.sent) :]))
            self.sent = text
