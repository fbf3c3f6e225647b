"""Every playbook of docs/operations.md, run against a stack with TLS and tokens."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from deploy.local.stack import Stack
from orchestrator.cache import tenant_digest
from specrej.client import Client
from specrej.contracts.errors import Unauthenticated
from specrej.security import Credentials, new_token
from tests.certificates import Authority, place
from tests.programs import ROOT, run
from tests.serving import until, until_read
from tests.toys import TOYS

_PART = (ROOT / "docs/operations.md").read_text().partition("\n## Playbooks\n")[2]
_PLAYBOOKS = dict(
    re.findall(r"^### (.+)\n(?:(?!^### )[^\0])*?^```sh\n([^`]+)^```", _PART, re.MULTILINE)
)


async def shell(title: str, variables: dict[str, str], directory: Path) -> str:
    """Run a playbook's commands; returns what they print, and fails if one of them does."""
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), **variables}
    command = ("bash", "-euc", _PLAYBOOKS[title])
    return await run(*command, folder=directory, bound_s=120, **variables)


def test_every_playbook_has_commands() -> None:
    """Guards against a section that the test below does not run."""
    titles = re.findall("^### (.+)$", _PART, re.MULTILINE)
    assert titles and list(_PLAYBOOKS) == titles


@pytest.mark.long
async def test_the_commands_do_what_they_say(tmp_path: Path) -> None:
    """Guards against instructions that fail when they are needed."""
    authority = Authority(tmp_path)
    pair, successor = authority.issue("orchestrator"), authority.issue("successor")
    own, own_line = new_token("operator")
    acme, acme_line = new_token("acmé's")
    tokens = tmp_path / "tokens"
    place(tokens, f"{own_line}\n{acme_line}\n")
    environment = {
        **TOYS,
        "SPECREJ_ORCHESTRATOR_TLS_CERT": str(pair.cert),
        "SPECREJ_ORCHESTRATOR_TLS_KEY": str(pair.key),
        "SPECREJ_ORCHESTRATOR_TOKENS_FILE": str(tokens),
    }
    trusted = Credentials(tls_ca=authority.path)
    async with (
        Stack(environment=environment, credentials=trusted) as stack,
        Client(stack.orchestrator_address, token=acme, tls_ca=authority.path) as client,
    ):
        variables = {
            "TOKENS": str(tokens),
            "TENANT": "acmé's",
            "GENERATOR": str(stack.processes["generator"]),
            "CERT": str(pair.cert),
            "KEY": str(pair.key),
            "NEW_CERT": str(shutil.copy(successor.cert, tmp_path / "new-cert")),
            "NEW_KEY": str(shutil.copy(successor.key, tmp_path / "new-key")),
            "SPECREJ_ADDRESS": stack.orchestrator_address,
            "SPECREJ_TOKEN": own,
            "SPECREJ_TLS_CA": str(authority.path),
            "SPECREJ_ORCHESTRATOR_REDIS_URL": stack.redis_url,
        }
        # Not stored at once on a slow machine: Redis has 0.25 s.
        await until_read(lambda: client.generate("why?", n=2, max_tokens=16), lambda it: it.cached)
        digest = await shell("Which tenant is it?", variables, tmp_path)
        assert digest.strip() == tenant_digest("acmé's")
        assert "toy" in await shell("Rotate a token", variables, tmp_path)
        await shell("Rotate a certificate", variables, tmp_path)
        assert pair.cert.read_bytes() == successor.cert.read_bytes()
        await shell("Drop a tenant", variables, tmp_path)
        with pytest.raises(Unauthenticated):
            await client.generate("why?", n=2, max_tokens=16)
        told = await shell("Answers in the cache are wrong", variables, tmp_path)
        assert told.startswith("1 answers deleted")
        await shell("Drain one generator", variables, tmp_path)
        await until(lambda: not psutil.pid_exists(int(variables["GENERATOR"])))
