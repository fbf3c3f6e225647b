"""Events within a round, for callers that want them: how far candidates are, and certain text.

The winner is certain while one candidate is live and none has ended: its text can be sent as it
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrej.contracts import Progress, Round, TextDelta

OnProgress = Callable[[Progress | TextDelta], None]

# Tokens of a stride: what a caller sees at once.
_STRIDE_TOKENS = 4


class ProgressReporter:
    """Reports one request's strides."""

    def __init__(self, on_progress: OnProgress, stop: Sequence[str]) -> None:
        """`stop` texts are not part of an answer: what may be the beginning of one is held back."""
        self._on_progress = on_progress
        self._num_held = max(map(len, stop), default=1) - 1
        self._sent = ""

    def stride_tokens(self, *, is_certain: bool) -> int:
        """The most tokens of the next stride."""
        return 1 if is_certain else _STRIDE_TOKENS

    def report(self, grown: Round, *, is_certain: bool) -> None:
        """Report what has grown in a round so far."""
        live = [candidate for candidate in grown.candidates if candidate.finish is None]
        slots = grown.slots
        self._on_progress(Progress(grown.num_tokens, len(live), slots.session, slots.capacity))
        if is_certain and len(grown.candidates) == 1:
            (winner,) = grown.candidates
            end = len(winner.text) - (0 if winner.finish else self._num_held)
            text = winner.text[: max(0, end)]
            # The end of a text may change while a character is incomplete.
            if text.startswith(self._sent) and text != self._sent:
                self._on_progress(TextDelta(winner.id, text[len(self._sent) :]))
                self._sent = text
