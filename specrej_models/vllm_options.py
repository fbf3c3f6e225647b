"""What both model services set for vLLM and its processes.

As a program, the file ends processes of a service that has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# Tokens of vLLM's blocks: its default, on CPUs the fewest with which its kernels are fast.
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}

_MARK = "SPECREJ_FAMILY"


def prepare_environment(threads: int) -> None:
    """Set what vLLM reads from variables only; variables that are set already win."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the service configures logging
        # On a CPU, one worker lives in the scheduler's process, which would spin on a core of its
        # own while it waits for another process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # This version cannot load the compiled code that it stores.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
    }
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def end_children_with_us() -> None:
    """Let all processes that this one starts after the first call be killed once it has ended.

    vLLM's engine process outlives a service that is killed, and would keep its share of a GPU. A
    process of this file waits for the end. It finds the others by a variable that they inherit, as
    their parent is lost by then. Linux only; on other systems nothing is killed.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    if os.environ.get(_MARK, "").startswith(f"{os.getpid()}-"):
        return
    reader, _ = os.pipe()  # this process never closes the other end, and no child inherits it
    command = [sys.executable, "-IS", __file__, f"{_MARK}={mark}"]
    to_stdin = (os.POSIX_SPAWN_DUP2, reader, 0)
    # In a session of its own: Ctrl-C is not for it.
    os.posix_spawn(command[0], command, os.environ, file_actions=[to_stdin], setsid=True)
    os.close(reader)
    # Else the titles that vLLM gives its processes overwrite their environment in /proc.
    os.environ["SPT_NOENV"] = "1"
    os.environ[_MARK] = mark


def _kill(mark: bytes) -> bool:
    """Kill the processes that inherited the mark; False if there were none."""
    killed = False
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark not in (process / "environ").read_bytes():
                continue
            # Python's own, which frees shared memory once the others have ended.
            if b"resource_tracker" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
                killed = True
    return killed


if __name__ == "__main__":
    sys.stdin.buffer.read()
    # Again for a while: a process that was just started shows no environment yet.
    end_s = time.monotonic() + 5
    while _kill(os.fsencode(sys.argv[1])) or time.monotonic() < end_s:
        time.sleep(0.1)
