"""The generator service on a real engine that breaks.

SIGUSR1: the next step ends the engine's thread, as only a bug could. SIGUSR2: it never ends. The
session of a prompt with a text of `FAILS` fails each step that it is in after a few tokens; a text
of `HANGS_IN` makes the service hang in that method.
"""

from __future__ import annotations

import pkgutil
import signal
import threading
from collections.abc import Sequence
from typing import Any

from generator_service.__main__ import main
from generator_service.engine import engine
from generator_service.engine.model import CausalLM
from generator_service.engine.session import Session
from generator_service.engine.text import Text
from specrej.contracts import Prompt
from tests.faults.breaks import ENDS, FAILS, HANGS, HANGS_IN

_FAILING_TOKENS = 5


def _break_on_signals() -> None:
    ends, hangs = threading.Event(), threading.Event()
    forward = CausalLM.forward

    def breaking(model: CausalLM, *arguments: Any) -> Any:
        if ends.is_set():
            raise SystemExit
        if hangs.is_set():
            threading.Event().wait()
        return forward(model, *arguments)

    CausalLM.forward = breaking  # type: ignore[method-assign,assignment]
    signal.signal(ENDS, lambda *_: ends.set())
    signal.signal(HANGS, lambda *_: hangs.set())


class _Prompts:
    """The texts of prompts by their tokens."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], str] = {}
        encode = Text.encode

        def recording(text: Text, prompt: Prompt) -> list[int]:
            ids = encode(text, prompt)
            self._texts[tuple(ids)] = prompt.turns[-1].content
            return ids

        Text.encode = recording  # type: ignore[method-assign,assignment]

    def of(self, subject: Any, arguments: Sequence[Any]) -> str:
        """The prompt that a method's call is about."""
        if isinstance(subject, Session):
            return self._texts.get(tuple(subject.command.prompt_ids), "")
        *_, prompt = arguments
        if isinstance(prompt, Prompt):
            return prompt.turns[-1].content
        return self._texts.get(tuple(prompt), "")

    def hang(self, owner: Any, name: str, text: str) -> None:
        """Make a method hang if the prompt contains the text."""
        method = getattr(owner, name)

        def hanging(subject: Any, *arguments: Any) -> Any:
            if text in self.of(subject, arguments):
                threading.Event().wait()
            return method(subject, *arguments)

        setattr(owner, name, hanging)

    def fail_steps(self) -> None:
        """Make the passes fail that have tokens of sessions with a text of `FAILS`."""
        run = engine._run

        def failing(model: Any, batch: engine.Batch) -> Any:
            for session, _ in batch:
                for text, error in FAILS.items():
                    if session.num_tokens >= _FAILING_TOKENS and text in self.of(session, ()):
                        raise error("secret: the device fails")
            return run(model, batch)

        engine._run = failing


if __name__ == "__main__":
    _break_on_signals()
    prompts = _Prompts()
    prompts.fail_steps()
    for text, path in HANGS_IN.items():
        owner, _, name = path.rpartition(".")
        prompts.hang(pkgutil.resolve_name(owner), name, text)
    main()
