"""Settings that all services share: access, TLS files and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.settings import OrchestratorSettings
from specrej.settings import ServiceSettings, load
from tests.certificates import Authority, place


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """The lines on stderr of a service that refuses to start."""
    with pytest.raises(SystemExit) as ended:
        load(ServiceSettings, list(flags))
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    place(tmp_path / "tokens", '{"tenant": "a", "sha256": "' + "ab" * 32 + '"}')
    return str(tmp_path / "tokens")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "example.com"])
def test_no_port_is_open_to_the_network_by_mistake(
    capsys: pytest.CaptureFixture[str], host: str, tokens: str, tmp_path: Path
) -> None:
    """Guards against a service that is unintentionally open to the network; tokens or mutual TLS
    are enough."""
    (line,) = refusal(capsys, "--host", host)
    assert f"{host} would be open to all callers" in line
    for name in ("tokens_file", "tls_client_ca", "allow_anonymous"):
        assert name in line
    assert load(ServiceSettings, ["--host", host, "--allow-anonymous"]).allow_anonymous
    assert load(ServiceSettings, ["--host", host, "--tokens-file", tokens]).tokens_file == tokens
    authority = Authority(tmp_path)
    pair = authority.issue()
    flags = ["--tls-cert", f"{pair.cert}", "--tls-key", f"{pair.key}", "--tls-client-ca"]
    files = load(ServiceSettings, ["--host", host, *flags, f"{authority.path}"]).tls_files
    assert files and files.ca == authority.path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_is_open_unless_it_is_closed(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """Guards the demo, and against a default that overrides a flag."""
    assert load(ServiceSettings, ["--host", host]).host == host
    (line,) = refusal(capsys, "--host", host, "--no-allow-anonymous")
    assert "open to all callers" in line


def test_a_variable_that_is_no_setting_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a renamed or misspelt setting that has no effect, such as one that turns off
    the records of requests."""
    monkeypatch.setenv("SPECREJ_ORCHESTRATOR_JOURNAL_REQUESTS", "0")
    monkeypatch.setenv("SPECREJ_ORCHESTRATOR_MAX_RUNNING", "3")
    monkeypatch.setenv("SPECREJ_GENERATOR_OTHER", "1")
    assert load(OrchestratorSettings, []).max_running == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "ignored: SPECREJ_ORCHESTRATOR_JOURNAL_REQUESTS is no setting of this version"


def test_unusable_settings_stop_the_service(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokens: str
) -> None:
    """Guards against a service that starts in plaintext, or without its tokens."""
    authority = Authority(tmp_path)
    pair, ca = authority.issue(), str(authority.path)
    cert, key = str(pair.cert), str(pair.key)
    bad, gone = str(tmp_path / "bad"), str(tmp_path / "gone")
    place(tmp_path / "bad", "s3cret")
    for flags, message in (
        (
            ("--tokens-file", tokens, "--allow-anonymous"),
            "allow_anonymous has no effect with tokens_",
        ),
        (("--tokens-file", gone), "gone"),
        (("--tokens-file", bad), "bad, line 1: must be a JSON object"),
        (("--tls-key", key), "tls_cert and tls_key are needed"),
        (("--tls-client-ca", ca), "tls_cert and tls_key are needed"),
        (("--tls-cert", cert, "--tls-key", key, "--allowed-clients=a"), "needs tls_client_ca"),
        (("--allowed-clients=a, b",), "allowed_clients"),
        (("--otlp-endpoint", "collector:4317"), "otlp_endpoint"),
        (("--tls-cert", gone, "--tls-key", key), "gone"),
        (("--tls-cert", bad, "--tls-key", bad), "must be a PEM certificate"),
    ):
        (line,) = refusal(capsys, *flags)
        assert message in line
        assert "s3cret" not in line
