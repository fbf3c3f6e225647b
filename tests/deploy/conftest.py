"""The overlays, each rendered once."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import OVERLAYS, Manifests, rendered


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)
