"""Who is there, who serves, and who is of the version that counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.backends.fleet import Fleet
from orchestrator.backends.generators import FleetGenerator
from orchestrator.remote import RemoteGenerator
from specrej.contracts import GeneratorDescription, Sampling
from specrej.errors import Unavailable
from tests.orchestrator.backends.fleets import (
    PROMPT,
    QUICK,
    Known,
    backends,
    generators,
    target_of,
)
from tests.orchestrator.services import HeldGenerator
from tests.serving import until


class _Version(HeldGenerator):
    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint

    async def describe(self) -> GeneratorDescription:
        return replace(await super().describe(), fingerprint=self.fingerprint)


def counted(fleet: Fleet[RemoteGenerator]) -> tuple[int, ...]:
    """Serving, of another version, away."""
    return tuple(fleet.counts().values())


async def test_backends_appear_and_go() -> None:
    one, two = HeldGenerator(), HeldGenerator()
    async with backends(one, two) as servers:
        known = Known(servers[:1])
        async with generators(known, QUICK) as fleet:
            known.targets |= {target_of(servers[1])}
            await until(lambda: counted(fleet) == (2, 0, 0))
            await servers[0].kill()
            await until(lambda: counted(fleet) == (1, 0, 1))
            known.targets -= {target_of(servers[0])}
            await until(lambda: counted(fleet) == (1, 0, 0))


async def test_one_that_came_back_is_used_again() -> None:
    one = HeldGenerator()
    async with backends(one) as servers, generators(Known(servers), QUICK) as fleet:
        await servers[0].kill()
        await until(lambda: counted(fleet) == (0, 0, 1))
        await servers[0].start()
        await until(lambda: counted(fleet) == (1, 0, 0))


async def test_whoever_has_a_session_is_kept_though_its_name_is_gone() -> None:
    """Guards against a pod that is taken out of the Service and cut off in the middle of a request.

    It serves on until its sessions are over; only then does it stop to serve.
    """
    one = HeldGenerator()
    async with backends(one) as servers:
        known = Known(servers)
        async with generators(known, QUICK) as fleet:
            opening = FleetGenerator(fleet).open(PROMPT, 2, Sampling(max_tokens=8), 4)
            async with opening as session:
                known.targets = frozenset()
                fleet.members()[0].suspect(Unavailable("it drains"))
                assert (await session.extend(4)).num_tokens == 4
                assert sum(fleet.counts().values()) == 1
            await servers[0].kill()
            await until(lambda: sum(fleet.counts().values()) == 0)


async def test_most_are_of_the_version_that_counts() -> None:
    """An answer, and its place in the cache, is of one version; so is a request in parts."""
    old, new = [_Version("old"), _Version("old")], [_Version("new"), _Version("new")]
    async with backends(*old, *new) as servers:
        known = Known(servers[:3])
        async with generators(known, QUICK) as fleet:
            generator = FleetGenerator(fleet)
            assert len(fleet.members()) == 2
            assert (await generator.describe()).fingerprint == "old"
            known.targets |= {target_of(servers[3])}
            await until(lambda: counted(fleet) == (2, 2, 0))
            # As many of one as of the other: nothing changes.
            assert (await generator.describe()).fingerprint == "old"
            await servers[0].kill()
            await until(lambda: counted(fleet) == (2, 1, 1))
            assert (await generator.describe()).fingerprint == "new"
            async with generator.open(PROMPT, 2, Sampling(max_tokens=8), 4):
                assert sum(each.toy.ledger.num_sessions for each in new) == 1


async def test_no_session_goes_on_with_another_model() -> None:
    """Guards against an answer that is begun by one version and ended by another."""
    old, new = _Version("old"), _Version("new")
    opening = (PROMPT, 2, Sampling(max_tokens=8), 4)
    async with backends(old, new) as servers:
        known = Known(servers[:1])
        async with (
            generators(known, QUICK) as fleet,
            FleetGenerator(fleet).open(*opening) as session,
        ):
            known.targets |= {target_of(servers[1])}
            await until(lambda: counted(fleet) == (1, 1, 0))
            await servers[0].kill()
            await until(lambda: counted(fleet) == (1, 0, 1))
            with pytest.raises(Unavailable):
                await session.extend(4)
        assert new.num_opened == 0
