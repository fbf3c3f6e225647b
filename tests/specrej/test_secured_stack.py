"""All services as processes with TLS and tokens on every port, and every client of ours."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import pytest

from deploy.local.stack import Stack
from specrej.contracts import errors
from specrej.security import Credentials
from tests.certificates import Authority, place, token_line
from tests.specrej.conftest import Command
from tests.toys import TOYS


def secured(directory: Path, authority: Authority) -> dict[str, str]:
    """TLS and tokens everywhere, mutual TLS where the orchestrator calls."""
    settings = dict(TOYS)
    for name in ("generator", "reward", "orchestrator"):
        pair, prefix = authority.issue(name), f"SPECREJ_{name.upper()}_"
        settings |= {f"{prefix}TLS_CERT": str(pair.cert), f"{prefix}TLS_KEY": str(pair.key)}
        settings[f"{prefix}TOKENS_FILE"] = str(directory / f"{name}-tokens")
        inner, mine = token_line("orchestrator", "inner"), token_line("acme", "mine")
        place(directory / f"{name}-tokens", mine if name == "orchestrator" else f"{inner}\n{mine}")
    pair, prefix = authority.issue("gateway"), "SPECREJ_GATEWAY_"
    settings |= {f"{prefix}TLS_CERT": str(pair.cert), f"{prefix}TLS_KEY": str(pair.key)}
    settings[f"{prefix}ORCHESTRATOR_TLS_CA"] = str(authority.path)
    place(directory / "inner", "inner")
    pair, prefix = authority.issue("inside"), "SPECREJ_ORCHESTRATOR_BACKEND_"
    settings |= {
        f"{prefix}TLS_CA": str(authority.path),
        f"{prefix}TLS_CERT": str(pair.cert),
        f"{prefix}TLS_KEY": str(pair.key),
        f"{prefix}TOKEN_FILE": str(directory / "inner"),
        "SPECREJ_GENERATOR_TLS_CLIENT_CA": str(authority.path),
    }
    return settings


async def test_everything_works_with_tls_and_tokens(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the wiring: settings, readiness, backends, client, command line, gateway."""
    authority = Authority(tmp_path)
    environment = secured(tmp_path, authority)
    pair = authority.issue("me")
    credentials = Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)
    async with Stack(environment=environment, credentials=credentials, gateway=True) as stack:
        monkeypatch.setenv("SPECREJ_TLS_CA", str(authority.path))
        monkeypatch.setenv("SPECREJ_TOKEN", "mine")
        generate = ("generate", "why?", "--max-tokens", "16", "-n", "2")
        at_orchestrator = ("--address", stack.orchestrator_address)
        assert (await command(*generate, *at_orchestrator))[0]
        await command("score", "a", "--prompt", "why?", "--address", stack.reward_address)
        url = f"https://127.0.0.1:{stack.ports.gateway}"
        models = f"{url}/v1/models"
        assert (await asyncio.to_thread(_got, models, "mine", authority))[0] == 200
        assert (await asyncio.to_thread(_got, models, "wrong", authority))[0] == 401
        _, exposed = await asyncio.to_thread(_got, f"{url}/metrics", "", authority)
        for metric in ("certificate_life_seconds", "event_loop_lag_seconds", "files_rejected"):
            assert re.search(rf"^specrej_{metric}\S* [0-9]", exposed, re.MULTILINE), metric
        for token, message in (("wrong", "unknown token"), ("", "a token is needed")):
            monkeypatch.setenv("SPECREJ_TOKEN", token)
            with pytest.raises(errors.Unauthenticated, match=message):
                await command(*generate, *at_orchestrator)


def _got(url: str, token: str, authority: Authority) -> tuple[int, str]:
    """The status and the body of a request over HTTPS."""
    trusted = HTTPSHandler(context=ssl.create_default_context(cafile=authority.path))
    request = Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with build_opener(ProxyHandler({}), trusted).open(request, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, ""
