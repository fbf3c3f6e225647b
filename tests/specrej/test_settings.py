"""Settings that all services share: what may be open, and to whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrej.settings import ServiceSettings, load
from tests.certificates import Authority, place


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """What a service says that does not start."""
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
    capsys: pytest.CaptureFixture[str], host: str, tokens: str
) -> None:
    """Guards against a service that anybody who reaches it can use."""
    (line,) = told(capsys, "--host", host)
    assert f"{host} would be open to everybody" in line
    for name in ("tokens_file", "tls_client_ca", "allow_anonymous"):
        assert name in line
    assert load(ServiceSettings, ["--host", host, "--allow-anonymous"]).allow_anonymous
    assert load(ServiceSettings, ["--host", host, "--tokens-file", tokens]).tokens_file == tokens


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_loopback_is_open_unless_it_is_closed(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """Guards the demo, and against the default winning over what was said."""
    assert load(ServiceSettings, ["--host", host]).host == host
    (line,) = told(capsys, "--host", host, "--no-allow-anonymous")
    assert "open to everybody" in line


def test_tokens_and_anonymous_callers_exclude_each_other(
    capsys: pytest.CaptureFixture[str], tokens: str
) -> None:
    """Guards against tokens that look as if they were asked for."""
    (line,) = told(capsys, "--tokens-file", tokens, "--allow-anonymous")
    assert "allow_anonymous is of no use with tokens_file" in line


def test_mutual_tls_is_enough(tmp_path: Path) -> None:
    """Guards against two locks where one was wanted."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    flags = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    settings = load(
        ServiceSettings, ["--host", "0.0.0.0", *flags, "--tls-client-ca", str(authority.path)]
    )
    assert settings.tls_files
    assert settings.tls_files.ca == authority.path


def test_files_that_cannot_be_used_stop_the_service(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards against a service that starts in plaintext, or without its tokens."""
    authority = Authority(tmp_path)
    pair, other = authority.issue(), authority.issue("other")
    place(tmp_path / "bad", "s3cret")
    bad, gone = str(tmp_path / "bad"), str(tmp_path / "gone")
    for flags, accepted in (
        (("--tokens-file", gone), "gone"),
        (("--tokens-file", bad), "bad, line 1: must be a JSON object"),
        (("--tls-cert", str(pair.cert)), "go together"),
        (("--tls-key", str(pair.key)), "tls_cert and tls_key are needed"),
        (("--tls-client-ca", str(authority.path)), "tls_cert and tls_key are needed"),
        (("--tls-cert", gone, "--tls-key", str(pair.key)), "gone"),
        (("--tls-cert", str(pair.cert), "--tls-key", str(other.key)), "is not the key of"),
        (("--tls-cert", bad, "--tls-key", bad), "must be a PEM certificate"),
    ):
        (line,) = told(capsys, *flags)
        assert accepted in line
        assert "s3cret" not in line


def test_limits_have_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a limit that grpc takes for none."""
    assert len(told(capsys, "--max-message-bytes=0", "--max-metadata-bytes=-1")) == 2
