"""Runs in a process of its own: enters a sandbox, and runs a program and its tests in it.

`reward_service.sandbox` starts it as text, with `python -I -S -c`, and writes one job to its
standard input; it answers on its standard output: the job's token, once per step that succeeded.
Standard library only.
"""

# Most of the time to start is that of imports: pathlib, signal and typing would double it.
# ruff: noqa: PTH102, PTH103, PTH106, PTH112

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import sys

TYPE_CHECKING = False  # as typing's
if TYPE_CHECKING:
    from typing import Any

NOBODY = 65534

# Numbers of calls on x86-64 and ARM64 (-1: none) that get EPERM: for processes and threads;
# sockets, of which some families know no namespaces; memory that no limit counts; namespaces, in
# which one has privileges; and what has had flaws.
DENIED_CALLS = {
    "fork": (57, -1),
    "vfork": (58, -1),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of the C library. Raises OSError if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_namespaces(visible: list[str], hidden: str, tmp_bytes: int) -> None:
    """Become a process without privileges over anything outside, in a file system of `visible`.

    The process that calls this and a new first process of the namespace wait for the one that
    returns; when they are killed, so is that.
    """
    is_root = os.geteuid() == 0
    # New user, mount, pid, network, IPC and UTS namespaces.
    unshare_users(0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000)
    mount_files(visible, hidden, tmp_bytes)
    become_child()
    become_child()  # the first process of a namespace takes all others with it
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def unshare_users(flags: int) -> None:
    """Enter new namespaces, in which there is nobody and, if this is root, root for the files."""
    user, group, pid = os.geteuid(), os.getegid(), os.getpid()
    reading, writing = os.pipe()
    if not (helper := os.fork()):
        os.close(writing)  # or it would wait for ever for a parent that is killed
        if not os.read(reading, 1):
            os._exit(1)
        if user:
            write_file(f"/proc/{pid}/setgroups", "deny")
        for name, own in ("uid", user), ("gid", group):
            # Two are mapped from outside only.
            text = f"{NOBODY} {own} 1" if user else f"0 0 1\n{NOBODY} {NOBODY} 1"
            write_file(f"/proc/{pid}/{name}_map", text)
        os._exit(0)
    call("unshare", flags)
    os.write(writing, b".")
    if os.waitpid(helper, 0)[1]:
        raise OSError("users cannot be mapped")
    os.closerange(reading, writing + 1)


def mount_files(visible: list[str], hidden: str, tmp_bytes: int) -> None:
    """Replace the file system by these directories, without `hidden`, and an empty /tmp."""
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # recursively private
    call("mount", b"none", b"/tmp", b"tmpfs", 0, b"size=1m,mode=755")
    os.mkdir("/tmp/old")
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in visible:
        if os.path.isdir(f"/old{path}"):
            os.makedirs(path, exist_ok=True)
            call("mount", f"/old{path}".encode(), path.encode(), None, 0x1000 | 0x4000, None)
    call("umount2", b"/old", 2)  # it ends with its last use
    os.rmdir("/old")
    os.makedirs("/tmp", exist_ok=True)
    if os.path.isdir(hidden):
        call("mount", b"none", hidden.encode(), b"tmpfs", 0, b"size=4k")
    # mount_setattr, for all mounts: read-only, no set-user-ID programs, no devices.
    attributes = (ctypes.c_uint64 * 4)(1 | 2 | 4)
    call("syscall", 442, -100, b"/", 0x8000, attributes, 32)
    call("mount", b"none", b"/tmp", b"tmpfs", 2 | 4, b"size=%d,nr_inodes=256,mode=1777" % tmp_bytes)
    os.chdir("/tmp")


def write_file(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    os.write(file, text.encode())
    os.close(file)


def become_child() -> None:
    """Go on in a child, which ends with this process; this one waits for it."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    os.close(writing)
    die_with_parent()
    if select.select([reading], [], [], 0)[0]:
        os._exit(1)  # the parent had ended already
    os.close(reading)


def die_with_parent() -> None:
    call("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL


def restrict(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Give up all privileges, and take limits, for good."""
    die_with_parent()  # a change of users ends that
    call("capset", (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())
    limits = {
        "CPU": cpu_s,
        "AS": memory_bytes,
        "FSIZE": file_bytes,
        "NOFILE": 32,
        "NPROC": 0,
        "CORE": 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which there is no filter
    call("prctl", 22, 2, seccomp_filter(), 0, 0)


def seccomp_filter() -> Any:
    """A filter of system calls for this machine. Raises OSError: it is of another kind."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no filter of system calls for {machine}")
    column, architecture = MACHINES[machine]
    denied, eperm = [numbers[column] for numbers in DENIED_CALLS.values()], 0x50001
    # (code, jump if true, jump if false, value): load the architecture, kill the process if it is
    # another one; load the number, refuse those of x32 and the denied ones, allow the rest.
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (6, 0, 0, 0x80000000)]
    steps += [(0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (6, 0, 0, eperm)]
    for number in denied:
        steps += [(0x15, 0, 1, number), (6, 0, 0, eperm)] if number >= 0 else []
    steps.append((6, 0, 0, 0x7FFF0000))
    instructions = b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for code, yes, no, value in steps
    )

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    return ctypes.byref(Program(len(steps), instructions))


def run(job: dict[str, Any], report: int) -> None:
    """Write the token once the tests are compiled, once the program is, and for each passed test.

    What the program can replace, such as builtins and functions of `os`, is looked up before.
    """
    token, names, write, execute = job.pop("token"), {"__name__": "candidate"}, os.write, exec
    program, entry_point = job["program"], job["entry_point"]
    failures = BaseException
    tests = [compile(test, "tests", "exec") for test in job["tests"]]
    write(report, token)
    code = compile(program, "candidate", "exec")
    write(report, token)
    if tests:
        execute(code, names)
    for test in tests:
        try:
            execute(test, names)
            if entry_point:
                names["check"](names[entry_point])  # type: ignore[operator]
        except failures:
            continue
        write(report, token)


def main() -> None:
    job = marshal.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    if job["namespaces"]:
        enter_namespaces(*job["namespaces"])
    os.dup2(2, 0)
    os.dup2(2, 1)  # standard error is /dev/null
    restrict(*job["limits"])
    os.write(report, job["token"])
    try:
        run(job, report)
    finally:
        os._exit(0)  # not what the program has registered for the end


if __name__ == "__main__":
    main()
