"""The local stack's own part: ports, programs, the embedded server. Real services are for e2e."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

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


async def test_a_service_that_cannot_start_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hanging start where the model is missing, and the advice to make embedded
    models where an own one is missing; nothing is left running."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", str(tmp_path / "missing"))
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", '[{"name": "toy", "kind": "toy"}]')
    stack = Stack(log_dir=tmp_path / "logs", start_timeout_s=60, grace_s=5)
    with pytest.raises(ProcessError, match="the end of its log") as failed:
        async with stack:
            pytest.fail("entered")
    assert "make models" not in str(failed.value)
    assert (tmp_path / "logs" / "generator.log").exists()
    stack.ports.check_free()


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
