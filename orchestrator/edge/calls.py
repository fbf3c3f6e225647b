"""Whether the calls of an answer are what its prompt allows.

A schema that a caller sends can ask a validator for work without end: arguments are validated in a
process with bounds, for one request after the other. Tenants whose checks exceeded the bounds share
a second process, so that they delay each other only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from orchestrator.loop.run import AreValid, any_calls
from specrej.contracts import AnswerParts, Prompt, Tool
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.isolated import Check, Isolated

_CPU_S = 0.1  # of one check: usual ones take microseconds
_NO_ARGUMENTS = '{"maxProperties": 0}'
_MOST_SLOW = 1024  # tenants that are remembered
_MOVED = -1


class CallChecks:
    """Makes the checks of requests."""

    def __init__(self) -> None:
        self._usual, self._slow = _Lane("calls"), _Lane("slow-calls")
        self._slow_tenants: set[str] = set()

    async def of(self, prompt: Prompt, tenant: str) -> AreValid:
        """The check of a prompt's answers.

        Raises:
            InvalidRequest: the parameters of a tool are not a schema that can be used.
        """
        if not prompt.tools:
            return any_calls
        loop, schemas = asyncio.get_running_loop(), {t.name: _schema_of(t) for t in prompt.tools}
        checks: dict[_Lane, Check] = {}

        def wrong_in(lane: _Lane, texts: Sequence[tuple[str, str]]) -> int | None:
            if lane is self._usual and tenant in self._slow_tenants:
                return _MOVED
            if lane not in checks:
                checks[lane] = lane.checker(partial(self._note, tenant))
            return next((n for n, pair in enumerate(texts) if not checks[lane](*pair)), None)

        async def wrong(texts: Sequence[tuple[str, str]]) -> int | None:
            """The first schema, with an empty text, or text of a schema that is not valid."""
            found = await loop.run_in_executor(self._usual.thread, wrong_in, self._usual, texts)
            if found != _MOVED:
                return found
            return await loop.run_in_executor(self._slow.thread, wrong_in, self._slow, texts)

        refused = await wrong([(_schema_of(tool), "") for tool in prompt.tools])
        if refused is not None:
            text = "must be a JSON Schema without outer references, look-around, back references"
            raise InvalidRequest([Violation(f"prompt.tools[{refused}].parameters", text)])

        async def are_valid(parts: AnswerParts) -> bool:
            calls = parts.tool_calls
            if not _fits(prompt, [call.name for call in calls]):
                return False
            texts = [(schemas[call.name], call.arguments) for call in calls]
            return not texts or await wrong(texts) is None

        return are_valid

    def _note(self, tenant: str) -> None:
        """A check of this tenant exceeded the bounds."""
        if len(self._slow_tenants) >= _MOST_SLOW:
            self._slow_tenants.clear()
        self._slow_tenants.add(tenant)


class _Lane:
    """A process of checks, and the thread that uses it."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, name)
        self._schemas: Isolated | None = None

    def checker(self, on_exceeded: Callable[[], None]) -> Check:
        """The check of one request; in the thread."""
        self._schemas = self._schemas or Isolated("schema", "true", "1", cpu_s=_CPU_S)
        return self._schemas.checker(on_exceeded=on_exceeded)


def _schema_of(tool: Tool) -> str:
    return tool.parameters or _NO_ARGUMENTS


def _fits(prompt: Prompt, names: Sequence[str]) -> bool:
    """Whether the prompt allows calls of these tools, in this number."""
    allowed = {tool.name for tool in prompt.tools if prompt.tool_name in ("", tool.name)}
    if prompt.tool_choice == "none" or not names:
        return not names and prompt.tool_choice != "required"
    return {*names} <= allowed and (prompt.parallel_tool_calls or len(names) == 1)
