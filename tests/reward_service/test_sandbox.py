"""Programs that attack their sandbox: each ends within its bound and harms nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from reward_service import sandbox
from reward_service.sandbox import COMPILED, Sandbox, Way, find_sandbox
from reward_service.specs import UnitTestsSpec
from tests.serving import until

LIMITS = UnitTestsSpec(name="r", wall_s=20, cpu_s=1, memory_mb=256, workers=1)
MARKER = f"tests of {os.getpid()}"
WAYS: Sequence[Way] = ("namespaces",)


@cache
def problem(way: Way) -> str:
    return Sandbox(way, LIMITS).trial()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    if reason := problem(way):
        pytest.skip(f"{way} does not work here: {reason}")
    return way


async def num_passed(
    way: Way, program: str, *tests: str, limits: UnitTestsSpec = LIMITS, entry_point: str = ""
) -> int:
    """How many of the tests pass. The program is compiled."""
    running = marked(Sandbox(way, limits))
    try:
        steps = await running.run(program, tests or ["pass"], entry_point)
    finally:
        running.close()
    assert steps >= COMPILED
    return steps - COMPILED


# Each ends before its test is reached: by a limit, or by an error.
ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass",
    "memory": "kept = []\nwhile True: kept.append(bytearray(16 << 20))",
    "threads": "import threading, time\nfor _ in range(9):\n"
    "    threading.Thread(target=time.sleep, args=(60,)).start()",
    "ignored signals": "import signal\nfor number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "while True: pass",
    "detached": "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nlibc.prctl(1, 0)\nos.setsid()\n"
    "time.sleep(60)",
    "parents killed": "import os\nfor pid in (1, os.getppid(), -1):\n"
    "    try:\n        os.kill(pid, 9)\n    except OSError: pass\nos.kill(os.getpid(), 9)",
    "a gigabyte": "import os\nfor fd in range(32):\n    try:\n"
    "        for _ in range(1024): os.write(fd, bytes(1 << 20))\n    except OSError: pass",
}


# Bounds of time, processes and memory, and an escape from them; the others take as long.
_FAST = ("loop", "forks", "memory", "detached", "parents killed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in _FAST else pytest.mark.long) for n in ENDLESS]
)
async def test_a_program_without_an_end_ends(way: Way, name: str) -> None:
    """Guards the machine's time, memory and processes, and the answer to the request."""
    began = time.monotonic()
    wall_s = 2.0 if name in ("sleep", "detached") else 20.0
    limits = LIMITS.model_copy(update={"wall_s": wall_s})
    assert await num_passed(way, ENDLESS[name], limits=limits) == 0
    assert time.monotonic() - began < 18
    await until(lambda: not children(), bound_s=5)


# What each must not do: the assertions hold where it is impossible.
IMPOSSIBLE = {
    "files": "import os\nfor path in ('/etc/passwd', '/proc/self/status', '/dev/shm', {root!r}):\n"
    "    assert not os.path.exists(path)",
    "names": "import os, glob\nassert set(os.listdir('/')) <= "
    "{{'etc', 'lib', 'lib64', 'usr', 'tmp', 'dev', 'root', 'home', 'opt'}}\n"
    "assert os.environ.keys() <= {{'LC_CTYPE', 'PWD'}} and os.listdir('.') == []",
    "packages": "import os\npath = os.path.dirname(os.__file__) + '/site-packages'\n"
    "assert not os.path.isdir(path) or os.listdir(path) == []",
    "root": "import os\nassert os.getuid() == os.geteuid() == os.getgid() == 65534\n"
    "try:\n    os.setuid(0)\nexcept OSError: pass\nelse: assert False",
    "sockets": "import socket\nfor family in (socket.AF_INET, socket.AF_UNIX, 38, 40):\n    try:\n"
    "        socket.socket(family).connect(('127.0.0.1', {port}))\n    except OSError: pass\n"
    "    else: assert False",
    "descriptors": "import os\nopen_ones = []\nfor fd in range(32):\n    try:\n"
    "        os.fstat(fd); open_ones.append(fd)\n    except OSError: pass\n"
    "assert len(open_ones) <= 4, open_ones",
    "writes": "import os, sys\nfor path in ('/new', os.__file__, '/usr/lib/new'):\n    try:\n"
    "        open(path, 'a')\n    except OSError: pass\n    else: assert False",
    "large files": "written = 0\nimport signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "for name in range(64):\n    try:\n        with open(f'/tmp/{{name}}', 'wb', 0) as file:\n"
    "            for _ in range(64): written += file.write(bytes(1 << 16))\n"
    "    except OSError: pass\nassert 1 << 20 <= written <= 8 << 20",
    "calls": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "for call in (lambda: libc.ptrace(0, 0, 0, 0), lambda: libc.shmget(0, 1 << 20, 0o1600),\n"
    "    lambda: libc.unshare(0x10000000), lambda: libc.socket(16, 3, 0),\n"
    "    lambda: libc.mount(b'n', b'/tmp', b'tmpfs', 0, None)):\n"
    "    assert call() == -1 and ctypes.get_errno() == 1",
    "others": "import os, signal\nfor pid in ({pid}, {pid} + 1):\n    try:\n"
    "        os.kill(pid, 0)\n    except ProcessLookupError: pass\n    else: assert False",
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_a_program_reaches_nothing(way: Way, name: str) -> None:
    """Guards files, network, processes and other users of the machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"port": server.getsockname()[1], "pid": os.getpid(), "root": str(Path.cwd())}
        attack = IMPOSSIBLE[name].format(**names)
        assert await num_passed(way, "", attack) == 1


FORGERIES = {
    "prints": "print('passed'); import sys; sys.stdout.write('.' * 64); sys.stdout.flush()",
    "writes": "import os\nfor fd in range(16):\n    try:\n        os.write(fd, bytes(64))\n"
    "    except OSError: pass",
    "exits": "import os; os._exit(0)",
    "system exit": "raise SystemExit(0)",
    "exit in the function": "def f():\n    raise SystemExit(0)",
    "own check": "def check(candidate): pass",
    "builtins": "import builtins\nbuiltins.exec = builtins.compile = lambda *_: None\n"
    "builtins.AssertionError = builtins.BaseException = type('E', (Exception,), {})",
    "own write": "import os\ndef write(fd, data):\n    real(fd, data * 2)\n"
    "real, os.write = os.write, write",
    "descriptors": "import os\nfor fd in range(16):\n    try:\n        os.read(fd, 99)\n"
    "    except OSError: pass\n    open(f'/proc/self/fd/{fd}', 'wb')",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, bytes(64)))",
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_simple_forgeries_pass_no_test(way: Way, name: str) -> None:
    wrong = ("def check(candidate): assert candidate() == 1", "assert f() == 1")
    tests = (*wrong, "def check(candidate): pass")  # which passes, and shows a token that is copied
    program = f"def f(): return 0\n{FORGERIES[name]}"
    assert await num_passed(way, program, *tests, entry_point="f") <= 1


async def test_a_cancelled_run_ends_its_processes(way: Way) -> None:
    """Guards against programs that run on for a caller that is gone."""
    run = asyncio.create_task(num_passed(way, "import time; time.sleep(60)"))
    await until(lambda: bool(children()))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: not children())


def test_a_start_that_is_killed_leaves_no_process() -> None:
    """Guards the thread that reads the report, which ends with the last process that has it."""
    killed = "call = lambda *_: os.kill(os.getpid(), 9)"
    code = f"import os\nfrom reward_service import sandboxed\nsandboxed.{killed}\n"
    command = [sys.executable, "-c", f"{code}sandboxed.unshare_users(0)"]
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=60).returncode == -9


def test_a_child_whose_parent_has_ended_ends() -> None:
    """Guards against a program without bounds: a signal for the parent's end comes only to a child
    that has asked for it before."""
    code = """
import os, time
from reward_service import sandboxed
def late(ask=sandboxed.die_with_parent):
    parent = os.getppid()
    os.kill(parent, 9)
    while os.getppid() == parent:
        time.sleep(0.001)
    ask()
sandboxed.die_with_parent = late
sandboxed.become_child()
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=60).returncode == -9


def test_without_a_sandbox_a_reward_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Sandbox.trial
    monkeypatch.setattr(Sandbox, "trial", lambda s: trial(s) if s.way == "none" else "refused")
    with pytest.raises(ValueError, match=r"namespaces: refused.*allow_unsandboxed"):
        find_sandbox(LIMITS)
    assert find_sandbox(LIMITS.model_copy(update={"allow_unsandboxed": True})).way == "none"


@pytest.mark.long
async def test_limits_hold_without_a_sandbox() -> None:
    """Guards a service that allows it against accidents."""
    for name in ("loop", "forks"):
        assert await num_passed("none", ENDLESS[name]) == 0


def test_a_trial_sees_files_that_must_not_be_there(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a sandbox that starts and isolates nothing."""
    broken = Sandbox(way, LIMITS)
    assert not broken.trial()
    monkeypatch.setattr(sandbox, "_TRIAL", "import os; assert not os.path.exists('/usr')")
    assert broken.trial() == "programs are not isolated"


def children() -> list[str]:
    """Processes of the sandboxes of this process's tests, also those that another has adopted."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if is_marked(path)]


def is_marked(path: Path) -> bool:
    try:
        return MARKER in path.read_text("utf-8", "replace")
    except OSError:  # it has ended
        return False


def marked(sandbox: Sandbox) -> Sandbox:
    sandbox._command.append(MARKER)  # an argument that nothing reads
    return sandbox
