"""Whether the calls of an answer are what its prompt allows.

A schema that a caller sends can ask a validator for work without end: arguments are validated in a
process with bounds, for one request after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.loop.run import AreValid, any_calls
from specrej.contracts import AnswerParts, Prompt, Tool
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.isolated import Check, Isolated

_CPU_S = 0.1  # of one check: usual ones take microseconds
_NO_ARGUMENTS = '{"maxProperties": 0}'


class CallChecks:
    """Makes the checks of requests."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "calls")  # of the process
        self._schemas: Isolated | None = None

    async def of(self, prompt: Prompt) -> AreValid:
        """The check of a prompt's answers.

        Raises:
            InvalidRequest: the parameters of a tool are not a schema that can be used.
        """
        if not prompt.tools:
            return any_calls
        loop, schemas = asyncio.get_running_loop(), {t.name: _schema_of(t) for t in prompt.tools}
        validates, refused = await loop.run_in_executor(self._thread, self._prepare, prompt.tools)
        if refused is not None:
            text = "must be a JSON Schema without outer references, look-around, back references"
            raise InvalidRequest([Violation(f"prompt.tools[{refused}].parameters", text)])

        async def are_valid(parts: AnswerParts) -> bool:
            calls = parts.tool_calls
            if not _fits(prompt, [call.name for call in calls]):
                return False
            for call in calls:
                texts = schemas[call.name], call.arguments
                if not await loop.run_in_executor(self._thread, validates, *texts):
                    return False
            return True

        return are_valid

    def _prepare(self, tools: Sequence[Tool]) -> tuple[Check, int | None]:
        """The check of arguments, and the index of the first tool with a wrong schema."""
        self._schemas = self._schemas or Isolated("schema", "true", "1", cpu_s=_CPU_S)
        validates = self._schemas.checker()
        wrong = (n for n, tool in enumerate(tools) if not validates(_schema_of(tool), ""))
        return validates, next(wrong, None)


def _schema_of(tool: Tool) -> str:
    return tool.parameters or _NO_ARGUMENTS


def _fits(prompt: Prompt, names: Sequence[str]) -> bool:
    """Whether the prompt allows calls of these tools, in this number."""
    allowed = {tool.name for tool in prompt.tools if prompt.tool_name in ("", tool.name)}
    if prompt.tool_choice == "none" or not names:
        return not names and prompt.tool_choice != "required"
    return {*names} <= allowed and (prompt.parallel_tool_calls or len(names) == 1)
