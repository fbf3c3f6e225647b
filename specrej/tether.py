"""Runs a program that dies with its parent: `python -I tether.py PARENT_PID PROGRAM ARGUMENT...`.

A fresh interpreter asks the kernel for a SIGKILL on its parent's death and then becomes the
program, which keeps process id and request. The parent could ask between its own fork and exec, but
there other threads' locks are held for ever. Linux only; standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, arguments: list[str]) -> None:
    """Become the program, unless the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == parent_pid:
        os.execv(arguments[0], arguments)
    sys.exit("the parent is gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
