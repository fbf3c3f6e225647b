"""What is reported to Locust, as the types of its rows."""

from __future__ import annotations

ANSWER = "answer"
CACHED = "cached answer"  # took no tokens
FAILED = "failed"  # apart from answers, so that quick refusals make no answer look quick
FIRST_ROUND = "first round"
BETWEEN_ROUNDS = "between rounds"
LATE = "late start"  # open loop: by how much
MISSED = "missed"  # open loop: never sent, as too much was in flight
