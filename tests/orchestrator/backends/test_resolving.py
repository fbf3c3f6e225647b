"""The resolver: names stand for all of their addresses, and failed lookups remove none."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from orchestrator.backends.resolving import Resolver, Target


@pytest.fixture
async def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, in place of the system's lookup."""
    by_name: dict[str, list[str]] = {}

    async def lookup(host: str, port: int, **_: Any) -> list[Any]:
        if host not in by_name:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                *(socket.SOCK_STREAM, 6, ""),
                (address, port),
            )
            for address in by_name[host]
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    return by_name


@pytest.mark.parametrize(
    ("backend", "targets"),
    [
        ("two:1", {"10.0.0.1:1", "10.0.0.2:1"}),
        # A machine with an address of each kind counts once.
        ("both:1", {"127.0.0.1:1"}),
        ("six:1", {"[fd00::1]:1"}),
    ],
)
async def test_a_name_has_all_its_addresses(
    addresses: dict[str, list[str]], backend: str, targets: set[str]
) -> None:
    addresses |= {
        "two": ["10.0.0.1", "10.0.0.2"],
        "both": ["::1", "127.0.0.1"],
        "six": ["fd00::1"],
        "other": ["10.0.0.3"],
    }
    name = backend.removesuffix(":1")
    expected = {Target(target, name) for target in targets} | {Target("10.0.0.3:1", "other")}
    assert await Resolver([backend, "other:1"]).resolve() == expected


async def test_a_failed_lookup_keeps_the_last_addresses(addresses: dict[str, list[str]]) -> None:
    """A headless Service without ready pods, or without its name server, is an unknown name."""
    resolver = Resolver(["generators:1"])
    assert await resolver.resolve() == frozenset()
    addresses["generators"] = ["10.0.0.1"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    del addresses["generators"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    addresses["generators"] = ["10.0.0.2"]
    assert await resolver.resolve() == {Target("10.0.0.2:1", "generators")}


async def test_an_invalid_name_does_not_end_the_lookup_of_others() -> None:
    """The system's lookup raises UnicodeError for it. Addresses are names of themselves."""
    targets = {Target("10.0.0.9:1", "10.0.0.9"), Target("[::1]:2", "[::1]")}
    assert await Resolver(["a..b:1", "10.0.0.9:1", "[::1]:2"]).resolve() == targets
