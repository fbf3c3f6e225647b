"""The generator service on a real engine that breaks.

SIGUSR1: the next forward pass ends the engine's thread, as only a bug could. SIGUSR2: it never
ends.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from generator_service.__main__ import main
from generator_service.engine.model import CausalLM
from tests.faults.engines import ENDS, HANGS


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


if __name__ == "__main__":
    _break_on_signals()
    main()
