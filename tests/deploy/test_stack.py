"""The local stack's own part: ports, programs, the embedded server. Real services are for e2e."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from subprocess import PIPE

import pytest

from deploy.local.__main__ import main
from deploy.local.processes import ProcessError
from deploy.local.stack import Ports, Stack


async def test_a_taken_port_raises_before_anything_starts() -> None:
    """Guards against a stack connected to another program's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProcessError, match=rf"port {port} \(reward\)"):
            async with Stack(replace(Ports.free(), reward=port)):
                pytest.fail("entered")


def test_no_two_processes_are_given_a_port() -> None:
    """Guards against a service whose port another stack has bound before it listens."""
    code = "from deploy.local import stack; stack._BLOCKS = range(16_000, 16_384, 64); "
    code += "print(*stack.free_ports({}), flush=True); input()"
    child, given = partial(subprocess.Popen, stdin=PIPE, stdout=PIPE, text=True), list[str]()
    with ExitStack() as running:
        for count in (120, 250):
            process = running.enter_context(child((sys.executable, "-c", code.format(count))))
            running.callback(process.kill)
            assert process.stdout
            given += process.stdout.readline().split()
    assert len({*given}) == 370


@pytest.mark.parametrize("flag", ["--port", "--redis-port", "--metrics-port"])
@pytest.mark.parametrize("port", ["0", "65533", "x"])
def test_ports_are_checked(
    flag: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against half an hour of waiting for a service on another port."""
    monkeypatch.setattr("sys.argv", ["specrej", "up", flag, port])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{flag}: must be 1 .. 65532" in capsys.readouterr().err
