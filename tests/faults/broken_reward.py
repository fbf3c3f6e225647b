"""The reward service, which hangs in the template of a prompt with the text `HANGS_IN_REWARD`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from reward_service.__main__ import main
from reward_service.conversation import Conversation
from specrej.contracts import Prompt
from tests.faults.breaks import HANGS_IN_REWARD


def _break_on_prompts() -> None:
    render = Conversation.render

    def hanging(conversation: Conversation, prompt: Prompt, texts: Sequence[str]) -> list[str]:
        if HANGS_IN_REWARD in prompt.turns[-1].content:
            threading.Event().wait()
        return render(conversation, prompt, texts)

    Conversation.render = hanging  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    _break_on_prompts()
    main()
