"""All services as processes with TLS and tokens on every port, and every client of ours."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

import pytest

from specrej import Client, errors
from specrej.credentials import Credentials
from specrej.stack import Stack
from tests.certificates import Authority, place

LOCUST = str(Path(sys.executable).parent / "locust")
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}


def entry(tenant: str, token: str) -> str:
    return json.dumps({"tenant": tenant, "sha256": hashlib.sha256(token.encode()).hexdigest()})


async def run(*command: str, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **environment}, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def secured(directory: Path, authority: Authority) -> dict[str, str]:
    """TLS and tokens everywhere, mutual TLS where the orchestrator calls."""
    settings = dict(TOYS)
    for name in ("generator", "reward", "orchestrator"):
        pair, prefix = authority.issue(name), f"SPECREJ_{name.upper()}_"
        settings |= {f"{prefix}TLS_CERT": str(pair.cert), f"{prefix}TLS_KEY": str(pair.key)}
        settings[f"{prefix}TOKENS_FILE"] = str(directory / f"{name}-tokens")
        inner, mine = entry("orchestrator", "inner"), entry("acme", "mine")
        place(directory / f"{name}-tokens", mine if name == "orchestrator" else f"{inner}\n{mine}")
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


async def test_everything_works_with_tls_and_tokens(tmp_path: Path) -> None:
    """Guards the wiring: settings, readiness, backends, client, command line, load test."""
    authority = Authority(tmp_path)
    environment = secured(tmp_path, authority)
    pair = authority.issue("me")
    credentials = Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)
    variables = {"SPECREJ_TLS_CA": str(authority.path), "SPECREJ_TOKEN": "mine"}
    async with Stack(environment=environment, credentials=credentials) as stack:
        await _clients(stack, authority, tmp_path)
        await _commands(stack, variables)
        code, out, err = await run(
            *(LOCUST, "-f", "loadtest/locustfile.py", "--headless", "--users", "1"),
            *("--run-time", "2s", "--stop-timeout", "30", "--json"),
            *("--host", stack.orchestrator_address),
            **variables,
        )
        assert code == 0, err
        assert json.loads(out)[0]["num_failures"] == 0


async def _clients(stack: Stack, authority: Authority, directory: Path) -> None:
    address = stack.orchestrator_address
    async with Client(address, token="mine", tls_ca=authority.path) as client:
        assert (await client.generate("why?", n=2, max_tokens=16)).best.text
        # A new token of the orchestrator's own, in force at once on both sides.
        for name in ("generator", "reward"):
            place(directory / f"{name}-tokens", entry("orchestrator", "renewed"))
        with pytest.raises(errors.Unavailable, match="does not let this service in"):
            await client.generate("why not?", n=2, max_tokens=16, seed=2)
        place(directory / "inner", "renewed")
        assert (await client.generate("why not?", n=2, max_tokens=16, seed=3)).best.text
    for name in ("generator", "reward"):
        place(directory / f"{name}-tokens", f"{entry('o', 'renewed')}\n{entry('acme', 'mine')}")


async def _commands(stack: Stack, variables: Mapping[str, str]) -> None:
    specrej = (sys.executable, "-m", "specrej.cli")
    asked = (*specrej, "generate", "why?", "--max-tokens", "16", "-n", "2")
    there = ("--address", stack.orchestrator_address)
    code, out, _ = await run(*asked, *there, **variables)
    assert (code, bool(out)) == (0, True)
    score = (*specrej, "score", "a", "--prompt", "why?", "--address", stack.reward_address)
    assert (await run(*score, **variables))[0] == 0
    code, _, err = await run(*asked, *there, **{**variables, "SPECREJ_TOKEN": "wrong"})
    assert (code, err.splitlines()[-1]) == (6, "specrej: nobody was given this token")
    code, _, err = await run(*asked, *there, **{**variables, "SPECREJ_TOKEN": ""})
    assert code == 6
    assert "a token is needed" in err
