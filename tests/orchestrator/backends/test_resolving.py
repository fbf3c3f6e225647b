"""Names stand for all of their addresses; a name server's trouble loses nobody."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from orchestrator.backends.resolving import Resolver, Target


class Names:
    """Stands in for the system's lookup."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, list[str]] = {}
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.known[host]]
        return [
            (family, socket.SOCK_STREAM, 6, "", (each, port))
            for family, each in zip(families, self.known[host], strict=True)
        ]


async def test_a_name_is_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.known["generators"] = ["10.0.0.1", "10.0.0.2"]
    found = await Resolver(["generators:50051", "10.0.0.9:1"]).resolve()
    assert found == {
        Target("10.0.0.1:50051", "generators"),
        Target("10.0.0.2:50051", "generators"),
        Target("10.0.0.9:1", "10.0.0.9"),
    }


async def test_a_machine_with_an_address_of_each_kind_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch)
    names.known["both"] = ["::1", "127.0.0.1"]
    names.known["six"] = ["fd00::1"]
    assert await Resolver(["both:1"]).resolve() == {Target("127.0.0.1:1", "both")}
    assert await Resolver(["six:1"]).resolve() == {Target("[fd00::1]:1", "six")}


async def test_who_was_known_stays_while_the_name_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless Service without ready pods, or a name server that is away, is an unknown name."""
    names = Names(monkeypatch)
    resolver = Resolver(["generators:1"])
    assert await resolver.resolve() == frozenset()
    names.known["generators"] = ["10.0.0.1"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    del names.known["generators"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    names.known["generators"] = ["10.0.0.2"]
    assert await resolver.resolve() == {Target("10.0.0.2:1", "generators")}


async def test_a_name_that_cannot_be_one_is_nobody() -> None:
    """Guards against one bad name that ends the search for all others."""
    assert await Resolver(["a..b:1", "10.0.0.9:1"]).resolve() == {Target("10.0.0.9:1", "10.0.0.9")}
