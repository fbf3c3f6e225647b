"""Models by name, from a hub on loopback with the real client library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrej_models import hub
from tests import hub as hubs
from tests.programs import Outcome, in_process

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"weights",
    "README.md": b"a card",
    "pytorch_model.bin": b"pickled",
    "modeling.py": b"raise SystemExit",
    "onnx/model.safetensors": b"a copy",
}
USED = ["config.json", "model.safetensors", "tokenizer.json"]
OR_TOKEN = ", or it needs a token: HF_TOKEN"


Pull = Callable[..., Outcome]


@pytest.fixture
def server() -> Iterator[hubs.Hub]:
    with hubs.running() as running:
        yield running


@pytest.fixture
def pull(server: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pull:
    """`specrej pull` with an empty cache and no token, in this process."""
    hubs.use(monkeypatch, server.endpoint, tmp_path)
    return lambda *arguments: in_process(hub.main, arguments)


def stored(outcome: Outcome) -> list[str]:
    """The names of the files in the directory that was printed."""
    assert outcome.returncode == 0, outcome.stderr
    directory = Path(outcome.stdout.strip())
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.*"))


def test_a_model_is_fetched_once(server: hubs.Hub, pull: Pull) -> None:
    """Guards against pickled weights, code and copies in the cache, and a second download."""
    server.add("tiny/llama", FILES)
    first = pull("tiny/llama")
    assert stored(first) == sorted(server.downloads) == USED
    server.downloads.clear()
    assert pull("tiny/llama").stdout == first.stdout
    assert not server.downloads


def test_a_revision_is_the_one_named(server: hubs.Hub, pull: Pull) -> None:
    """Guards against weights of another revision, and a branch that is never read again."""
    old = server.add("tiny/llama", FILES, "v1", "main")
    assert Path(pull("tiny/llama").stdout.strip()).name == old
    new = server.add("tiny/llama", {**FILES, "model.safetensors": b"newer"}, "main")
    for revision, commit in (("", new), ("@v1", old), (f"@{new}", new)):
        directory = Path(pull(f"tiny/llama{revision}").stdout.strip())
        assert directory.name == commit
        content = b"newer" if commit == new else b"weights"
        assert (directory / "model.safetensors").read_bytes() == content
    outcome = pull("tiny/llama@v9")
    assert (outcome.returncode, outcome.stderr) == (1, "specrej: tiny/llama has no revision v9\n")


def without(*names: str) -> dict[str, bytes]:
    return {name: content for name, content in FILES.items() if name not in names}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (without("config.json"), "has no config.json: it is not a model of transformers"),
        (without("model.safetensors"), "has no safetensors files; other weights are not loaded"),
    ],
)
def test_an_incomplete_model_is_refused(
    server: hubs.Hub, pull: Pull, files: dict[str, bytes], reason: str
) -> None:
    """Guards against a start that fails much later, and weights that hold code."""
    server.add("tiny/llama", files)
    outcome = pull("tiny/llama")
    assert (outcome.returncode, outcome.stderr) == (1, f"specrej: tiny/llama {reason}\n")
    assert not {"pytorch_model.bin", "README.md"} & set(server.downloads)


def test_a_token_is_sent_and_a_missing_one_named(
    server: hubs.Hub, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("tiny/llama", FILES)
    server.token = "secret"
    expected = f"specrej: the hub has no model tiny/llama{OR_TOKEN}\n"
    assert pull("tiny/llama") == (1, "", expected)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert pull("tiny/llama") == (1, "", expected)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert stored(pull("tiny/llama")) == USED
    monkeypatch.delenv("HF_TOKEN")
    server.gated = True
    outcome = pull("tiny/other")
    assert "tiny/other is gated: its terms must be accepted on the hub" in outcome.stderr


def test_a_stored_model_needs_no_network(
    server: hubs.Hub, pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a start that waits for the hub, and an incomplete model that starts."""
    commit = server.add("tiny/llama", FILES)
    fetched = Path(pull("tiny/llama").stdout.strip())
    not_cached = "is not in the cache: specrej pull tiny/other, with HF_HUB_OFFLINE=0, fetches it"
    for is_offline, reason in ((False, ": the download failed"), (True, f" {not_cached}")):
        hubs.use(monkeypatch, "http://127.0.0.1:9", tmp_path, is_offline=is_offline)
        for model in ("tiny/llama", f"tiny/llama@{commit}"):
            assert hub.find(model).directory == fetched
        with pytest.raises(hub.HubError, match=f"tiny/other{reason}"):
            hub.find("tiny/other")
    (fetched / "model.safetensors").unlink()
    with pytest.raises(hub.HubError, match="tiny/llama is not in the cache"):
        hub.find("tiny/llama")


def test_a_failed_update_keeps_the_stored_model(
    server: hubs.Hub, pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a service against a start without a model, after a newer one could not be fetched."""
    server.add("tiny/llama", FILES)
    fetched = Path(pull("tiny/llama").stdout.strip())
    server.add("tiny/llama", {**FILES, "model.safetensors": b"newer"}, "main")
    server.gone.add("model.safetensors")
    outcome = pull("tiny/llama")
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert "the download failed: " in outcome.stderr and len(outcome.stderr.splitlines()) == 1
    hubs.use(monkeypatch, "http://127.0.0.1:9", tmp_path, is_offline=True)
    assert hub.find("tiny/llama").directory == fetched
    server.gone.clear()
    hubs.use(monkeypatch, server.endpoint, tmp_path)
    assert stored(pull("tiny/llama")) == USED


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("org/name", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("/models/llama", False),
        (".models/llama", False),
        ("../org/name", False),
        ("org/name/sub", False),
        ("org/na me", False),
        ("https://example.com/org", False),
    ],
)
def test_names(text: str, is_name: bool) -> None:
    """Guards against a path that is sent to a hub, and a name read as a path."""
    assert hub.is_name(text) == is_name
