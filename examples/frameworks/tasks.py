"""Twenty tasks for agents: a question, the right calls in their order, their results, the answer.

The toy generator, a test double, makes the calls that a question names, one per turn, and answers
with their results. A task is right if the framework ran these functions with these arguments, and
returned this answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

URL = os.environ.get("SPECREJ_URL", "http://127.0.0.1:8000/v1")
MODEL = "toy:sr-32"
Task = dict[str, Any]
TASKS: list[Task] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_made: list[dict[str, Any]] = []
_results: list[str] = []  # of the task's next calls


def call(name: str, **arguments: object) -> str:
    """The result of the task's next call."""
    _made.append({"name": name, "arguments": arguments})
    return _results.pop(0) if _results else "no such call"


def weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city."""
    return call("weather", city=city, unit=unit)


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return call("add", a=a, b=b)


def find(words: list[str], limit: int) -> str:
    """Documents with these words."""
    return call("find", words=words, limit=limit)


def mail(to: str, urgent: bool) -> str:
    """Sends a mail."""
    return call("mail", to=to, urgent=urgent)


def check(answer_of: Callable[[Task], str]) -> None:
    """Do every task; exit with 1 unless all are right."""
    num_right = 0
    for task in TASKS:
        _made.clear()
        _results[:] = task["results"]
        answer = answer_of(task)
        if (answer, _made) == (task["answer"], task["calls"]):
            num_right += 1
        else:
            print(f"{task}\n  answer: {answer!r}\n  calls: {_made}")
    print(f"{num_right} of {len(TASKS)} tasks")
    sys.exit(num_right < len(TASKS))
