"""The overlays and variants, each rendered once."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import OVERLAYS, VARIANTS, Manifests, rendered


@pytest.fixture(params=[*OVERLAYS, *VARIANTS])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)
