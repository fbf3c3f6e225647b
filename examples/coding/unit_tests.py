"""The reward: the share of unit tests that a candidate's code passes.

The tests are the `assert` lines of the prompt. The code is the first complete code block of the
response. Text without one scores UNTESTED, above code that passes nothing: it may still pass.

Each code runs in a child process with limits of time, memory and files and, where the kernel
allows it, without network. That stops accidents, not attacks: see README.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

from specrej import Prompt

UNTESTED = 0.1
WALL_S = 10.0

# Runs in the child: a list of the code and the tests on stdin, a byte per passed test on stdout.
CHILD = """
import ctypes, json, os, resource, sys
code, *tests = json.load(sys.stdin)
ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # new user and network; the kernel may refuse
limits = {"CPU": 1, "AS": 512 << 20, "FSIZE": 1 << 20, "NOFILE": 32, "NPROC": 0, "CORE": 0}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
names = {"__name__": "candidate"}
exec(code, names)
for test in tests:
    try:
        exec(test, names)
        os.write(report, b".")
    except Exception:
        pass
"""


def share_passed(prompt: Prompt, responses: list[str]) -> list[float]:
    """The share of the prompt's unit tests that each response's code passes, 0 .. 1."""
    tests = asserts_of(prompt)

    def score(response: str) -> float:
        code = code_of(response)
        return UNTESTED if code is None else num_passed(code, tests) / max(1, len(tests))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(score, responses))


def code_of(response: str) -> str | None:
    """The first complete block of Python, or None."""
    blocks = re.findall(r"^```([^\n`]*)\n(.*?)^```", response, re.DOTALL | re.MULTILINE)
    names = ("", "py", "python", "python3")
    return next((code for name, code in blocks if name.strip().lower() in names), None)


def asserts_of(prompt: Prompt) -> tuple[str, ...]:
    """The `assert` lines of the last turn."""
    return tuple(re.findall(r"^assert .*$", prompt.turns[-1].content, re.MULTILINE))


# A candidate is scored at every decision token, and its code does not change after its block ends.
@lru_cache(maxsize=4096)
def num_passed(code: str, tests: tuple[str, ...]) -> int:
    """How many tests pass before the code ends, fails or reaches a limit."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            process_group=0,
        ) as child,
    ):
        try:
            passed, _ = child.communicate(json.dumps([code, *tests]).encode(), WALL_S)
        except subprocess.TimeoutExpired as late:
            passed = late.output or b""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and its own children
    return min(len(passed), len(tests))
