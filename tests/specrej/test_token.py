"""`specrej token`: new tokens, and the file of their digests."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specrej.security import Access, append_line, new_token, read_tokens, revoke
from tests.specrej.conftest import Command


async def test_a_new_token_goes_to_stdout_and_its_line_elsewhere(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards scripts: stdout is the token alone, the file never holds it, and services accept it
    after a last line without an end."""
    token, line = await command("token", "acme")
    digest = hashlib.sha256(token.strip().encode()).hexdigest()
    assert json.loads(line) == {"tenant": "acme", "sha256": digest}
    path, tokens = tmp_path / "tokens", {token.strip()}
    for tenant, roles in (("edge", ["gateway", "generate"]), ("ops", ["admin"])):
        flags = [flag for role in roles for flag in ("--role", role)]
        token, err = await command("token", tenant, *flags, "--append", str(path))
        assert err == ""
        assert token.strip() not in path.read_text()
        metadata = [("authorization", f"Bearer {token.strip()}")]
        method = "/specrej.v1.OrchestratorService/Describe"
        assert Access(path).admit(method, metadata).tenant == tenant
        path.write_text(path.read_text() + "# no newline at the end")
        tokens.add(token.strip())
    assert len(tokens) == 3 and all(len(token) >= 43 for token in tokens)
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(SystemExit, match="1"):
        await command("token", "acme", "--append", str(tmp_path))
    assert capsys.readouterr().err.startswith("specrej: ")
    _, line = await command("token", "acme", "--expires", "2030-12-31T23:59:59Z")
    assert json.loads(line)["expires"] == "2030-12-31T23:59:59Z"


async def test_revoke_removes_the_tokens_of_one_tenant(command: Command, tmp_path: Path) -> None:
    """Guards against names that are taken as patterns, or written in another way, and a file that
    its services can no longer read."""
    path, file = tmp_path / "tokens", tmp_path / "file"
    path.symlink_to(file)
    for tenant in ("m\u00fcller", "acme.eu", "acme-eu", "acme.eu"):
        await command("token", tenant, "--append", str(path))
    ours = "# M\xfcller\n".encode("latin-1")  # no UTF-8: it stays as it is
    path.write_bytes(ours + path.read_bytes().replace(b": ", b":"))
    file.chmod(0o640)  # of a group that the services are in
    for tenant, left in (("acme.eu", 2), ("m\u00fcller", 1)):
        await command("token", tenant, "--revoke", str(path))
        assert len(read_tokens(path).entries) == left
    assert path.read_bytes().startswith(ours) and b"acme-eu" in path.read_bytes()
    assert path.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(SystemExit, match="1"):
        await command("token", "acme.eu", "--revoke", str(path))


async def test_writers_of_a_tokens_file_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a revoked token that comes back, and a new one that is lost, where two
    commands run at the same time."""
    path = tmp_path / "tokens"
    for tenant in ("acme", "evil"):
        append_line(path, new_token(tenant)[1])
    others: list[Callable[[], object]] = [
        partial(revoke, path, "evil"),
        partial(append_line, path, new_token("newcomer")[1]),
    ]
    threads = [threading.Thread(target=other) for other in others]
    chown = os.chown

    def started(*arguments: Any) -> None:
        while threads and threading.current_thread() is threading.main_thread():
            running.append(threads.pop())
            running[-1].start()
        chown(*arguments)

    running: list[threading.Thread] = []
    monkeypatch.setattr("specrej.security.os.chown", started)
    revoke(path, "acme")
    for thread in running:
        thread.join(30)
    tenants = {entry.tenant for entry in read_tokens(path).entries.values()}
    assert len(running) == 2 and tenants == {"newcomer"}
    lock = path.with_name(".tokens.lock")
    assert lock.stat().st_mode & 0o777 == 0o600  # a reader could hold it for ever
