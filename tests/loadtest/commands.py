"""Locust as a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.programs import Outcome, outcome_of


async def locust(*arguments: str) -> Outcome:
    """Run Locust without its browser page, to its end."""
    shared = ("-f", "loadtest/locustfile.py", "--headless", "--json", "--stop-timeout", "30")
    return await outcome_of(sys.executable, "-m", "locust", *shared, *arguments)


def rows(run: Outcome, kind: str) -> dict[str, Any]:
    """Locust's rows of that type, by name. Worker processes print an empty list."""
    printed = json.loads(run.stdout.replace("[]", "").strip() or "[]")
    return {row["name"]: row for row in printed if row["method"] == kind}
