"""The presets and variants, each rendered once."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import PRESETS, VARIANTS, Manifests, rendered


@pytest.fixture(params=[*PRESETS, *VARIANTS])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)
