"""Checks whose work cannot be bounded beforehand, in a process with bounds of time and memory.

A short text can ask sympy, or a schema a validator, for work without end. The process receives one
check per line. One that exceeds the bounds ends the process, and the next check starts another.
Structured outputs are tried in such a process, too (`generator_service.engine.grammar`).
Only this file imports the libraries of `specrej-server[verify]`, which are not part of `specrej`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

CPU_S = 2.0  # of the processor's time per check
_MEMORY_BYTES = 1 << 31
_LIBRARIES = {"math": "math_verify", "schema": "jsonschema_rs"}
# Of a process: one that computes ends by itself, but one that waits for ever does not.
_PATIENCE_S = 120.0
_MOST_ENDED = 4  # checks of one request that may exceed the bounds

Check = Callable[..., bool]


def compile_pattern(pattern: str, max_mem: int = 8 << 20) -> Any:
    """RE2's form of a regular expression, which is searched in linear time.

    Raises ValueError: RE2 does not support it, or it takes more than `max_mem` bytes.
    """
    import re2

    options = re2.Options()
    options.max_mem, options.log_errors = max_mem, False  # errors quote the pattern
    try:
        return re2.compile(pattern, options)
    except re2.error:
        raise ValueError("must be a regular expression of RE2") from None


def escape_pattern(text: str) -> str:
    """A regular expression that matches this text only."""
    import re2

    return str(re2.escape(text))


class LineProcess:
    """A program of Python that answers each line with one; used by one thread at a time.

    It starts at the first line, and again at the first one after it has ended.
    """

    def __init__(self, *arguments: str, opening: str = "", **environment: str) -> None:
        """Of Python. `opening`: what it reads before the first line, without an answer."""
        self._command = [sys.executable, *arguments]
        self._opening = opening
        self._environment = environment
        self.process: subprocess.Popen[str] | None = None

    def ask(self, line: str) -> str:
        """The answer; empty if the process has ended by itself, or had to be."""
        if self.process and self.process.poll() is not None:  # killed between two lines
            self.end()
        text = f"{line}\n" if self.process else f"{self._opening}{line}\n"
        process = self.process = self.process or self._start()
        assert process.stdin and process.stdout
        hangs = threading.Timer(_PATIENCE_S, _kill, (process,))
        hangs.daemon = True
        hangs.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(text)
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            hangs.cancel()
        if not answer:
            self.end()
        return answer

    def end(self) -> None:
        """End the process, with what it has started."""
        self._end()
        self.process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), **self._environment}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the service, which ends it
            env=os.environ | environment,
        )
        self._end = weakref.finalize(self, _end, process)
        return process


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    _kill(process)
    process.communicate()


class Isolated:
    """A process for checks of one kind; used by one thread at a time.

    A check may take `cpu_s` seconds of the processor's time; None: `CPU_S`.

    Raises:
        ValueError: the library of the kind is missing.
        RuntimeError: `trial`, arguments of a check that must hold, does not.
    """

    def __init__(self, kind: str, *trial: str, cpu_s: float | None = None) -> None:
        if not find_spec(_LIBRARIES[kind]):
            text = f"requires {_LIBRARIES[kind]}: pip install 'specrej-server[verify]'"
            raise ValueError(f"a reward with checks of kind {kind} {text}")
        # The file alone: the package imports what a check does not need.
        self._lines = LineProcess("-P", __file__, kind, str(cpu_s or CPU_S))
        if not self._ask(*trial):
            raise RuntimeError(f"checks of kind {kind} do not work: see the log")

    def checker(self, *data: str, on_exceeded: Callable[[], None] = lambda: None) -> Check:
        """A check of texts with this data, for one request.

        A text that exceeds the bounds fails, and `on_exceeded` is called. After some of them the
        request's other texts fail.
        """
        num_ended = 0

        def check(*texts: str) -> bool:
            nonlocal num_ended
            holds = self._ask(*data, *texts) if num_ended < _MOST_ENDED else False
            if holds is None:
                num_ended += 1
                on_exceeded()
            return bool(holds)

        return check

    def _ask(self, *arguments: str) -> bool | None:
        """Whether the check holds; None if it exceeded the bounds."""
        answer = self._lines.ask(json.dumps(arguments))
        return bool(json.loads(answer)) if answer else None


# The process runs everything below.


def _mathematics() -> Check:
    import logging

    from math_verify import parse, verify

    logging.disable()  # the library's messages quote the texts
    gold = lru_cache(1)(parse)  # without its timeouts: the process has its own

    def equals(answer: str, text: str) -> bool:
        return bool(
            verify(
                gold(answer, parsing_timeout=None),
                parse(text, parsing_timeout=None),
                timeout_seconds=None,
            )
        )

    equals("$1/2$", "$0.5$")  # prepares its parser, before any bound counts
    return equals


def _schemas() -> Check:
    import jsonschema_rs

    @lru_cache(256)
    def load(schema: str) -> Any:
        linear = jsonschema_rs.RegexOptions()
        return jsonschema_rs.validator_for(json.loads(schema), offline=True, pattern_options=linear)

    def validates(schema: str, text: str) -> bool:
        """With an empty text: whether it is a schema."""
        return load(schema).is_valid(json.loads(text)) if text else bool(load(schema))

    return validates


def _main(kind: str, cpu_s: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    check = {"math": _mathematics, "schema": _schemas}[kind]()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing of a text may reach the log
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))  # the signal ends the process
        try:
            holds = check(*json.loads(line))
        except Exception:
            holds = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(holds), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
