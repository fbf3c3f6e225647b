"""Run a program that is killed when its parent ends.

    python -I die_with_parent.py PARENT_PID PROGRAM ARGUMENT...

The interpreter requests SIGKILL on its parent's death (prctl PR_SET_PDEATHSIG) and then executes
the program, which keeps the process id and the request. A function between fork and exec in the
parent could deadlock on locks of its other threads. Linux only; standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, arguments: list[str]) -> None:
    """Execute the program, unless the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == parent_pid:
        os.execv(arguments[0], arguments)
    sys.exit("the parent has ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
