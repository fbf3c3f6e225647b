"""The signals and texts that break the programs `broken_engine` and `broken_reward`.

Apart from them, so that the checklist imports no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

# Signals to a generator: its engine's thread ends silently, or its next step never ends.
ENDS, HANGS = signal.SIGUSR1, signal.SIGUSR2
# Texts of prompts: each step with tokens of such a session raises the error.
FAILS: Mapping[str, type[Exception]] = {
    "fails in a step": RuntimeError,
    "exhausts the memory in a step": MemoryError,
}
# Texts of prompts, and the method of the generator that hangs.
HANGS_IN: Mapping[str, str] = {
    "hangs in its template": "generator_service.engine.text:Text.encode",
    "hangs in opening": "generator_service.engine.prompt_tree:PromptTree.acquire",
    "hangs in picking": "generator_service.engine.session:Session.decode_rows",
    "hangs in reserving": "generator_service.engine.session:Session.reserve",
    "hangs in pruning": "generator_service.engine.session:Session.keep",
}
# The text of a prompt with which the template of a reward hangs.
HANGS_IN_REWARD = "hangs in the template of a reward"
