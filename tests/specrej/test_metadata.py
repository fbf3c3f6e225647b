"""The token and the metadata of one call."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from specrej import Client
from specrej.contracts import errors
from specrej.security import new_token
from tests.serving import listening
from tests.specrej.fakes import RECORD, SERVICE, FakeOrchestrator


async def test_a_calls_own_token_replaces_the_clients(
    orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    """Guards against two tokens in one call, and a gateway's callers that all are one tenant."""
    lines = [new_token(tenant) for tenant in ("own", "other")]
    tokens = tmp_path / "tokens"
    tokens.write_text("\n".join(line for _, line in lines))
    (own, _), (other, _) = lines
    async with (
        listening(orchestrator.service(), tokens_file=str(tokens)) as address,
        Client(address, token=own) as client,
    ):
        await client.generate("why?")
        await client.generate("why?", token=other, metadata=(("x-any", "a"),))
        async with aclosing(client.stream("why?", token=other)) as events:
            assert [event async for event in events]
        assert orchestrator.tenants == ["own", "other", "other"]
        assert await client.describe(token=other) == SERVICE
        assert await client.record("r1", token=other) == RECORD
        for bad, text in (("unknown", "unknown token"), ("a b", "one bearer token")):
            with pytest.raises(errors.Unauthenticated, match=text):
                await client.generate("why?", token=bad)
    async with Client("example.com:1") as client:
        with pytest.raises(errors.Unauthenticated, match="plaintext"):
            await client.generate("why?", token=other)


@pytest.mark.parametrize(
    "bad",
    [
        ("specrej-tenant", "M\xfcller"),
        ("a", "1\n2"),
        ("A", "1"),
        ("a-bin", "text"),
        ("authorization", "Bearer secret"),
    ],
)
async def test_metadata_that_is_not_sent(address: str, bad: tuple[str, str]) -> None:
    """Guards against an error of grpc's C code, which is none of ours, and against a token in
    plaintext."""
    async with Client(address) as client:
        for call in (client.describe(metadata=[bad]), anext(client.stream("?", metadata=[bad]))):
            with pytest.raises(errors.InvalidRequest, match=r"printable ASCII|pass token instead"):
                await call
