"""A model hub on loopback, as the real client library reads it: lists, revisions, files.

`HF_ENDPOINT` names it. Only what downloads need; see huggingface_hub for the protocol.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

_API = re.compile(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """Repositories by name: files by revision. All revisions that a hub has are commits, too."""

    endpoint: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    token: str = ""  # required if set
    gated: bool = False
    gone: set[str] = field(default_factory=set)  # files that it lists and does not have
    downloads: list[str] = field(default_factory=list)  # files of which content was requested

    def add(self, name: str, files: Mapping[str, bytes] | Path, *revisions: str) -> str:
        """Add a commit under these names; returns its hash."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in sorted(files.iterdir())}
        content = dict(files)
        digest = hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()
        known = self.repositories.setdefault(name, {})
        for revision in (digest, *(revisions or ("main",))):
            known[revision] = content
        return digest


def use(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, home: Path, *, is_offline: bool = False
) -> None:
    """Let the client library in this process use a hub, and a cache in `home`, without a token.

    It read the variables of the environment, other than HF_TOKEN, when it was imported.
    """
    monkeypatch.delenv("HF_TOKEN", raising=False)
    url = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub on a free port of loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        close_session()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        hub = self.hub
        match = _API.match(self.path) or _FILE.fullmatch(self.path)
        if not match:
            return self._refuse(404, "NotFound")
        if hub.gated:
            return self._refuse(403, "GatedRepo")
        authorized = not hub.token or self.headers.get("Authorization") == f"Bearer {hub.token}"
        name = match[1]
        if name not in hub.repositories or not authorized:
            return self._refuse(401, "RepoNotFound")
        if match.re is _FILE:
            return self._file(name, match[2], match[3])
        known = hub.repositories[name]
        if match[3] not in known:
            return self._refuse(404, "RevisionNotFound")
        files = known[match[3]]
        if match[2] == "tree":
            return self._json([_entry(path, content) for path, content in files.items()])
        siblings = [{"rfilename": path} for path in files]
        commit = next(c for c in known if len(c) == 40 and known[c] is files)
        return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _file(self, name: str, commit: str, path: str) -> None:
        files = self.hub.repositories[name].get(commit, {})
        if path not in files or path in self.hub.gone:
            return self._refuse(404, "EntryNotFound")
        content = files[path]
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"'}
        headers["X-Linked-Size"] = str(len(content))
        if self.command == "GET":
            self.hub.downloads.append(path)
        return self._send(200, content, headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    blob = {"oid": git, "size": len(content)}
    lfs = {"oid": digest, "size": len(content), "pointerSize": 134}
    large = path.endswith((".safetensors", ".bin"))
    return {"type": "file", "path": path, **blob, **({"lfs": lfs} if large else {})}
